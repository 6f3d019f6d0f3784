"""The learner without an engine: logprobs, the gradient and its independence of the cut, and whole runs against a fake
engine rank that samples from random numbers.

The oracle is transformers' own model on one sequence at a time, in float64, with an objective in plain Python.
"""

import json
import math
import os
import time
import types

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from test_objective import objective
from transformers import AutoModelForCausalLM

import launch
import rollout
import sync
import train
import trajectory
from batch import make_batches, make_row

VOCAB = 100  # ids that the tests use; the model has a few more


@pytest.fixture(scope="module")
def lm(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def exact(model_dir):
    """The same model in float64."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")


def sampled_logp(lm, r, temperature=1.0):
    """Logprobs of the sampled tokens of one rollout, alone in its batch; over the kept ids where it has some."""
    at = np.flatnonzero(r.mask)
    logits = lm(torch.from_numpy(r.tokens.astype(np.int64))[None], use_cache=False).logits[0, at - 1] / temperature
    if r.kept_ids is not None:
        allowed = torch.full_like(logits, -math.inf)
        for i, ids in enumerate(np.split(r.kept_ids, np.cumsum(r.kept_counts[at])[:-1])):
            allowed[i, ids.tolist()] = 0
        logits = logits + allowed
    return logits.log_softmax(-1)[range(len(at)), r.tokens[at].tolist()]


def make_groups(n=4, size=4, seed=0, **options):
    rng = np.random.default_rng(seed)
    lengths = [(int(rng.integers(1, 9)), int(rng.integers(1, 20))) for _ in range(n)]
    return [
        tiny.group(rng, t, size, vocab=VOCAB, prompt=prompt, response=response, **options)
        for t, (prompt, response) in enumerate(lengths)
    ]


# ------------------------------------------------------------------------------------------------------------ logprobs


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kept", [0, 5])
def test_packed_logprobs_equal_those_of_separate_sequences(lm, exact, chunk, temperature, kept):
    rollouts = [r for g in make_groups(kept=kept) for r in g.rollouts]
    row = make_row(rollouts, [0.0] * len(rollouts))
    with torch.no_grad():
        logp = train.Policy(lm, temperature, chunk)(row)
        expected = torch.cat([sampled_logp(exact, r, temperature) for r in rollouts])
    assert logp.dtype == torch.float32
    assert (logp - expected).abs().max() < 1e-5


def test_a_sequence_does_not_see_its_neighbours(lm):
    """Exchanging one sequence of a row leaves the others' logprobs as they were, in training mode too."""
    rng = np.random.default_rng(1)
    one, two, other = (tiny.rollout(rng, 4, 6, vocab=VOCAB) for _ in range(3))
    policy = train.Policy(lm, 1.0, 1024)
    for mode in (True, False):
        policy.train(mode)
        first = policy(make_row([one, two], [0.0] * 2))[6:]
        second = policy(make_row([other, two], [0.0] * 2))[6:]
        assert (first - second).abs().max() < 1e-6
    policy.train()


# ------------------------------------------------------------------------------------------------------------ gradient


def oracle_gradient(exact, groups, k, **constants):
    """The gradient of the loss over all parameters, and the metrics, one sequence at a time in float64."""
    exact.zero_grad()
    n = sum(int(r.mask.sum()) for g in groups for r in g.rollouts)
    loss = entropy = kl = 0.0
    for g in groups:
        rewards = np.array([r.reward for r in g.rollouts])
        for r, advantage in zip(g.rollouts, (rewards - rewards.mean()) / rewards.std()):
            logp = sampled_logp(exact, r)
            behaviour = r.behaviour_logp[r.mask == 1].astype(np.float64)
            tokens = [(*pair, advantage, 1) for pair in zip(logp.tolist(), behaviour)]
            value, slopes = objective(tokens, n, k=k, **constants)
            logp.backward(torch.tensor(slopes, dtype=torch.float64).neg())
            loss -= value
            log_ratio = logp.detach().numpy() - behaviour
            entropy += (-logp.detach().numpy() * np.exp(log_ratio)).sum() / n
            kl += (np.exp(log_ratio) - 1 - log_ratio).sum() / n
    gradient = {name: p.grad.clone().numpy() for name, p in exact.named_parameters()}
    return gradient, {"train/loss": loss, "train/entropy": entropy, "train/mismatch_kl": kl, "train/tokens": n}


# With a large epsilon Adam's first step is a smooth function of the gradient, so equal weights mean equal gradients.
SMOOTH = ["train.adam_eps=1", "train.lr=1", "train.clip_grad=1e9", "train.groups_per_step=4", "rollout.group_size=4"]


def adam_step(weight, gradient):
    """AdamW's first step with lr 1, epsilon 1, no weight decay: the bias corrections leave g and g squared."""
    return weight - gradient / (np.abs(gradient) + 1)


def one_step(cfg, ranks, groups, k):
    """A real gradient step under FSDP2 (runs in a rank): weights after it, metrics."""
    policy = train.load_policy(cfg, ranks)
    optimizer = make_optimizer(cfg, policy)
    batches = make_batches(groups, cfg.layout.trainers, cfg.train.max_tokens_per_microbatch, version=2)
    metrics = train.gradient_step(policy, optimizer, batches[ranks.role.rank], k, cfg, lambda: False)
    return tiny.weights(policy.lm), metrics


def make_optimizer(cfg, policy):
    return torch.optim.AdamW(
        policy.parameters(), lr=cfg.train.lr, betas=(cfg.train.beta1, cfg.train.beta2), eps=cfg.train.adam_eps,
        weight_decay=cfg.train.weight_decay, fused=True,
    )  # fmt: skip


CUTS = {  # name -> (learner ranks, tokens per row)
    "one row": (1, 4096),
    "many rows": (1, 40),
    "two ranks": (2, 60),
    "two ranks, an odd number of rows": (2, 4096),
    "checkpointed": (1, 40),
}


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_does_not_depend_on_the_cut(cut, model_dir, exact, tmp_path):
    trainers, capacity = CUTS[cut]
    groups = make_groups(version=1)
    overrides = SMOOTH + [f"layout.trainers={trainers}", f"train.max_tokens_per_microbatch={capacity}"]
    overrides += [f"model.activation_checkpointing={str(cut == 'checkpointed').lower()}"]
    cfg = tiny.config(model_dir, tmp_path, *overrides, engines=0)
    gradient, metrics = oracle_gradient(exact, groups, k=0.5, eps=0.6, r_min=0.0, r_max=50.0)
    before = {name: p.detach().numpy() for name, p in exact.named_parameters()}
    for after, measured in tiny.run_ranks(cfg, one_step, groups, 0.5):
        assert after.keys() == gradient.keys()
        for name in gradient:
            expected = adam_step(before[name], gradient[name])
            assert np.abs(after[name] - expected).max() < 1e-6, name
        for name, value in metrics.items():
            assert measured[name] == pytest.approx(value, rel=1e-4), name
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        assert measured["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert measured["train/lr"] == 1 and measured["train/clip_k"] == 0.5
        assert measured["staleness/mean"] == measured["staleness/max"] == 1
        assert 0 < measured["train/packing_fill"] <= 1


def test_gradient_is_clipped_at_its_global_norm(model_dir, exact, tmp_path):
    groups = make_groups()
    overrides = SMOOTH + ["layout.trainers=2", "train.max_tokens_per_microbatch=60", "train.clip_grad=0.01"]
    gradient, _ = oracle_gradient(exact, groups, k=0.0, eps=0.6, r_min=0.0, r_max=50.0)
    norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
    assert norm > 0.1, "the test needs a gradient that has to be clipped"
    cfg = tiny.config(model_dir, tmp_path, *overrides, engines=0)
    for after, measured in tiny.run_ranks(cfg, one_step, groups, 0.0):
        assert measured["train/grad_norm"] == pytest.approx(norm, rel=1e-4), "the norm before it was clipped is logged"
        for name, p in exact.named_parameters():
            expected = adam_step(p.detach().numpy(), gradient[name] * 0.01 / norm)
            assert np.abs(after[name] - expected).max() < 1e-6, name


@pytest.fixture
def plain(model_dir, tmp_path):
    """(config, policy, optimiser) of one rank, without FSDP and without a process group."""
    cfg = tiny.config(model_dir, tmp_path, *SMOOTH, "train.max_tokens_per_microbatch=40", engines=0)
    policy = train.Policy(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), 1.0, 1024)
    return cfg, policy, make_optimizer(cfg, policy)


def test_step_that_is_asked_to_stop_changes_nothing(plain):
    cfg, policy, optimizer = plain
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    (batch,) = make_batches(make_groups(), 1, 40, version=0)
    asked = iter([False, False, True])
    assert train.gradient_step(policy, optimizer, batch, 0.0, cfg, lambda: next(asked)) is None
    for name, p in policy.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None, name
    assert not optimizer.state


def test_step_with_a_gradient_that_is_not_finite_is_not_taken(plain):
    cfg, policy, optimizer = plain
    (batch,) = make_batches(make_groups(), 1, 40, version=0)
    batch.rows[0].advantages[0] = math.nan
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with pytest.raises(FloatingPointError, match="nan"):
        train.gradient_step(policy, optimizer, batch, 0.0, cfg, lambda: False)
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())


def test_clip_fractions_count_the_tokens_whose_gradient_a_clip_stops(plain, exact):
    cfg, policy, optimizer = plain
    groups = make_groups(seed=5)
    (batch,) = make_batches(groups, 1, 40, version=0)
    measured = train.gradient_step(policy, optimizer, batch, 0.5, cfg, lambda: False)
    low = high = outer = n = 0
    for g in groups:
        for r in g.rollouts:
            ratios = np.exp(sampled_logp(exact, r).detach().numpy() - r.behaviour_logp[r.mask == 1])
            low += ((ratios < 0.4) & (r.reward == 0)).sum()
            high += ((ratios > 3.0) & (r.reward == 1)).sum()
            outer += (ratios > 50).sum()
            n += len(ratios)
    assert low and high, "the test needs tokens on both sides"
    assert measured["train/clip_low_frac"] == pytest.approx(low / n)
    assert measured["train/clip_high_frac"] == pytest.approx(high / n)
    assert measured["train/outer_clip_frac"] == pytest.approx(outer / n)


# ---------------------------------------------------------------------------- whole runs, with a fake engine rank


def learner_or_fake_engine(cfg, ranks, stop_at=None):
    """A rank of a run: a real learner, or an engine rank whose policy is a random number generator."""
    if ranks.role.kind == "engine":
        return fake_engine(cfg, ranks, stop_at)
    learner = train.Learner(cfg, ranks, rollout.open_prompts(cfg))
    learner.learn()
    return tiny.weights(learner.policy.lm)


def fake_engine(cfg, ranks, stop_at):
    """Pulls tickets, makes up rollouts, rejects some, receives every publication; asks for a stop at version `stop_at`.
    Returns the weights of the last publication."""
    rng = np.random.default_rng(cfg.run.seed * 10 + ranks.role.engine)
    state = sync.RunState(ranks.store, cfg.staleness.max, cfg.groups_per_update)
    state.open()
    state.ready()
    plan, outbox = state.plan(), trajectory.Outbox(ranks, (cfg.staleness.max + 1) * cfg.groups_per_update)
    held, eval_done, running, received = -1, -1, [], {}
    totals, reported = trajectory.EngineStats(ranks.role.engine, 0.0, 0.0, 0, 0, 0, 0.0), 0.0
    while not (seen := state.read()).stop:
        if seen.version > held:
            held = sync.receive_version(seen.version, ranks)
            for bucket in plan:
                flat = torch.empty(sync.bucket_nbytes(bucket), dtype=torch.uint8)
                dist.broadcast(flat, 0, ranks.weights)
                received |= {name: t.clone().numpy() for name, t in sync.unpack(flat, bucket).items()}
        if held == stop_at:
            state.ask_stop("test")
        if seen.eval_id > eval_done and held == seen.version:
            eval_done = seen.eval_id
            outbox.send(trajectory.EvalPart(eval_done, ranks.role.engine, held, ["arithmetic"] * 3, [0.0, 1.0, 1.0]))
        while not seen.stop_asked and not outbox.is_full and len(running) < 4:
            if (ticket := state.claim(ranks.role.rank, held)) is None:
                break
            running.append((ticket, held))
        if running:
            ticket, version = running.pop(int(rng.integers(0, len(running))))
            g = tiny.group(rng, ticket, cfg.rollout.group_size, vocab=VOCAB, version=np.array([version] * 4 + [held]))
            if rng.random() < 0.2:
                g.dropped = "zero_variance"
                state.give_back()
            outbox.send(g)
            totals = trajectory.EngineStats(ranks.role.engine, 1.0 + ticket, 0.5, 10 * ticket, 5 * ticket, ticket, 0.1)
            outbox.send(totals)
        else:
            time.sleep(0.002)
        if time.monotonic() > reported + 0.1:
            outbox.send(totals)
            reported = time.monotonic()
        outbox.pump()
    outbox.close()
    return received


def lines(run_dir, name):
    with open(os.path.join(run_dir, name)) as f:
        return [json.loads(line) for line in f]


def rollout_lines(run_dir):
    folder = os.path.join(run_dir, "rollouts")
    return [line for name in sorted(os.listdir(folder)) for line in lines(folder, name)]


RUN = ["train.groups_per_step=3", "rollout.group_size=2", "train.lr=1e-3", "faults.stall_after=20", "eval.prompts=4"]


@pytest.mark.parametrize(
    "trainers, engines, staleness, steps, per_update",
    [(1, 1, 0, 4, 1), (1, 1, 2, 5, 2), (2, 1, 1, 4, 1), (1, 2, 2, 4, 1), (2, 2, 3, 5, 3)],
)
def test_run_from_start_to_end(trainers, engines, staleness, steps, per_update, model_dir, tmp_path):
    overrides = RUN + [
        f"layout.trainers={trainers}", f"staleness.max={staleness}", f"train.steps={steps}", "eval.every=2",
        f"train.steps_per_update={per_update}", "sync.bucket_mb=1",
    ]  # fmt: skip
    cfg = tiny.config(model_dir, tmp_path, *overrides, engines=engines)
    results = tiny.run_ranks(cfg, learner_or_fake_engine)

    # every engine ends with the learner's last weights, bit for bit
    for received in results[trainers:]:
        assert received.keys() == results[0].keys()
        for name, weight in results[0].items():
            assert weight.tobytes() == received[name].tobytes(), name

    metrics = lines(tmp_path, "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    assert [m["version"] for m in metrics] == [s // per_update for s in range(1, steps + 1)]
    assert max(m["staleness/max"] for m in metrics) <= staleness
    assert all(m["train/lr"] == 1e-3 for m in metrics)
    evals = lines(tmp_path, "eval.jsonl")
    evaluated = [e["step"] for e in evals]
    if per_update == 1:
        assert evaluated == sorted({0, *range(2, steps, 2), steps})
    assert evaluated[0] == 0 and evaluated[-1] == steps, "the base before and the last weights after"
    assert all(e["pass_at_1"] == pytest.approx(2 / 3) and e["prompts"] == 3 * engines for e in evals)

    stored = rollout_lines(tmp_path)
    learned = [r for r in stored if r["learned_at"] is not None]
    assert len(learned) == steps * 3 * 2, "every batch is full, whatever was rejected"
    assert len({r["ticket"] for r in stored}) * 2 == len(stored), "no group is stored twice"
    for r in learned:  # weights of step s were published as version s // per_update
        assert (r["learned_at"] - 1) // per_update - min(v for v in r["versions"] if v >= 0) <= staleness
    with open(tmp_path / "checkpoints" / f"step_{steps}" / "progress.json") as f:
        assert json.load(f)["step"] == steps
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / f"step_{steps}" / "hf")

    events = lines(tmp_path, "events.jsonl")
    published = [e["version"] for e in events if e["event"] == "publication"]
    assert published == list(range(-(-steps // per_update) + 1))
    assert [e["step"] for e in events if e["event"] == "evaluation"] == evaluated
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [steps]
    assert [e["step"] for e in events if e["event"] == "first_step"] == [1]
    assert all(e["rank"] == 0 and e["seconds"] >= 0 for e in events if e["event"] not in ("drop", "first_step"))
    stale = {r["ticket"] for r in stored if r["dropped"] == "stale"}
    assert stale == {e["ticket"] for e in events if e["event"] == "drop" and e["why"] == "stale"}


def test_stopped_and_resumed_run_learns_every_prompt_once(model_dir, tmp_path):
    overrides = RUN + ["train.steps=8", "run.checkpoint_every=3", "eval.every=4"]
    cfg = tiny.config(model_dir, tmp_path, *overrides)
    tiny.run_ranks(cfg, learner_or_fake_engine, 4)
    stopped_at = len(lines(tmp_path, "metrics.jsonl"))
    assert 4 <= stopped_at < 8
    with open(tmp_path / "checkpoints" / f"step_{stopped_at}" / "progress.json") as f:
        saved = json.load(f)
    weights, _ = tiny.run_ranks(cfg, learner_or_fake_engine)

    assert [m["step"] for m in lines(tmp_path, "metrics.jsonl")] == list(range(1, 9))
    assert [e["step"] for e in lines(tmp_path, "eval.jsonl")] == [0, 4, 8]
    settled = sorted({r["ticket"] for r in rollout_lines(tmp_path)})
    assert len(rollout_lines(tmp_path)) == 2 * len(settled)
    with open(tmp_path / "checkpoints" / "step_8" / "progress.json") as f:
        final = json.load(f)
    assert settled == list(range(final["low"])) + final["done"]
    assert final["low"] > saved["next_ticket"], "prompts that were under way at the stop were done again"
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step_8" / "hf")
    for name, p in kept.named_parameters():
        assert p.detach().numpy().tobytes() == weights[name].tobytes()


def test_run_whose_groups_are_all_rejected_ends(model_dir, tmp_path, monkeypatch):
    cfg = tiny.config(model_dir, tmp_path, *RUN, "rollout.max_rejected=10", "train.steps=2")
    with pytest.raises(AssertionError, match="NothingToLearn: (1[0-9]) groups in a row .*: 0 .*, \\1 with none"):
        tiny.run_ranks(cfg, learner_or_hopeless_engine)


def learner_or_hopeless_engine(cfg, ranks):
    if ranks.role.kind == "engine":
        tiny.group = hopeless(tiny.group)
    return learner_or_fake_engine(cfg, ranks)


def hopeless(make):
    def made(rng, ticket, size, **options):
        g = make(rng, ticket, size, **options)
        for r in g.rollouts:
            r.task = r.reward = 0.0
        g.dropped = "zero_variance"
        return g

    return made


def test_run_goes_on_with_another_learning_rate(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, *RUN, "train.steps=1")
    tiny.run_ranks(cfg, learner_or_fake_engine)
    cfg.train.steps, cfg.train.lr = 2, 1e-4
    launch.check_run_dir(cfg)
    tiny.run_ranks(cfg, learner_or_fake_engine)
    assert [m["train/lr"] for m in lines(tmp_path, "metrics.jsonl")] == [1e-3, 1e-4]


@pytest.mark.parametrize("waiting", [3, 4])
def test_many_rejected_groups_end_a_run_only_where_there_is_no_batch(model_dir, tmp_path, monkeypatch, waiting):
    """What was rejected before a full batch came must not end the wait for an evaluation, or for the next batch."""
    learner = train.Learner.__new__(train.Learner)
    learner.config = tiny.config(model_dir, tmp_path, "rollout.max_rejected=5", "train.groups_per_step=4")
    learner.ranks = types.SimpleNamespace(is_first=True, learners=None)
    learner.buffer = types.SimpleNamespace(
        waiting=dict.fromkeys(range(waiting)), rejected=[0.0] * 9, drop_stale=lambda version: [], take=lambda n: []
    )
    learner.state = types.SimpleNamespace(read=lambda: types.SimpleNamespace(stop_asked=""))
    learner.receive, learner.version, learner.hopeless = lambda timeout: None, 0, ""
    monkeypatch.setattr(train, "make_batches", lambda *args: ["a batch"])
    monkeypatch.setattr(train.dist, "scatter_object_list", lambda mine, batches, **place: mine.__setitem__(0, batches[0]))
    assert learner.next_batch() == ("a batch" if waiting == 4 else None)
    assert bool(learner.hopeless) == (waiting < 4)
