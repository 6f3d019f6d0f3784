"""What the ranks share: the staleness gate and the account of tickets under random interleavings and interruptions, the
transport of rollouts, and the way of the weights. Engines and learner are simulated, all between them is real."""

import collections
import hashlib
import json
import random
import threading
import types
import weakref
import zlib

import msgspec
import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import checkpoint
import log
import sync
import train
import trajectory
from configs import schema

# ----------------------------------------------------------------------------------------- a run in one process


class Life:
    """One life of a run, from a start or a resume to a crash: fake engines, a fake network, and the real Learner's
    account (Buffer, RunState, open_run, save) with everything cut out that touches weights, sockets or disks."""

    def __init__(self, cfg: schema.Config, progress: checkpoint.Progress, rng: random.Random, engines: int, room: int):
        self.cfg, self.rng, self.room = cfg, rng, room
        self.network: list[trajectory.Group] = []  # sent, not received
        self.saved = None  # as it lies on disk
        self.events: list[tuple[int, str]] = []  # (ticket, what became of it), in order
        self.events_at_save = 0
        self.claimed: list[int] = []
        self.owed, self.fresh = progress.redo, progress.next_ticket
        self.held = [-1] * engines
        self.running: list[list[tuple[int, int]]] = [[] for _ in range(engines)]  # (ticket, version at its start)

        learner = self.learner = train.Learner.__new__(train.Learner)
        learner.config, learner.progress, learner.step, learner.k = cfg, progress, progress.step, progress.clip_k
        learner.ranks = types.SimpleNamespace(is_first=True, store=dist.HashStore(), record=lambda event, **facts: None)
        learner.watchdog, learner.moves = types.SimpleNamespace(saw=lambda progress: None), 0
        learner.prompts = types.SimpleNamespace(vocab_size=100, routing=None, tokenizer=None)
        learner.policy = learner.optimizer = None
        learner.plan, learner.saved_step = [], progress.step if progress.next_ticket else -1
        learner.version = learner.step // cfg.train.steps_per_update
        learner.state = self.state = sync.RunState(learner.ranks.store, cfg.staleness.max, cfg.groups_per_update)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trajectory, "Inbox", lambda store: types.SimpleNamespace(receive=self.receive))
            patch.setattr(log, "RunLog", lambda *args: types.SimpleNamespace(rollouts=lambda *args: None))
            learner.open_run()
        self.state.open()
        self.buffer = learner.buffer
        self.counted = learner.step * cfg.train.groups_per_step + len(progress.waiting)
        self.learned = learner.step * cfg.train.groups_per_step
        self.state.announce(learner.version)

    def receive(self, timeout):
        """Messages of several engines arrive in any order; not all of them yet."""
        self.rng.shuffle(self.network)
        for _ in range(self.rng.randint(0, len(self.network))):
            group = self.network.pop()
            if group.dropped:
                self.events.append((group.ticket, group.dropped))
            yield group

    # -- what may happen

    def load(self, e):
        self.held[e] = self.state.read().version

    def start(self, e):
        if len(self.running[e]) < self.room and (ticket := self.state.claim(e, self.held[e])) is not None:
            self.claimed.append(ticket)
            self.running[e].append((ticket, self.held[e]))

    def finish(self, e, gated=0.3):
        """A group ends. Its tokens are of every version that the engine held meanwhile."""
        if not self.running[e]:
            return
        ticket, began = self.running[e].pop(self.rng.randrange(len(self.running[e])))
        versions = range(began, self.held[e] + 1)
        rng = np.random.default_rng(ticket)
        group = tiny.group(rng, ticket, response=len(versions), version=np.array(versions))
        if self.rng.random() < gated:
            group.dropped = "zero_variance"
            self.state.give_back()
        self.network.append(group)

    def learn(self):
        """As Learner.next_batch and Learner.learn do it."""
        learner, need = self.learner, self.cfg.train.groups_per_step
        learner.receive(0)
        waiting = set(self.buffer.waiting)
        self.buffer.drop_stale(learner.version)
        self.events += [(ticket, "stale") for ticket in waiting - set(self.buffer.waiting)]
        if len(self.buffer.waiting) < need:
            return
        groups = self.buffer.take(need)
        assert [g.ticket for g in groups] == sorted(self.buffer.waiting)[:need], "the groups begun first go first"
        for g in groups:
            staleness = [learner.version - v for r in g.rollouts for v in r.versions[r.mask == 1]]
            assert 0 <= max(staleness) <= self.cfg.staleness.max
        if self.rng.random() < 0.2:
            return  # the step was cut short
        self.buffer.learned(groups)
        self.events += [(g.ticket, "learned") for g in groups]
        self.learned += need
        learner.step += 1
        if learner.step % self.cfg.train.steps_per_update == 0:
            learner.version += 1
            self.state.announce(learner.version)

    def save(self):
        def to_disk(config, policy, optimizer, progress, tokenizer, ranks):
            under_way = [t for running in self.running for t, _ in running] + [g.ticket for g in self.network]
            owed = self.owed[len(self.claimed) :]
            assert progress.redo == sorted(under_way + owed), "what is done again is what was not finished, and no more"
            assert progress.next_ticket == max([self.fresh, *(t + 1 for t in self.claimed)])
            account = {name: value for name, value in vars(progress).items() if name != "waiting"}
            self.saved = json.dumps(account), trajectory.encode(progress.waiting)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "save", to_disk)
            saved_before = self.saved
            self.learner.save()
        if self.saved is not saved_before:
            self.events_at_save = len(self.events)

    def anything(self):
        e = self.rng.randrange(len(self.held))
        self.rng.choice([self.load, self.start, self.start, self.finish, lambda e: self.learn()])(e)
        self.check()

    def fairly(self):
        """Everybody does what there is to do."""
        for e in range(len(self.held)):
            self.load(e)
            for _ in range(self.room):
                self.start(e)
            while self.running[e]:
                self.finish(e, gated=0.0)
        self.learn()
        self.check()

    # -- what must hold at any time

    def check(self):
        seen = self.state.read()
        in_flight = sum(map(len, self.running)) + sum(not g.dropped for g in self.network)
        assert seen.started == self.learned + seen.returned + len(self.buffer.waiting) + in_flight
        assert seen.started == self.counted + len(self.claimed)
        outstanding = len(self.buffer.waiting) + in_flight
        assert outstanding <= (self.cfg.staleness.max + 1) * self.cfg.groups_per_update, "the buffer is bounded"
        if self.cfg.staleness.max == 0:
            assert not any(what == "stale" for _, what in self.events), "strictly on-policy work is never thrown away"


RUNS = dict(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 4),
    per_step=st.integers(1, 4),
    per_update=st.integers(1, 3),
    engines=st.integers(1, 3),
    room=st.integers(1, 6),
)


def run_config(staleness, per_step, per_update):
    cfg = schema.Config()
    cfg.staleness.max, cfg.train.groups_per_step, cfg.train.steps_per_update = staleness, per_step, per_update
    return cfg


@settings(max_examples=60, deadline=None)
@given(**RUNS)
def test_gate_bounds_staleness_and_never_locks(seed, staleness, per_step, per_update, engines, room):
    cfg = run_config(staleness, per_step, per_update)
    life = Life(cfg, checkpoint.Progress(), random.Random(seed), engines, room)
    for _ in range(300):
        life.anything()
    assert sorted(life.claimed) == list(range(len(life.claimed))), "every ticket is handed out once"
    before = life.learner.step
    for _ in range(40 * per_step):
        life.fairly()
    assert life.learner.step >= before + 3, "full batches keep coming"


def test_gate_table():
    """max_staleness 1, 4 groups per update: 8 groups may start under version 0, 12 under version 1."""
    state = sync.RunState(dist.HashStore(), 1, 4)
    state.create(counted=0, next_ticket=0, redo=[], plan=[])
    state.open()
    assert state.claim(1, -1) is None, "nothing starts before the first publication"
    state.announce(0)
    assert state.claim(1, -1) is None, "nor before this engine holds it"
    assert [state.claim(1, 0) for _ in range(10)] == [*range(8), None, None]
    state.give_back(2)
    assert [state.claim(2, 0) for _ in range(3)] == [8, 9, None]
    state.announce(1)
    assert state.claim(2, 0) is None, "an engine that is behind waits for its weights"
    assert [state.claim(2, 1) for _ in range(5)] == [*range(10, 14), None]


def test_threads_with_their_own_connections_never_get_the_same_ticket():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    state = sync.RunState(dist.PrefixStore("run", server), 0, 150)
    state.create(counted=0, next_ticket=0, redo=[], plan=[])
    state.announce(0)
    claimed = collections.defaultdict(list)
    together = threading.Barrier(4)

    def engine(rank):
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        mine = sync.RunState(dist.PrefixStore("run", client), 0, 150)
        mine.open()
        claimed[rank].append(mine.claim(rank, 0))
        together.wait(60)  # so that no thread is done before another has begun
        while (ticket := mine.claim(rank, 0)) is not None:
            claimed[rank].append(ticket)

    threads = [threading.Thread(target=engine, args=(rank,)) for rank in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(t for tickets in claimed.values() for t in tickets) == list(range(150))


def test_two_racers_that_read_the_same_state_do_not_both_win():
    """Both saw that 0 groups are started before either wrote."""
    state = sync.RunState(dist.HashStore(), 0, 10)
    state.create(counted=0, next_ticket=0, redo=[], plan=[])
    state.open()
    state.announce(0)
    store = state.store
    other = iter([lambda: state.claim(2, 0)])  # rank 2 wins between rank 1's read and its write

    def compare_set(*args):
        state.store = store
        assert next(other)() == 0
        return store.compare_set(*args)

    state.store = types.SimpleNamespace(multi_get=store.multi_get, get=store.get, compare_set=compare_set)
    assert state.claim(1, 0) == 1, "ticket 0 is rank 2's"


# ---------------------------------------------------------------------------------------------------------- resuming


@settings(max_examples=60, deadline=None)
@given(**RUNS, lives=st.integers(2, 4))
def test_interrupted_run_settles_every_prompt_exactly_once(seed, lives, staleness, per_step, per_update, engines, room):
    cfg = run_config(staleness, per_step, per_update)
    rng = random.Random(seed)
    progress, history = checkpoint.Progress(), []
    for n in range(lives):
        life = Life(cfg, progress, rng, engines, room)
        for _ in range(rng.randint(0, 200)):
            life.anything()
            if rng.random() < 0.05:
                life.save()
        if n == lives - 1:
            break
        fresh = range(life.fresh, life.fresh + len(life.claimed))
        assert life.claimed == [*life.owed, *fresh][: len(life.claimed)], "what is owed comes first"
        # a crash: what came after the last checkpoint never happened
        history += life.events[: life.events_at_save]
        if life.saved:
            account, waiting = life.saved
            progress = checkpoint.Progress(**json.loads(account), waiting=trajectory.decode_groups(waiting))

    for e in range(engines):  # what runs ends, and arrives
        while life.running[e]:
            life.finish(e)
    while life.network:
        life.learner.receive(0)
    history += life.events
    for _, g in sorted(life.buffer.waiting.items()):
        history.append((g.ticket, "waiting"))
    tickets = sorted(ticket for ticket, _ in history)
    assert len(set(tickets)) == len(tickets), "none twice"
    owed = life.owed[len(life.claimed) :]  # the last life ended before it came to them
    assert sorted(tickets + owed) == list(range(len(tickets) + len(owed))), "none missing"
    learned = sum(what == "learned" for _, what in history)
    assert learned == life.learner.step * per_step


def test_group_that_arrives_twice_is_an_error():
    life = Life(run_config(1, 2, 1), checkpoint.Progress(), random.Random(0), 1, 4)
    rng = np.random.default_rng(0)
    for ticket, dropped in ((0, "early_gate"), (1, None), (2, "early_gate")):
        g = tiny.group(rng, ticket)
        g.dropped = dropped
        life.buffer.add(g)
    assert (life.buffer.low, life.buffer.done, list(life.buffer.waiting)) == (1, {2}, [1])
    for ticket in (0, 1, 2):
        with pytest.raises(ValueError, match=f"ticket {ticket} .* twice"):
            life.buffer.add(tiny.group(rng, ticket))


# --------------------------------------------------------------------------------------------------------- transport


def test_groups_survive_the_way_with_their_types():
    rng = np.random.default_rng(0)
    group = tiny.group(rng, 7, size=3, kept=4)
    group.prompt = [{"role": "user", "content": "1+1="}]
    group.rollouts[0].failure = "the grader timed out"
    (copy,) = trajectory.decode_groups(trajectory.encode([group]))
    for made in (trajectory.decode(trajectory.encode(group)), copy, trajectory.decode(trajectory.encode(copy))):
        for name in ("ticket", "engine", "prompt_id", "source", "prompt", "dropped"):
            assert getattr(made, name) == getattr(group, name)
        for sent, got in zip(group.rollouts, made.rollouts, strict=True):
            for name in sent.__struct_fields__:
                before, after = getattr(sent, name), getattr(got, name)
                if isinstance(before, np.ndarray):
                    assert after.dtype == before.dtype and after.tobytes() == before.tobytes(), name
                else:
                    assert after == before, name
            got.check(100)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), vocab=st.sampled_from([2, 300, 49152, 300_000]), kept=st.integers(1, 300),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
)  # fmt: skip
def test_masks_come_out_as_they_went_in(seed, vocab, kept, lengths):
    rng = np.random.default_rng(seed)
    rollouts = [tiny.rollout(rng, int(rng.integers(1, 5)), n, vocab=vocab, kept=1) for n in lengths]
    for r in rollouts:  # any ascending ids that hold the sampled one
        sets = [np.union1d(rng.integers(0, vocab, int(rng.integers(0, kept))), t) for t in r.tokens[r.mask == 1]]
        r.kept_counts[r.mask == 1] = [len(s) for s in sets]
        r.kept_ids = np.concatenate(sets).astype(np.int32)
    group = trajectory.Group(0, 0, "p", "p", "q", rollouts)
    before = [(r.kept_counts.copy(), r.kept_ids.copy()) for r in rollouts]
    made = trajectory.decode(trajectory.encode(group))
    for (counts, ids), sent, got in zip(before, group.rollouts, made.rollouts, strict=True):
        for r in (sent, got):
            r.check(vocab)
            assert r.kept_ids.dtype == np.int32 and r.kept_ids.tolist() == ids.tolist()
            assert r.kept_counts.dtype == np.uint16 and r.kept_counts.tolist() == counts.tolist()
    assert made.mask_bytes == len(trajectory.pack_masks(rollouts)) and made.masks is None


def test_masks_that_do_not_fit_are_an_error():
    group = tiny.group(np.random.default_rng(0), 0, kept=4)
    packed, more = trajectory.pack_masks(group.rollouts), tiny.group(np.random.default_rng(0), 0, size=3, kept=4)
    content = zlib.decompress(packed)
    wrong = [(packed, more), (packed[:-1], group), (b"", group), (zlib.compress(content + b"\0"), group)]
    wrong += [(packed + b"\0", group), (zlib.compress(bytes(1 << 28)), group)]  # the last is 256 MB if one lets it
    for masks, other in wrong + [(zlib.compress(content[:-1]), group)]:
        with pytest.raises(msgspec.DecodeError):
            trajectory.unpack_masks(masks, other.rollouts)
    group.rollouts[1].kept_counts = group.rollouts[1].kept_ids = None
    with pytest.raises(ValueError, match="1 of 2 rollouts"):
        trajectory.encode(group)


@pytest.mark.parametrize(
    "message",
    [
        trajectory.EvalPart(20, 1, 3, ["a", "b"], [0.5, 1.0]),
        trajectory.EngineStats(1, 2.5, 1.5, 100, 50, 25, 0.125),
        tiny.group(np.random.default_rng(0), 3),
    ],
    ids=lambda m: type(m).__name__,
)
def test_message_that_is_cut_short_or_disturbed_is_an_error(message):
    content = trajectory.encode(message)
    assert type(trajectory.decode(content)) is type(message)
    for n in range(len(content)):
        with pytest.raises(msgspec.DecodeError):
            trajectory.decode(content[:n])
    with pytest.raises(msgspec.DecodeError):
        trajectory.decode(content + b"\x01")
    with pytest.raises(msgspec.DecodeError):
        trajectory.decode(content.replace(type(message).__name__.encode(), b"X" * len(type(message).__name__)))


def with_change(**change):
    """A rollout (prompt 3, response 5) with some parts replaced."""
    r = tiny.rollout(np.random.default_rng(0), kept=2)
    for name, value in change.items():
        before = getattr(r, name)
        setattr(r, name, value(before.copy()) if callable(value) else value)
    return r


def put(at, value):
    def change(array):
        array[at] = value
        return array

    return change


MALFORMED = {
    "tokens longer": dict(tokens=lambda a: np.r_[a, a[:1]]),
    "mask shorter": dict(mask=lambda a: a[:-1]),
    "logprobs shorter": dict(behaviour_logp=lambda a: a[:-1]),
    "versions shorter": dict(versions=lambda a: a[:-1]),
    "nothing sampled": dict(mask=lambda a: a * 0),
    "empty": {n: np.zeros(0, np.int32) for n in ("tokens", "mask", "behaviour_logp", "versions")},
    "logprob NaN": dict(behaviour_logp=put(4, np.nan)),
    "logprob -inf": dict(behaviour_logp=put(4, -np.inf)),
    "logprob above 0": dict(behaviour_logp=put(4, 0.5)),
    "id beyond the vocabulary": dict(tokens=put(5, 100)),
    "id of the prompt beyond the vocabulary": dict(tokens=put(0, 100)),
    "negative id": dict(tokens=put(5, -1)),
    "version missing": dict(versions=put(6, -1)),
    "first token sampled": dict(mask=put(0, 1), versions=put(0, 0), kept_ids=None, kept_counts=None),
    "mask neither 0 nor 1": dict(mask=put(2, 2), kept_ids=None, kept_counts=None),
    "score NaN": dict(task=np.nan),
    "reward infinite": dict(reward=np.inf),
    "kept ids too few": dict(kept_ids=lambda a: a[:-1]),
    "kept ids too many": dict(kept_ids=lambda a: np.r_[a, a[:1]]),
    "kept count 0": dict(kept_counts=put(5, 0), kept_ids=lambda a: a[:-1]),
    "kept counts shorter": dict(kept_counts=lambda a: a[:-1]),
    "kept id beyond the vocabulary": dict(kept_ids=put(1, 100)),
    "kept ids missing": dict(kept_ids=None),
    "kept counts missing": dict(kept_counts=None),
    "kept id twice": dict(kept_ids=lambda a: np.r_[a[0], a[1], a[1], a[3:]]),
    "kept ids descend": dict(kept_ids=lambda a: np.r_[a[0], a[2], a[1], a[3:]]),
    "sampled id not kept": dict(kept_ids=lambda a: np.r_[(a[:1] + 1) % 100, a[1:]]),
}


def test_well_formed_rollouts_pass():
    with_change().check(100)
    with_change(kept_ids=None, kept_counts=None).check(100)
    with_change(behaviour_logp=put(0, np.nan)).check(100)  # of the prompt: nobody reads it


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_rollout_is_refused_and_stops_the_buffer(kind):
    r = with_change(**MALFORMED[kind])
    with pytest.raises(ValueError, match="^rollout "):
        r.check(100)
    life = Life(run_config(1, 2, 1), checkpoint.Progress(), random.Random(0), 1, 4)
    with pytest.raises(ValueError, match="^rollout "):
        life.buffer.add(trajectory.Group(0, 0, "p/0", "p", "question", [with_change(), r]))
    assert not life.buffer.waiting


# ----------------------------------------------------------------------------------------------------------- weights


def test_buckets_hold_every_parameter_once_within_their_size():
    shapes = {"a": (10,), "b": (7, 3), "c": (100, 5), "d": (), "e": (1,), "f": (2, 2)}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        plan = sync.plan_buckets(shapes, dtype, 100)
        assert [s.name for bucket in plan for s in bucket] == list(shapes), "in order, so that every rank gathers alike"
        for bucket in plan:
            assert sync.bucket_nbytes(bucket) <= 100 or len(bucket) == 1
            at = 0
            for s in bucket:
                assert tuple(s.shape) == shapes[s.name] and s.start == at and s.nbytes == size * int(np.prod(s.shape))
                at += s.nbytes
        assert [s.name for s in next(b for b in plan if b[0].name == "c")] == ["c"], "a large one travels alone"


def send_or_receive(cfg, ranks, bucket_bytes):
    """Learner ranks: publish slightly disturbed weights. Engine ranks: receive them. What was sent or got, in bytes."""
    if ranks.role.kind == "learner":
        policy = train.load_policy(cfg, ranks)
        parameters = sync.published_parameters(policy.lm)
        with torch.no_grad():
            for p in policy.parameters():
                p.to_local().add_(1 / 3)  # not representable in bfloat16
    else:
        parameters = sync.published_parameters(AutoModelForCausalLM.from_pretrained(cfg.model.path))
    plan = sync.plan_buckets({name: tuple(p.shape) for name, p in parameters.items()}, cfg.model.dtype, bucket_bytes)
    assert len(plan) > 5
    if ranks.role.kind == "learner":
        gathered, buffers = [], []
        real_full_tensor, real_empty = sync.full_tensor, torch.empty

        def full_tensor(p):
            assert sum(ref() is not None for ref in gathered) <= 1, "whole parameters pile up"
            full = real_full_tensor(p)
            gathered.append(weakref.ref(full))
            return full

        def empty(*args, **options):
            made = real_empty(*args, **options)
            if options.get("dtype") == torch.uint8:
                buffers.append(made.nbytes)
            return made

        sync.full_tensor, torch.empty = full_tensor, empty
        sync.send_weights(parameters, plan, ranks, 0)
        sync.full_tensor, torch.empty = real_full_tensor, real_empty
        if ranks.is_first:
            assert len(gathered) == len(parameters)
            assert sum(buffers) == 2 * max(sync.bucket_nbytes(b) for b in plan)
        else:
            assert not buffers
        dtype = getattr(torch, cfg.model.dtype)
        return {name: as_bytes(real_full_tensor(p).to(dtype)) for name, p in parameters.items()}
    received = {}
    assert sync.receive_version(0, ranks) == 0
    for bucket in plan:
        flat = torch.empty(sync.bucket_nbytes(bucket), dtype=torch.uint8)
        dist.broadcast(flat, 0, ranks.weights)
        received |= {name: as_bytes(tensor) for name, tensor in sync.unpack(flat, bucket).items()}
    return received


def as_bytes(tensor):
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), content


@pytest.mark.parametrize(
    "trainers, engines, dtype", [(1, 1, "float32"), (1, 2, "bfloat16"), (2, 1, "bfloat16"), (2, 2, "float32")]
)
def test_weights_arrive_bit_for_bit_in_two_buckets_of_memory(trainers, engines, dtype, model_dir, tmp_path):
    overrides = [f"layout.trainers={trainers}", f"model.dtype={dtype}"]
    cfg = tiny.config(model_dir, tmp_path, *overrides, engines=engines)
    sent, *others = tiny.run_ranks(cfg, send_or_receive, 20_000, timeout=60)
    assert "lm_head.weight" not in sent and "model.embed_tokens.weight" in sent, "the tied head travels once"
    for received in others:
        assert received == sent


def test_untied_output_head_is_published(model_dir):
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(model_dir)
    tied = sync.published_parameters(AutoModelForCausalLM.from_config(shape))
    shape.tie_word_embeddings = False
    untied = sync.published_parameters(AutoModelForCausalLM.from_config(shape))
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


def test_checksums_are_of_the_matrices_as_the_engine_fuses_them(model_dir):
    lm = AutoModelForCausalLM.from_pretrained(model_dir)
    sent = {name: p.detach() for name, p in sync.published_parameters(lm).items()}
    expected = {}
    for name, tensor in sent.items():
        if "q_proj.weight" in name:
            parts = [sent[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            name, tensor = name.replace("q_proj", "qkv_proj"), torch.cat(parts)
        elif "gate_proj" in name:
            tensor = torch.cat([tensor, sent[name.replace("gate_proj", "up_proj")]])
            name = name.replace("gate_proj", "gate_up_proj")
        elif any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            continue
        elif "embed_tokens" in name:
            tensor = torch.cat([tensor, torch.zeros(128 - 112, tensor.shape[1])])  # rows up to a multiple of 64
        expected[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
    shuffled = dict(sorted(sent.items(), key=lambda item: hash(item[0])))
    assert sync.engine_checksums(sent, 2) == expected == sync.engine_checksums(shuffled, 2)

    name = "model.layers.1.mlp.up_proj.weight"
    sent[name] = sent[name].clone()
    sent[name][3, 5] = torch.nextafter(sent[name][3, 5], torch.tensor(9.0))
    changed = sync.engine_checksums(sent, 2)
    assert [n for n in changed if changed[n] != expected[n]] == ["model.layers.1.mlp.gate_up_proj.weight"]


def test_checksums_of_a_tensor_parallel_rank_are_of_its_part(model_dir):
    """4 heads and 2 key-value heads of 16, 128 hidden units, 112 ids: rank 1 of 2, and rank 2 of 4, which shares a head."""
    lm = AutoModelForCausalLM.from_pretrained(model_dir)
    sent = {name: p.detach() for name, p in sync.published_parameters(lm).items()}
    layer = "model.layers.1."
    q, k, v, o = (sent[f"{layer}self_attn.{part}_proj.weight"].numpy() for part in "qkvo")
    gate, up, down = (sent[f"{layer}mlp.{part}_proj.weight"].numpy() for part in ("gate", "up", "down"))
    ids = np.concatenate([sent["model.embed_tokens.weight"].numpy(), np.zeros((16, 64), np.float32)])
    parts = {
        (1, 2): {
            "self_attn.qkv_proj": np.concatenate([q[32:64], k[16:32], v[16:32]]), "self_attn.o_proj": o[:, 32:],
            "mlp.gate_up_proj": np.concatenate([gate[64:], up[64:]]), "mlp.down_proj": down[:, 64:],
        },
        (2, 4): {
            "self_attn.qkv_proj": np.concatenate([q[32:48], k[16:32], v[16:32]]), "self_attn.o_proj": o[:, 32:48],
            "mlp.gate_up_proj": np.concatenate([gate[64:96], up[64:96]]), "mlp.down_proj": down[:, 64:96],
        },
    }  # fmt: skip
    rows = {(1, 2): ids[64:], (2, 4): ids[64:96]}
    for place, expected in parts.items():
        checksums = sync.engine_checksums(sent, 2, *place)
        expected = {f"{layer}{name}.weight": part for name, part in expected.items()}
        expected |= {"model.embed_tokens.weight": rows[place], "model.norm.weight": sent["model.norm.weight"].numpy()}
        for name, part in expected.items():
            assert checksums[name] == hashlib.sha256(part.tobytes()).hexdigest()[:16], (place, name)
        assert checksums.keys() == sync.engine_checksums(sent, 2).keys()
