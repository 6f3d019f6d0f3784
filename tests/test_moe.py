"""MoE: are the replayed experts exactly the ones used, do gradients flow as they should, and do weights arrive?

The oracles: a MoE layer written as loops in float64, transformers' own files, and a real engine.
"""

import asyncio
import base64
import copy
import dataclasses
import hashlib
import os
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, MixtralConfig, Qwen3MoeConfig

import checkpoint
import pretrain
import rollout
import routing
import sync
import train
import trajectory
from batch import make_batches, make_row
from configs.schema import ConfigError
from conftest import VOCAB, Engine
from server import EngineError, Sampling, parse_experts

EXPERTS, TOP_K = 8, 2
PROMPT = list(range(10, 50))


def shape(**changes):
    settings = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=True, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.15,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=1, dtype="float32",
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    return Qwen3MoeConfig(**settings | changes)


REPLAY = routing.routing_of(shape(), "here")


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory) -> str:
    """An hf/ directory as a checkpoint holds it: everything here, and the engine, starts from an export of ours."""
    tokenizer = pretrain.build_tokenizer(1024)
    torch.manual_seed(0)
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = AutoModelForCausalLM.from_config(shape(**ends))
    model.generation_config = GenerationConfig(**ends)
    path = str(tmp_path_factory.mktemp("moe") / "hf")
    checkpoint.export_hf(path, model, "float32", tokenizer, SimpleNamespace(is_first=True))
    return path


@pytest.fixture
def lm(moe_dir):
    return AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)


def random_experts(rng, *size):
    """[*size, TOP_K] different experts each."""
    return rng.random((*size, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)


def rollouts(rng, n, **options):
    made = [tiny.rollout(rng, response=4 + i, **options) for i in range(n)]
    for r in made:
        r.experts = random_experts(rng, len(r.tokens) - 1, 2)
    return made


def own_choice(lm, r):
    """What the routers of `lm` choose for each token but the last, by transformers' own means."""
    with torch.no_grad():
        tokens = torch.from_numpy(r.tokens[None, :-1].astype(np.int64))
        logits = lm(tokens, output_router_logits=True, use_cache=False).router_logits
    return torch.stack([x.topk(TOP_K).indices for x in logits], 1).numpy().astype(np.uint8)


def logp_of(policy, rollouts_):
    return policy(make_row(rollouts_, [0.0] * len(rollouts_)))


# ---------------------------------------------------------------------------------------------------------- the routers


def moe_layer(x, gate, gate_up, down, chosen, normalise):
    """[T, d] in float64, one token and one expert at a time."""
    out = []
    for token, picks in zip(x, chosen.tolist()):
        p = (gate @ token).softmax(0)
        total = sum(p[e] for e in picks) if normalise else 1.0
        mixed = 0.0
        for e in picks:
            a, b = (gate_up[e] @ token).chunk(2)
            mixed = mixed + p[e] / total * (down[e] @ (torch.nn.functional.silu(a) * b))
        out.append(mixed)
    return torch.stack(out)


@pytest.mark.parametrize("normalise", [True, False])
def test_output_and_gradients_are_those_of_the_replayed_experts(normalise):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape(norm_topk_prob=normalise))
    routing.attach(model)
    block = model.model.layers[1].mlp
    chosen = torch.from_numpy(random_experts(np.random.default_rng(0), 9))
    x, cotangent = torch.randn(2, 9, 64).unbind()
    x.requires_grad_()
    block.gate.replayed = chosen
    weights = [x, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    out = block(x[None])[0]
    grads = torch.autograd.grad((out * cotangent).sum(), weights)
    exact = [w.detach().double().requires_grad_() for w in weights]
    expected = moe_layer(*exact, chosen, normalise)
    expected_grads = torch.autograd.grad((expected * cotangent).sum(), exact)
    assert (out - expected).abs().max() < 1e-5
    assert all(g.abs().max() > 1e-3 for g in grads)
    for got, want in zip(grads, expected_grads):
        assert (got - want).abs().max() < 1e-5


def test_replaying_a_models_own_choice_changes_nothing(lm):
    rng = np.random.default_rng(0)
    batch = rollouts(rng, 3)
    for r in batch:
        r.experts = own_choice(lm, r)
    policy = train.Policy(lm, 1.0, 64, True)
    replayed = logp_of(policy, batch)
    row = make_row(batch, [0.0] * 3)
    n_layers, all_tokens = 2, sum(len(r.tokens) - 1 for r in batch)
    assert routing.changed(policy.routers, row.experts).tolist() == [0, n_layers * all_tokens]
    for r in batch:
        r.experts = None
    plain = logp_of(train.Policy(lm, 1.0, 64), batch)
    assert (replayed - plain).abs().max() < 1e-6


def test_other_experts_change_the_result_and_are_counted(lm):
    batch = rollouts(np.random.default_rng(0), 3)
    policy = train.Policy(lm, 1.0, 64, True)
    replayed = logp_of(policy, batch)
    row = make_row(batch, [0.0] * 3)
    counted = routing.changed(policy.routers, row.experts).tolist()
    # Layer 0 sees the same input whatever is replayed; its count is known without replay. Layer 1's is not.
    by_hand = sum(
        set(mine) != set(theirs)
        for r in batch
        for mine, theirs in zip(own_choice(lm, r)[:, 0].tolist(), r.experts[:, 0].tolist())
    )
    assert int(policy.routers[0].changed) == by_hand > 0
    assert by_hand <= counted[0] <= by_hand + counted[1] / 2
    for r in batch:
        r.experts = None
    assert (replayed - logp_of(train.Policy(lm, 1.0, 64), batch)).abs().max() > 0.1


def test_the_order_of_a_tokens_experts_is_no_change(lm):
    (r,) = rollouts(np.random.default_rng(0), 1)
    r.experts = own_choice(lm, r)
    policy = train.Policy(lm, 1.0, 64, True)
    before = logp_of(policy, [r])
    r.experts = r.experts[..., ::-1]
    assert (logp_of(policy, [r]) - before).abs().max() < 1e-6
    assert all(router.changed == 0 for router in policy.routers)


def test_packed_sequences_keep_their_own_experts(lm):
    batch = rollouts(np.random.default_rng(0), 4)
    policy = train.Policy(lm, 1.0, 5, True)
    apart = torch.cat([logp_of(policy, [r]) for r in batch])
    assert (logp_of(policy, batch) - apart).abs().max() < 1e-5
    assert (logp_of(policy, batch[::-1]) - torch.cat([logp_of(policy, [r]) for r in batch[::-1]])).abs().max() < 1e-5


def test_where_the_last_token_goes_makes_no_difference(lm):
    batch = rollouts(np.random.default_rng(0), 2)
    policy = train.Policy(lm, 1.0, 64, True)
    row = make_row(batch, [0.0] * 2)
    lasts = np.cumsum([len(r.tokens) for r in batch]) - 1
    assert (row.experts[lasts] == -1).all() and (row.experts >= 0).sum() == row.experts.numel() - len(lasts) * 2 * TOP_K
    before = policy(row)
    row.experts[lasts] = torch.tensor([3, 5], dtype=torch.int16)
    assert (policy(row) - before).abs().max() < 1e-5  # the matrices of an expert multiply other rows together


def gradients(policy, loss):
    policy.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters()}


def test_recomputed_layers_see_the_same_experts_even_after_another_row(moe_dir):
    rng = np.random.default_rng(0)
    one, other = (make_row(rollouts(rng, 2), [0.0] * 2) for _ in range(2))
    plain, recomputing = (
        train.Policy(AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32).train(), 1.0, 64, True)
        for _ in range(2)
    )
    recomputing.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = gradients(plain, plain(one).sum())
    loss = recomputing(one).sum()
    recomputing(other)
    got = gradients(recomputing, loss)
    for name, want in expected.items():
        assert (got[name] - want).abs().max() < 1e-5 * max(1, want.abs().max()), name


def test_a_row_that_does_not_fit_is_an_error(lm):
    batch = rollouts(np.random.default_rng(0), 1)
    policy, plain = train.Policy(lm, 1.0, 64, True), train.Policy(lm, 1.0, 64)
    row = make_row(batch, [0.0])
    for wrong in (row.experts[:-1], row.experts[:1], row.experts[..., :1]):
        with pytest.raises(ValueError, match="routed experts of shape"):
            policy(dataclasses.replace(row, experts=wrong))
    with pytest.raises(ValueError, match="needs a row with experts"):
        policy(dataclasses.replace(row, experts=None))
    with pytest.raises(ValueError, match="only it takes one"):
        plain(row)


def two_steps(cfg, ranks, groups):
    """Two gradient steps of this rank's part of `groups`, then an export; what they gave, and the gathers of a publication."""
    policy = train.load_policy(cfg, ranks)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    metrics = []
    for _ in range(2):
        batch = make_batches(groups, cfg.layout.trainers, 24, 0)[ranks.role.rank]
        metrics.append(train.gradient_step(policy, optimizer, batch, 0.0, cfg, lambda: False))
    checkpoint.export_hf(
        os.path.join(cfg.run.dir, "hf"), policy.lm, "float32", rollout.open_prompts(cfg).tokenizer, ranks
    )
    gathered, real = [], sync.full_tensor
    sync.full_tensor = lambda p: gathered.append(p.shape) or real(p)
    names = [name for name, _ in sync.published_tensors(sync.published_parameters(policy.lm))]
    sync.full_tensor = real
    assert len(gathered) == len(list(policy.parameters())) < len(names)  # each once, though experts are many tensors
    return metrics, tiny.weights(policy.lm)


def test_sharded_learners_with_recomputation_do_what_one_does(moe_dir, tmp_path):
    rng = np.random.default_rng(0)
    groups = [tiny.group(rng, t) for t in range(4)]
    for r in (r for g in groups for r in g.rollouts):
        r.experts = random_experts(rng, len(r.tokens) - 1, 2)
    results = []
    for trainers in (1, 2):
        cfg = tiny.config(
            moe_dir, tmp_path / str(trainers), f"layout.trainers={trainers}", "rollout.routing_replay=true",
            f"model.activation_checkpointing={trainers == 2}", engines=0,
        )  # fmt: skip
        results.append(tiny.run_ranks(cfg, two_steps, groups)[0])
    (one, weights_one), (two, weights_two) = results
    for a, b in zip(one, two):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
        assert a["train/routing_changed_frac"] == b["train/routing_changed_frac"] > 0.5  # random experts, 28 pairs
    for name, weight in weights_one.items():
        assert np.abs(weight - weights_two[name]).max() < 1e-5, name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "2" / "hf", dtype=torch.float32)
    for name, p in exported.named_parameters():
        assert np.array_equal(p.detach().numpy(), weights_two[name]), name


# ------------------------------------------------------------------------------------------------------- names and checks


def test_published_tensors_are_those_of_transformers_own_checkpoint(moe_dir, lm, tmp_path):
    lm.save_pretrained(tmp_path)
    saved, exported = load_file(tmp_path / "model.safetensors"), load_file(f"{moe_dir}/model-00001.safetensors")
    sent = dict(sync.published_tensors(sync.published_parameters(lm)))
    assert sent.keys() == saved.keys() and len(sent) > 2 * 3 * EXPERTS
    assert exported.keys() == saved.keys()
    assert all(torch.equal(sent[name], t) and torch.equal(exported[name], t) for name, t in saved.items())
    shapes = sync.published_shapes(lm)
    assert list(shapes) == list(sent) and all(shapes[name] == tuple(t.shape) for name, t in sent.items())


def test_a_moe_model_with_other_names_is_refused():
    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=8, num_local_experts=2, **small))
    with pytest.raises(ConfigError, match="a mixtral checkpoint holds model.layers.0.mlp.* as model.layers.0.block_sparse_moe"):
        sync.published_shapes(model)


def test_replay_without_routers_is_refused(model_dir):
    for dense in (shape(decoder_sparse_step=2), shape(mlp_only_layers=[1])):
        with pytest.raises(ConfigError, match="model.path: here has layers without experts"):
            routing.routing_of(dense, "here")
    with pytest.raises(ConfigError, match="rollout.routing_replay: .*qwen3_moe.*is of type qwen3;"):
        routing.routing_of(AutoConfig.from_pretrained(model_dir), model_dir)


def test_experts_survive_the_wire_and_a_checkpoint():
    rng = np.random.default_rng(0)
    group = tiny.group(rng, 3)
    for r in group.rollouts:
        r.experts = random_experts(rng, len(r.tokens) - 1, 2)
    for got in (trajectory.decode(trajectory.encode(group)), *trajectory.decode_groups(trajectory.encode([group, group]))):
        for a, b in zip(group.rollouts, got.rollouts):
            b.check(100, REPLAY)
            assert np.array_equal(a.experts, b.experts) and a.experts.dtype == b.experts.dtype
            assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.behaviour_logp, b.behaviour_logp)


def test_a_rollout_whose_experts_do_not_fit_is_refused():
    (r,) = rollouts(np.random.default_rng(0), 1)
    r.check(100, REPLAY)
    with pytest.raises(ValueError, match="with routed experts"):
        r.check(100)
    twice, beyond = r.experts.copy(), r.experts.copy()
    twice[3, 1] = 4
    beyond[2, 0, 1] = EXPERTS
    for wrong, words in (
        (None, "without routed experts"), (r.experts[:-1], "of shape"), (r.experts[:, :1], "of shape"),
        (twice, "twice"), (beyond, "of 8"),
    ):  # fmt: skip
        r.experts = wrong
        with pytest.raises(ValueError, match=words):
            r.check(100, REPLAY)


def test_experts_are_parsed_and_checked():
    sent = random_experts(np.random.default_rng(0), 5, 2).astype(np.int32)

    def parse(array):
        return parse_experts({"routed_experts": base64.b64encode(array.tobytes()).decode()}, 5, REPLAY)

    got = parse(sent)
    assert np.array_equal(got, sent) and got.dtype == np.uint8
    many = dataclasses.replace(REPLAY, experts=257)
    assert many.dtype == np.uint16
    negative = sent.copy()
    negative[0, 0, 0] = -1
    for wrong in (sent[:-1], sent[:, :1], np.zeros_like(sent), negative, sent + 256):
        with pytest.raises(EngineError, match="routed experts"):
            parse(wrong)
    for meta in ({}, {"routed_experts": None}, {"routed_experts": "*"}):
        with pytest.raises(EngineError, match="routed experts"):
            parse_experts(meta, 5, REPLAY)


# -------------------------------------------------------------------------------------------------------- a real engine


@pytest.fixture(scope="module")
def engine(moe_dir, tmp_path_factory):
    """As in conftest, with a MoE model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = Engine(moe_dir, tmp_path_factory.mktemp("engine"), "rollout.routing_replay=true")
    try:
        loaded = sync.published_tensors(sync.published_parameters(engine.lm))
        engine.wait(engine.engine.verify(dict(loaded), 60))  # SGLang has read the export as transformers did
        engine.replay = train.Policy(engine.lm, 1.0, 64, True)
        engine.publish()
        yield engine
    finally:
        engine.close()
        torch.set_num_threads(threads)


def sample(engine, n=16, tokens=32):
    responses = engine.wait(engine.generate(PROMPT, n, Sampling(1.0, tokens, routing=engine.prompts.routing)))
    made = [rollout.to_rollout(PROMPT, r, "", 0.0, None) for r in responses]
    for r in made:
        r.check(engine.prompts.vocab_size, engine.prompts.routing)
    return made


def mismatch(lm_or_policy, made):
    """|learner's - engine's| logprob of each sampled token, [N], without replay for a plain model."""
    if not isinstance(lm_or_policy, train.Policy):
        made = [copy.copy(r) for r in made]
        for r in made:
            r.experts = None
        lm_or_policy = train.Policy(lm_or_policy, 1.0, 64)
    row = make_row(made, [0.0] * len(made))
    with torch.no_grad():
        return (lm_or_policy(row) - row.behaviour_logp).abs()


@pytest.mark.engine
def test_learner_and_engine_agree_and_route_alike(engine):
    made = sample(engine)
    assert mismatch(engine.replay, made).max() < 1e-4
    row = make_row(made, [0.0] * len(made))
    changed, total = routing.changed(engine.replay.routers, row.experts).tolist()
    assert changed <= total * 1e-3  # two kernels may differ where two experts are level
    for r in made:
        assert (np.sort(own_choice(engine.lm, r)) == np.sort(r.experts)).all(-1).mean() > 0.999
    without = Sampling(1.0, 4)
    assert engine.wait(engine.generate(PROMPT, 1, without))[0].experts is None


@pytest.mark.engine
def test_every_parameter_is_the_learners_bitwise(engine):
    before = copy.deepcopy(engine.published)
    engine.publish()  # sync.verify is on: engine.Engine.verify compares with sync.engine_checksums
    assert all(not torch.equal(before[name], tensor) for name, tensor in engine.published.items())
    (rank,) = engine.wait(engine.server.post("/weights_checker", {"action": "checksum"}))["ranks"]
    experts = {n: c for n, c in rank["checksums"].items() if ".experts." in n}
    expected = {}
    for i in (0, 1):  # SGLang's layout of a layer's experts is transformers' own
        for theirs, ours in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
            fused = engine.published[f"model.layers.{i}.mlp.experts.{ours}"].numpy()
            expected[f"model.layers.{i}.mlp.experts.{theirs}"] = hashlib.sha256(fused.tobytes()).hexdigest()[:16]
    assert experts == expected
    assert mismatch(engine.replay, sample(engine)).max() < 1e-4  # and it computes with them


def disturbed(policy, noise, of):
    """A copy with normal noise on the parameters whose name contains `of`."""
    moved = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            if of in name:
                p += noise * torch.randn(p.shape, generator=generator)
    return moved


def compare(policy, made, what):
    """(pairs rerouted by replay, mismatch with replay, mismatch without it); printed, for the README."""
    replayed, plain = mismatch(policy, made), mismatch(policy.lm, made)
    mismatch(policy, made)
    changed, total = routing.changed(policy.routers, make_row(made, [0.0] * len(made)).experts).tolist()
    print(
        f"\n{what}: rerouted {changed} of {total}; largest and mean mismatch {plain.max():.2g} and {plain.mean():.2g},"
        f" with replay {replayed.max():.2g} and {replayed.mean():.2g}",
        end="",
    )
    return changed, replayed, plain


@pytest.mark.engine
def test_replay_removes_the_mismatch_that_other_routing_makes(engine):
    made = sample(engine, n=64)
    # Routers (standard deviation 0.15) that moved a little: hardly any token is routed otherwise, but those jump.
    changed, replayed, plain = compare(disturbed(engine.replay, 3e-4, "mlp.gate.weight"), made, "routers moved by 3e-4")
    assert changed > 0 and plain.max() > 0.5 and replayed.max() < 0.03
    # What replay leaves is the gate weights' own change, proportional to the step.
    _, third, _ = compare(disturbed(engine.replay, 1e-4, "mlp.gate.weight"), made, "routers moved by 1e-4")
    assert 2.5 < replayed.mean() / third.mean() < 3.5
    # The precision of the learner alone.
    changed, replayed, plain = compare(copy.deepcopy(engine.replay).bfloat16(), made, "a bfloat16 learner")
    assert changed > 0 and plain.max() > 0.5 and replayed.max() < 0.2
    # A publication: the rollouts are now one version old.
    engine.publish(noise=3e-4)
    changed, replayed, plain = compare(engine.replay, made, "all weights moved by 3e-4")
    assert changed > 0 and plain.max() > 0.5 and replayed.max() < 0.15
    assert mismatch(engine.replay, sample(engine)).max() < 1e-4


@pytest.mark.engine
def test_a_response_across_an_update_has_the_experts_that_each_token_went_to(engine):
    replay = Sampling(1.0, 200, routing=engine.prompts.routing)
    for seconds in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):  # until the publication falls into the middle of a response
        old, before = engine.server.version, copy.deepcopy(engine.replay)
        long = engine.begin(engine.generate(PROMPT, 16, replay))
        engine.wait(asyncio.sleep(seconds))
        engine.publish(noise=0.05)
        responses = long.result(120)
        across = [r for r in responses if len(set(r.versions)) == 2]
        if across:
            break
    assert across, "no request was in flight during a publication"
    for r in (rollout.to_rollout(PROMPT, r, "", 0.0, None) for r in across):
        r.check(engine.prompts.vocab_size, engine.prompts.routing)
        n = int((r.versions == old).sum())
        # What the old weights route, up to the token whose successor was the first sample of the new ones.
        alike = (np.sort(own_choice(before.lm, r)) == np.sort(r.experts)).all(-1)
        assert alike[: len(PROMPT) + n - 1].mean() > 0.999
        assert not alike[len(PROMPT) + n :].all()
        assert mismatch(before, [r])[:n].max() < 1e-4
