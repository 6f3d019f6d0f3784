"""A real SGLang server: does it sample what the learner believes it sampled, and hold what the learner published?

The oracle is transformers' own model on one sequence at a time, with the weights that the learner process saved.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import random
import signal
import socket
import time

import numpy as np
import pytest
import torch

import engine as engines
import rollout
import sync
import train
from batch import make_row
from server import Draft, EngineError, Sampling, hold_port

PROMPT = list(range(10, 50))


def rollouts_of(responses, prompt=PROMPT):
    return [rollout.to_rollout(prompt, r, "", 0.0, None) for r in responses]


def learner_logp(engine, rollouts, temperature):
    """What the learner computes for the sampled tokens of a packed row, and what the engine said of them."""
    row = make_row(rollouts, [0.0] * len(rollouts))
    with torch.no_grad():
        return train.Policy(engine.lm, temperature, chunk=7)(row), row.behaviour_logp


def oracle_logp(engine, prompt, ids, temperature=1.0):
    """Logprobs of `ids` after `prompt` under the weights published last, by transformers alone."""
    tokens = torch.tensor([prompt + list(ids)])
    with torch.no_grad():
        logits = engine.lm(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


# ---------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_engine_and_learner_agree_on_logprobs(engine, temperature):
    responses = engine.wait(engine.generate(PROMPT, 8, Sampling(temperature, 32)))
    logp, behaviour = learner_logp(engine, rollouts_of(responses), temperature)
    assert (logp - behaviour).abs().max() < 1e-4
    for r in responses:
        assert np.abs(oracle_logp(engine, PROMPT, r.ids, temperature).numpy() - r.logp).max() < 1e-4


@pytest.mark.engine
def test_mask_replay_normalises_over_what_the_sampler_kept(engine):
    sampling = Sampling(0.7, 32, top_p=0.9, top_k=64, mask_replay=True)
    rollouts = rollouts_of(engine.wait(engine.generate(PROMPT, 8, sampling)))
    counts = np.concatenate([r.kept_counts[r.mask == 1] for r in rollouts])
    assert 1 <= counts.min() < counts.max() <= 64
    logp, behaviour = learner_logp(engine, rollouts, 0.7)
    assert (logp - behaviour).abs().max() < 1e-4
    for r in rollouts:
        r.kept_counts = r.kept_ids = None
    over_everything, _ = learner_logp(engine, rollouts, 0.7)
    assert (over_everything - behaviour).min() < -0.05  # so the masks mattered


@pytest.mark.engine
def test_stop_token_truncation_and_ids_beyond_the_tokenizer(engine):
    eos, known = engine.prompts.tokenizer.eos_token_id, len(engine.prompts.tokenizer)
    responses = engine.wait(engine.generate(PROMPT, 128, Sampling(1.0, 48)))
    assert {r.finish for r in responses} == {"stop", "length"}
    for r in responses:
        if r.finish == "stop":
            assert r.ids[-1] == eos and eos not in r.ids[:-1]
        else:
            assert len(r.ids) == 48 and eos not in r.ids
        one = rollouts_of([r])[0]
        assert one.mask.sum() == len(r.ids)  # the stop token is learned like any other
        one.check(engine.prompts.vocab_size)
    beyond = [r for r in responses if r.ids.max() >= known]
    assert beyond, "the vocabulary of the model is larger than the tokenizer's: such ids must come up"
    for r in beyond:
        text = engine.prompts.decode(r.ids)
        assert text == engine.prompts.tokenizer.decode([i for i in r.ids if i < known], skip_special_tokens=True)


# ----------------------------------------------------------------------------------------------------------- weights


def fused(published):
    """The parameters as SGLang holds them, spelt out layer by layer: the oracle for sync.engine_checksums."""
    held = {"model.norm.weight": published["model.norm.weight"]}
    embedding = published["model.embed_tokens.weight"]
    held["model.embed_tokens.weight"] = torch.cat([embedding, torch.zeros(128 - len(embedding), embedding.shape[1])])
    for i in range(2):
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        for name in ("q_norm", "k_norm", "o_proj"):
            held[f"{attention}{name}.weight"] = published[f"{attention}{name}.weight"]
        held[attention + "qkv_proj.weight"] = torch.cat([published[f"{attention}{x}_proj.weight"] for x in "qkv"])
        held[mlp + "gate_up_proj.weight"] = torch.cat([published[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")])
        held[mlp + "down_proj.weight"] = published[mlp + "down_proj.weight"]
        for name in ("input_layernorm", "post_attention_layernorm"):
            held[f"{layer}{name}.weight"] = published[f"{layer}{name}.weight"]
    return held


@pytest.mark.engine
def test_every_parameter_is_the_learners_bitwise(engine):
    before = copy.deepcopy(engine.published)
    engine.publish()
    answer = engine.wait(engine.server.post("/weights_checker", {"action": "checksum"}))
    (rank,) = answer["ranks"]
    expected = {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, tensor in fused(engine.published).items()
    }
    assert rank["checksums"] == expected
    assert all(not torch.equal(before[name], tensor) for name, tensor in engine.published.items())


@contextlib.contextmanager
def mended(engine):
    """Whatever became of an update in here, the next publication starts from a clean server."""
    try:
        yield
    finally:
        for path in ("/end_weight_update", "/continue_generation"):
            with contextlib.suppress(EngineError):
                engine.wait(engine.server.post(path, {"torch_empty_cache": False} if "continue" in path else {}))
        engine.server.version += 1  # the one that was spoilt
        engine.publish(noise=0.0)


@pytest.mark.engine
def test_verify_names_the_parameter_that_differs(engine, monkeypatch):
    serialize, calls = engines.serialize, []

    def spoil_one_bucket(flat, bucket):
        calls.append(bucket)
        if len(calls) == 2:
            flat = flat.clone()
            flat[bucket[0].start] ^= 1  # the lowest bit of one number
            flat.share_memory_()
        return serialize(flat, bucket)

    with mended(engine):
        monkeypatch.setattr(engines, "serialize", spoil_one_bucket)
        with pytest.raises(EngineError, match="1 of .* parameters differ from the learner's") as error:
            engine.publish()
        name = calls[1][0].name.rsplit(".", 2)[0]
        assert name in str(error.value)
        monkeypatch.undo()
        engine.pipe.recv()


def update(engine, name, shape):
    """Hands the server 64 zeros as the parameter `name`."""
    flat = torch.zeros(4 * 64, dtype=torch.uint8).share_memory_()
    body = {
        "serialized_named_tensors": [engines.serialize(flat, [sync.Slot(name, shape, "float32", 0, 4 * 64)])],
        "load_format": "flattened_bucket", "flush_cache": False, "weight_version": "99",
    }  # fmt: skip
    return engine.server.post("/update_weights_from_tensor", body)


@pytest.mark.engine
def test_a_refused_update_carries_the_servers_words(engine):
    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        engine.wait(update(engine, "model.norm.weight", [64]))
    (r,) = engine.wait(engine.generate(PROMPT, 1, Sampling(1.0, 8)))  # nothing came of it
    assert r.versions[0] == engine.server.version
    assert np.abs(oracle_logp(engine, PROMPT, r.ids).numpy() - r.logp).max() < 1e-4


# ------------------------------------------------------------------------------------------------- updates under load


@pytest.mark.engine
def test_a_request_in_flight_keeps_its_tokens_and_a_new_one_sees_no_old_cache(engine):
    for seconds in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):  # until the publication falls into the middle of a response
        old, before = engine.server.version, copy.deepcopy(engine.lm)
        long = engine.begin(engine.generate(PROMPT, 16, Sampling(1.0, 200)))
        engine.wait(asyncio.sleep(seconds))
        engine.publish(noise=0.05)
        new = engine.server.version
        responses = long.result(120)
        assert all(r.finish in ("stop", "length") and (np.diff(r.versions) >= 0).all() for r in responses)
        across = [r for r in responses if set(r.versions) == {old, new}]
        if across:
            break
    assert across, "no request was in flight during a publication"
    after, engine.lm = engine.lm, before
    for r in across:
        n = int((r.versions == old).sum())
        expected = oracle_logp(engine, PROMPT, r.ids).numpy()
        assert np.abs(expected[:n] - r.logp[:n]).max() < 1e-4  # the tokens before are the old policy's
        assert np.abs(expected[n:] - r.logp[n:]).max() > 1e-2  # those after are not, though they attend to its cache
    engine.lm = after
    # The same prompt again: under the new weights alone, as a cold engine would.
    fresh = engine.wait(engine.generate(PROMPT, 4, Sampling(1.0, 16)))
    for r in fresh:
        assert set(r.versions) == {new}
        assert np.abs(oracle_logp(engine, PROMPT, r.ids).numpy() - r.logp).max() < 1e-4
    # Within a version the prefix is computed once.
    (again,) = engine.wait(engine.generate(PROMPT, 1, Sampling(1.0, 4)))
    assert again.cached_tokens >= len(PROMPT) - 1


@pytest.mark.engine
def test_a_hundred_publications_under_load_abort_nothing(engine):
    stop = asyncio.Event()
    sampling = Sampling(1.0, 64)

    async def client(i):
        responses = []
        while not stop.is_set():
            responses += await engine.generate(PROMPT[: 8 + i], 4, sampling)  # raises on abort and on short answers
        return responses

    async def load():
        return await asyncio.gather(*(client(i) for i in range(8)))

    first = engine.server.version
    clients = engine.begin(load())
    for _ in range(100):
        engine.publish(noise=0.0005)
    engine.loop.call_soon_threadsafe(stop.set)
    responses = [r for some in clients.result(120) for r in some]
    assert len({v for r in responses for v in r.versions}) >= 50
    assert max(r.versions.max() for r in responses) == engine.server.version == first + 100
    assert any(len(set(r.versions)) > 1 for r in responses)
    for r in responses:
        assert len(r.ids) == len(r.logp) == len(r.versions)
        assert r.finish == "length" and len(r.ids) == 64 or r.finish == "stop" and r.ids[-1] in engine.server.stop_ids


# ------------------------------------------------------------------------------------------------------ the server's words

ANSWER = {
    "output_ids": [5, 6, 1],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None], [-0.1, 1, None]],
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
        "prompt_tokens": 7,
        "cached_tokens": 6,
        "output_token_sampling_mask": [[5, 9], [6], [1, 2, 3]],
        "output_token_sampling_logprobs": [-0.25, 0.0, -0.05],
    },
}


STOP = [1]


def doctored(**changes):
    answer = copy.deepcopy(ANSWER)
    for name, value in changes.items():
        (answer if name == "output_ids" else answer["meta_info"])[name] = value
    return answer


def parsed(answer, sampling):
    """The response that is streamed in one piece."""
    draft = Draft()
    draft.begin(sampling)
    draft.add(answer, sampling, STOP)
    return draft.response()


def test_an_answer_is_parsed_as_it_is():
    r = parsed(ANSWER, Sampling(1.0, 8))
    assert r.ids.tolist() == [5, 6, 1] and r.versions.tolist() == [3, 3, 4] and r.finish == "stop"
    assert r.logp.tolist() == pytest.approx([-0.5, -1.5, -0.1])
    assert (r.prompt_tokens, r.cached_tokens, r.kept_ids) == (7, 6, None)


def test_mask_replay_takes_the_renormalised_logprobs():
    r = parsed(ANSWER, Sampling(0.7, 8, 0.9, 64, True))
    assert r.logp.tolist() == pytest.approx([-0.25, 0.0, -0.05])
    assert r.kept_counts.tolist() == [2, 1, 3] and r.kept_ids.tolist() == [5, 9, 6, 1, 2, 3]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"finish_reason": {"type": "abort", "message": "out of memory"}}, "abort"),
        ({"output_ids": [], "output_token_logprobs": []}, "0 tokens"),
        ({"output_token_logprobs": ANSWER["meta_info"]["output_token_logprobs"][:2]}, "2 logprobs"),
        ({"output_ids": [5, 7, 1]}, "do not belong"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "do not cover"),
        ({"weight_versions": []}, "do not cover"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "ends in 1 and says"),
        ({"finish_reason": {"type": "stop", "matched": 6}}, "ends in 1 and says"),
        ({"finish_reason": {"type": "length", "length": 3}}, "goes on after its stop token 1"),
        ({"output_ids": [5, 1, 1], "output_token_logprobs": [[-0.5, 5, None], [-1.5, 1, None], [-0.1, 1, None]]}, "goes on after"),
    ],
)
def test_an_answer_whose_parts_do_not_fit_is_an_error(changes, words):
    with pytest.raises(EngineError, match=words):
        parsed(doctored(**changes), Sampling(1.0, 8))


@pytest.mark.parametrize("logp", [None, "0", float("nan"), float("-inf")])
def test_a_logprob_that_is_no_number_is_an_error(logp):
    triples = [[-0.5, 5, None], [logp, 6, None], [-0.1, 1, None]]
    with pytest.raises(EngineError, match="logprobs of a response"):
        parsed(doctored(output_token_logprobs=triples), Sampling(1.0, 8))


def test_ids_that_are_no_integers_and_tokens_after_the_end_are_errors():
    strings = doctored(output_ids=["5"], output_token_logprobs=[[-0.5, "5", None]])
    with pytest.raises(EngineError, match="do not belong"):
        parsed(strings, Sampling(1.0, 8))
    draft = Draft()
    draft.add(ANSWER, Sampling(1.0, 8), STOP)
    before = draft.response()
    with pytest.raises(EngineError, match="was finished"):
        draft.add(ANSWER, Sampling(1.0, 8), STOP)
    assert draft.response().ids.tolist() == before.ids.tolist()


def test_a_response_in_pieces_is_the_one_in_one_piece():
    whole, pieces = parsed(ANSWER, Sampling(0.7, 8, 0.9, 64, True)), Draft()
    for i in range(3):
        meta = {n: ANSWER["meta_info"][n][i : i + 1] for n in ANSWER["meta_info"] if n.startswith("output_token")}
        if i < 2:
            meta |= {"finish_reason": None, "weight_versions": None, "weight_version": "3"}
        pieces.add(doctored(output_ids=ANSWER["output_ids"][i : i + 1], **meta), Sampling(0.7, 8, 0.9, 64, True), STOP)
        assert pieces.versions == [3, 3, 4][: i + 1]
    for one, other in zip(vars(whole).values(), vars(pieces.response()).values()):
        assert np.array_equal(one, other)


NASTY = [
    None, True, -1, 0, 2, 7, 200, 2**31, 2**63, 10**400, -0.5, 1.5, 1e308, float("nan"), float("inf"), "", "5", "default", "9" * 30,
    [], [5], [[]], [None] * 3, [5, 5], [2**40], {}, {"type": "stop"}, {"version": "3", "start": 0, "end": 10**12}, "\ud800",
]  # fmt: skip


def places(value, path=()):
    """Every place within an answer."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


@pytest.mark.parametrize("mask_replay", [False, True])
def test_whatever_stands_in_an_answer_it_is_refused_or_is_a_whole_rollout(mask_replay):
    rng = random.Random(0)
    sampling = Sampling(0.7, 8, 0.9, 64, mask_replay, vocab_size=100)
    everywhere = list(places(ANSWER))
    taken = 0
    for _ in range(5000):
        answer, draft = copy.deepcopy(ANSWER), Draft()
        for *way, last in rng.sample(everywhere, rng.choice([1, 1, 2, 3])):
            part = answer
            try:
                for key in way:
                    part = part[key]
                if rng.random() < 0.2:
                    del part[last]
                else:
                    part[last] = copy.deepcopy(rng.choice(NASTY))
            except (KeyError, IndexError, TypeError):
                pass  # the place went with an earlier change
        try:
            draft.add(answer, sampling, STOP)
        except (EngineError, KeyError, IndexError, TypeError, ValueError):
            assert draft == Draft(), "nothing of it is kept"
            continue
        if draft.finish and min(draft.versions) >= 0:
            taken += 1
            r = rollout.to_rollout([5, 6], draft.response(), "", 0.0, None)
            r.check(100)
            assert (r.kept_ids is not None) == mask_replay
    assert taken > 50


def test_more_tokens_than_asked_for_is_an_error():
    with pytest.raises(EngineError, match="limit 2"):
        parsed(ANSWER, Sampling(1.0, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_sampling_mask": [[5, 9], [7], [1, 2, 3]]},  # the sampled token is not among the kept ones
        {"output_token_sampling_mask": [[5, 9], [6]]},
        {"output_token_sampling_logprobs": [-0.25, 0.0]},
    ],
)
def test_kept_ids_that_do_not_fit_are_an_error(changes):
    with pytest.raises(EngineError, match="kept ids"):
        parsed(doctored(**changes), Sampling(0.7, 8, 0.9, 64, True))


def hold_ports(pipe):
    held = [hold_port() for _ in range(200)]
    pipe.send([s.getsockname()[1] for s in held])
    pipe.recv()


def test_engines_that_start_at_once_get_ports_of_their_own():
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(4)]
    ranks = [fork.Process(target=hold_ports, args=(theirs,), daemon=True) for _, theirs in pipes]
    for rank in ranks:
        rank.start()
    ports = [port for ours, _ in pipes for port in ours.recv()]
    assert len(set(ports)) == len(ports) == 800
    with socket.socket() as server:  # as SGLang binds: the port is free for whoever names it
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
    for (ours, _), rank in zip(pipes, ranks):
        ours.send("done")
        rank.join()


# ------------------------------------------------------------------------------------------- last: they end the server


@pytest.mark.engine
def test_a_killed_server_is_replaced_with_the_same_weights_and_its_responses_go_on(engine):
    asks = engines.Engines(engine.config, engine.ranks, engine.engine.state, engine.engine)
    before = engine.server.version

    async def story():
        watcher = asyncio.create_task(engine.engine.supervise())
        request = asyncio.create_task(asks.generate(PROMPT, 32, Sampling(1.0, 600), before))
        for _ in range(2):  # until the second answers are in
            heard = engine.server.heard
            while engine.server.heard < heard + 0.2:
                await asyncio.sleep(0.01)
        os.killpg(engine.server.process.pid, signal.SIGKILL)
        try:
            return await request
        finally:
            watcher.cancel()

    responses = engine.wait(story())
    events = [json.loads(line) for line in (engine.folder / "events.jsonl").read_text().splitlines()]
    (retry,) = [e for e in events if e["event"] == "retry"]
    assert retry["tokens"] > 100 and engine.engine.restarted == 1
    assert engine.server.version == before  # which the new server held before it was asked: Engine.catch_up compares
    assert max(len(r.ids) for r in responses) > 64
    for r in responses:
        assert set(r.versions) == {before} and r.finish in ("stop", "length")
        assert np.abs(oracle_logp(engine, PROMPT, r.ids).numpy() - r.logp).max() < 1e-4


def living_in(group):
    """The processes of a process group, without those that have ended and that nobody has waited for."""
    living = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as f:
            state, _, of_group = f.read().rsplit(")", 1)[1].split()[:3]
            if int(of_group) == group and state != "Z":
                living.append(int(pid))
    return living


@pytest.mark.engine
def test_an_update_that_kills_the_server_is_an_error_with_its_last_words(engine):
    server = engine.server
    engine.wait(server.post("/pause_generation", {"mode": "in_place"}))
    engine.wait(server.post("/begin_weight_update", {}))
    with pytest.raises(EngineError, match=r"(?s)did not answer /update.*Attempted to load weight.*\[8, 8\]"):
        engine.wait(update(engine, "model.norm.weight", [8, 8]))
    assert server.process.wait(60) != 0
    assert "ended with exit code" in server.death()
    group = server.process.pid
    server.stop()
    deadline = time.monotonic() + 10  # the kernel takes its time over a large process
    while living_in(group):
        assert time.monotonic() < deadline, f"still there: {living_in(group)}"
        time.sleep(0.05)
