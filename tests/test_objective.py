"""The formulas of objective.py against loops over Python floats, and the cutting of a batch into rows."""

import math
import statistics

import numpy as np
import pytest
import tiny
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import objective as objective_choices
import train
import trajectory
from batch import make_batches, make_row, pack
from configs import schema

DEFAULTS = dict(eps=0.6, k=0.5, r_min=0.0, r_max=50.0)

# ---------------------------------------------------------------------------------------------------------- the oracle


def clip(x, dx, low, high):
    """Value and derivative."""
    return (low, 0.0) if x < low else (high, 0.0) if x > high else (x, dx)


def objective(tokens, normalizer, eps, k, r_min, r_max):
    """(J, [dJ/dlogp]) of [(logp, behaviour_logp, advantage, mask)], one token after another in Python floats."""
    total, gradient = 0.0, []
    for logp, behaviour, advantage, mask in tokens:
        if not mask:
            gradient.append(0.0)
            continue
        r = math.exp(logp - behaviour)
        outer, d_outer = clip(r, r, r_min, r_max)
        trusted, d_trusted = clip(r, r, 1 - eps, 1 / (1 - eps) + k)
        if outer * advantage < trusted * advantage:
            value, slope = outer, d_outer
        elif outer * advantage > trusted * advantage:
            value, slope = trusted, d_trusted
        else:
            value, slope = outer, (d_outer + d_trusted) / 2
        total += value * advantage / normalizer
        gradient.append(slope * advantage / normalizer)
    return total, gradient


def loss_and_gradient(tokens, normalizer, dtype=torch.float64, **constants):
    logp, behaviour, advantages, mask = (torch.tensor(column, dtype=dtype) for column in zip(*tokens))
    logp.requires_grad_()
    loss = train.policy_loss(logp, behaviour, advantages, mask, normalizer, **constants)
    loss.backward()
    return loss.item(), logp.grad.tolist()


LOGP = st.floats(-20, 0)
TOKEN = st.tuples(LOGP, LOGP, st.floats(-12, 12), st.integers(0, 1))


# ------------------------------------------------------------------------------------------------------- the objective


@settings(deadline=None)
@given(
    st.lists(TOKEN, min_size=1, max_size=20),
    st.integers(1, 1000),
    st.floats(0.05, 0.9),
    st.floats(0, 2.5),
    st.floats(0, 0.04),
    st.floats(13, 100),
)
def test_loss_and_gradient_equal_the_loops(tokens, normalizer, eps, k, r_min, r_max):
    constants = dict(eps=eps, k=k, r_min=r_min, r_max=r_max)
    for logp, behaviour, _, _ in tokens:  # at a corner the derivative is a matter of taste
        r = math.exp(logp - behaviour)
        assume(all(abs(r - corner) > 1e-9 for corner in (1 - eps, 1 / (1 - eps) + k, r_min, r_max)))
    expected, gradient = objective(tokens, normalizer, **constants)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        loss, slopes = loss_and_gradient(tokens, normalizer, dtype, **constants)
        assert loss == pytest.approx(-expected, rel=tolerance, abs=tolerance)
        if dtype == torch.float64:
            assert slopes == pytest.approx([-g for g in gradient], rel=tolerance, abs=tolerance)
        assert all(math.isfinite(g) for g in slopes)


@pytest.mark.parametrize(
    "ratio, advantage, value, learns",
    [
        (1.0, 2.0, 2.0, True),
        (0.1, 1.0, 0.1, True),  # a good token that became rare may grow
        (2.9, 1.0, 2.9, True),  # below 2.5 + k
        (3.1, 1.0, 3.0, False),  # the upper side of the trust region
        (0.3, -1.0, -0.4, False),  # its lower side
        (30.0, -1.0, -30.0, True),  # a bad token that became likely is pushed back,
        (60.0, -1.0, -50.0, False),  # but never harder than the outer clip allows
        (1.7, 0.0, 0.0, False),
    ],
)
def test_each_branch(ratio, advantage, value, learns):
    loss, (slope,) = loss_and_gradient([(math.log(ratio) - 5, -5.0, advantage, 1)], 1, **DEFAULTS)
    assert loss == pytest.approx(-value)
    assert slope == pytest.approx(-ratio * advantage if learns else 0.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("column", ["logp", "behaviour", "advantage"])
def test_masked_positions_count_for_nothing_whatever_they_hold(garbage, column):
    clean = [(-1.0, -1.2, 1.0, 1), (-2.0, -2.0, -1.0, 0), (-0.5, -3.0, -1.0, 1)]
    dirty = [list(token) for token in clean]
    dirty[1][("logp", "behaviour", "advantage").index(column)] = garbage
    for dtype in (torch.float32, torch.float64):
        loss, slopes = loss_and_gradient(dirty, 2, dtype, **DEFAULTS)
        assert (loss, slopes) == loss_and_gradient(clean, 2, dtype, **DEFAULTS)
        assert math.isfinite(loss) and slopes[1] == 0


@pytest.mark.parametrize("normalizer", [0, 7])
def test_batch_without_a_sampled_token_gives_a_finite_zero(normalizer):
    tokens = [(math.nan, -1.0, 1.0, 0), (-1.0, -1.0, 1.0, 0)]
    loss, slopes = loss_and_gradient(tokens, normalizer, torch.float32, **DEFAULTS)
    assert loss == 0 and slopes == [0, 0]


@pytest.mark.parametrize("difference", [-1e4, -200.0, -85.0, 85.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-3.0, 3.0])
def test_ratio_beyond_floating_point_gives_finite_loss_and_gradient(difference, advantage):
    tokens = [(min(difference, 0.0), min(-difference, 0.0), advantage, 1), (-1.0, -1.0, 1.0, 1)]
    loss, slopes = loss_and_gradient(tokens, 2, torch.float32, **DEFAULTS)
    far = (3.0 if advantage > 0 else 50.0) if difference > 0 else (0.0 if advantage > 0 else 0.4)
    assert loss == pytest.approx(-(far * advantage + 1) / 2)
    assert slopes == pytest.approx([0.0, -0.5])


def test_cut_into_micro_batches_sums_to_the_whole():
    rng = np.random.default_rng(0)
    tokens = [(*-rng.exponential(2, 2), rng.normal(), int(rng.integers(0, 2))) for _ in range(64)]
    whole, gradient = loss_and_gradient(tokens, 30, **DEFAULTS)
    for size in (1, 7, 32):
        parts = [loss_and_gradient(tokens[i : i + size], 30, **DEFAULTS) for i in range(0, 64, size)]
        assert sum(loss for loss, _ in parts) == pytest.approx(whole, abs=1e-12)
        assert [g for _, slopes in parts for g in slopes] == pytest.approx(gradient, abs=1e-15)


# -------------------------------------------------------------------------------------------------------- the variants

SEQUENCES = [(-1.0, [-1.0, -0.3, -2.0]), (1.5, [-0.5]), (0.5, [-3.0, -0.2, -0.1, -1.5, -0.7])]  # (advantage, logps)
DRIFT = [[-1.2, 0.1, 2.3], [0.02], [0.3, -0.9, 1.9, 0.0, -0.05]]  # logp - behaviour, per token
MAX_TOKENS = 8


def variant(name):
    """Loss and d loss / d logp per token of SEQUENCES under a peer's objective, in Python floats from the papers."""
    n = sum(len(logps) for _, logps in SEQUENCES)
    loss, slopes = 0.0, []
    for (advantage, logps), drift in zip(SEQUENCES, DRIFT, strict=True):
        per_sequence = 1 / (3 * len(logps))
        weight = {"grpo": per_sequence, "gspo": per_sequence, "dr_grpo": 1 / (3 * MAX_TOKENS)}.get(name, 1 / n)
        for logp, d in zip(logps, drift, strict=True):
            r = math.exp(d)
            if name == "gspo":
                r = math.exp(sum(drift) / len(drift))
                bounded = min(max(r, 1 - 3e-4), 1 + 4e-4)
                value = min(r * advantage, bounded * advantage)
                slope = r * advantage if r * advantage <= bounded * advantage else 0.0
            elif name in ("ppo", "grpo", "dr_grpo", "dapo"):
                bounded = min(max(r, 0.8), 1.28 if name == "dapo" else 1.2)
                value = min(r * advantage, bounded * advantage)
                slope = r * advantage if r * advantage <= bounded * advantage else 0.0
            else:
                weight_of_token = {
                    "cispo": min(r, 5.0), "tis": min(r, 2.0), "icepop": r if 0.5 <= r <= 5 else 0.0,
                }[name]  # fmt: skip
                value, slope = weight_of_token * advantage * logp, weight_of_token * advantage
            loss -= weight * value
            slopes.append(-weight * slope)
    return loss, slopes


@pytest.mark.parametrize("name", objective_choices.PEERS)
def test_peers_objective_equals_the_loops(name):
    cfg = schema.Train(objective=name)
    logp = torch.tensor([x for _, logps in SEQUENCES for x in logps], dtype=torch.float64, requires_grad=True)
    drift = torch.tensor([d for drift in DRIFT for d in drift], dtype=torch.float64)
    lengths = torch.tensor([len(logps) for _, logps in SEQUENCES])
    advantages = torch.tensor([a for a, _ in SEQUENCES], dtype=torch.float64).repeat_interleave(lengths)
    sequence = torch.arange(3).repeat_interleave(lengths)
    behaviour = logp.detach() - drift
    counts = dict(tokens=int(lengths.sum()), sequences=3, max_tokens=MAX_TOKENS, k=1.0, train=cfg)
    loss = objective_choices.batch_loss(logp, behaviour, advantages, sequence, **counts)
    loss.backward()
    expected, slopes = variant(name)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert logp.grad.tolist() == pytest.approx(slopes, abs=1e-12)
    whole = logp.grad.clone()  # and the parts of a batch that was cut between two sequences add up to it
    logp.grad = None
    for part in (slice(0, 4), slice(4, 9)):
        own = sequence[part] - sequence[part][0]
        objective_choices.batch_loss(logp[part], behaviour[part], advantages[part], own, **counts).backward()
    assert logp.grad.tolist() == pytest.approx(whole.tolist(), abs=1e-12)
    empty = objective_choices.batch_loss(logp[:0], behaviour[:0], advantages[:0], sequence[:0], **counts)
    assert empty.item() == 0, "a row without a sampled token, as a rank with fewer rows gets it"


@pytest.mark.parametrize(
    "name, advantage, ratio, k, expected",
    [
        ("rocket", 1.0, 10.0, 2.0, 4.5),
        ("fixed_clip", 1.0, 10.0, 2.0, 2.5),
        ("no_outer_clip", 1.0, 10.0, 2.0, 4.5),
        ("rocket", -1.0, 1e4, 2.0, -50.0),
        ("fixed_clip", -1.0, 1e4, 2.0, -50.0),
        ("no_outer_clip", -1.0, 1e4, 2.0, -1e4),
    ],
)
def test_switch_offs_take_out_one_part_each(name, advantage, ratio, k, expected):
    one = torch.ones(1, dtype=torch.float64)
    logp = one * math.log(ratio) - 20
    sequence = torch.zeros(1, dtype=torch.int64)
    counts = dict(tokens=1, sequences=1, max_tokens=8, k=k, train=schema.Train(objective=name))
    loss = objective_choices.batch_loss(logp, -20 * one, advantage * one, sequence, **counts)
    assert loss.item() == pytest.approx(-expected)


def test_only_where_k_acts_it_follows_the_entropy():
    controlled = {n for n in [*objective_choices.RECIPE, *objective_choices.PEERS] if objective_choices.is_controlled(n)}
    assert controlled == {"rocket", "no_outer_clip"}


def test_every_choice_of_the_config_is_an_objective():
    for name in [*objective_choices.RECIPE, *objective_choices.PEERS]:
        objective_choices.check(name)
    with pytest.raises(schema.ConfigError, match="train.objective: must be one of rocket, .*, icepop, not trust-me"):
        objective_choices.check("trust-me")


# ----------------------------------------------------------------------------------------------------------- advantages


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=64))
def test_advantages_equal_the_loops(rewards):
    std = statistics.pstdev(rewards)
    assume(std > 1e-3)
    mean = statistics.fmean(rewards)
    expected = [(r - mean) / std for r in rewards]
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 0.05)):
        advantages = train.group_advantages(torch.tensor(rewards, dtype=dtype))
        assert advantages.dtype == dtype and advantages.tolist() == pytest.approx(expected, abs=tolerance)


@settings(deadline=None)
@given(st.floats(-1e4, 1e4, width=32), st.integers(2, 128), st.sampled_from([torch.float32, torch.float64]))
def test_group_without_variance_has_zero_advantages(reward, size, dtype):
    assert train.group_advantages(torch.full((size,), reward, dtype=dtype)).tolist() == [0.0] * size


def test_rounding_noise_is_no_variance():
    noise = [0.1 + 0.2, 0.3, 0.3 + 1e-12]
    assert train.group_advantages(torch.tensor(noise, dtype=torch.float64)).tolist() == [0, 0, 0]


def test_advantages_of_the_report_example():
    advantages = train.group_advantages(torch.tensor([1.0, 0, 0, 0]))
    assert advantages.tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)
    assert advantages.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------- controller


@pytest.mark.parametrize(
    "k, entropy, expected",
    [
        (0.0, 0.2, 0.25),  # too low: widen
        (1.0, 0.4, 0.75),  # too high: narrow
        (1.0, 0.3, 1.0),  # on target: stay
        (0.1, 0.4, 0.0),  # never below 0
        (2.4, 0.2, 2.5),  # never above k_max
        (0.0, 0.4, 0.0),
        (2.5, 0.2, 2.5),
    ],
)
def test_clip_controller(k, entropy, expected):
    assert train.next_clip_k(k, entropy, target=0.3, delta=0.25, k_max=2.5) == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------------- rows


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200))
def test_packing_places_every_sequence_once_and_overfills_no_row(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fills = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < fill <= capacity for fill in fills)
    # first fit never leaves two rows that would go into one
    assert all(a + b > capacity for i, a in enumerate(fills) for b in fills[:i])


def test_sequence_that_no_row_can_hold_is_an_error():
    with pytest.raises(ValueError, match="51 tokens"):
        pack([10, 51], 50)


EOS = PAD = 1


def sequence(prompt, response, **options):
    r = tiny.rollout(np.random.default_rng(0), len(prompt), len(response), **options)
    r.tokens = np.array(prompt + response, dtype=np.int32)
    return r


def test_masks_come_from_lengths_not_from_token_ids():
    """The end-of-sequence token is learned although it is the pad token, and so is one in mid-response; a pad token
    in a prompt is not."""
    finished, truncated = sequence([PAD, 7], [8, EOS]), sequence([9, EOS], [EOS, 5, 6], finish="length")
    row = make_row([finished, truncated], [1.0, -1.0])
    assert row.tokens.tolist() == [PAD, 7, 8, EOS, 9, EOS, EOS, 5, 6]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert row.targets.tolist() == [8, EOS, EOS, 5, 6]
    assert row.predictors.tolist() == [1, 2, 5, 6, 7]
    assert row.advantages.tolist() == [1, 1, -1, -1, -1]
    assert row.behaviour_logp.tolist() == [*finished.behaviour_logp[2:], *truncated.behaviour_logp[2:]]


def test_tokens_of_a_tool_in_mid_response_are_read_and_not_learned():
    r = sequence([5], [6, 7, 8, 9])
    r.mask[:] = [0, 1, 0, 0, 1]
    row = make_row([r], [1.0])
    assert row.tokens.tolist() == [5, 6, 7, 8, 9]
    assert row.targets.tolist() == [6, 9] and row.predictors.tolist() == [0, 3]


def test_sampled_first_token_is_an_error():
    r = sequence([5], [6])
    r.mask[0] = 1
    with pytest.raises(ValueError, match="first token"):
        make_row([r], [1.0])


def test_kept_ids_stay_with_their_tokens():
    a, b = sequence([1], [2, 3]), sequence([1], [4])
    a.kept_counts, a.kept_ids = np.array([0, 1, 1], np.uint16), np.array([2, 3], np.int32)
    b.kept_counts, b.kept_ids = np.array([0, 3], np.uint16), np.array([4, 8, 9], np.int32)
    assert make_row([a, b], [1.0, 1.0]).kept.tolist() == [[2, -1, -1], [3, -1, -1], [4, 8, 9]]


@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_batches_share_out_every_sequence_once(trainers, groups):
    rng = np.random.default_rng(groups)
    made = [tiny.group(rng, t, size=4, response=int(rng.integers(1, 30)), version=t) for t in range(groups)]
    batches = make_batches(made, trainers, capacity=40, version=7)
    assert len(batches) == trainers
    assert len({len(b.rows) for b in batches}) == 1, "FSDP's collectives need the same number of rows on every rank"
    assert all(len(row.tokens) <= 40 for b in batches for row in b.rows)
    sampled = sum(int(r.mask.sum()) for g in made for r in g.rollouts)
    assert {b.normalizer for b in batches} == {sampled} and {b.version for b in batches} == {7}

    expected = []  # (token, behaviour logprob, advantage, version) of every sampled token
    for g in made:
        for r, advantage in zip(g.rollouts, [-1.0, 1.0, -1.0, 1.0]):
            at = r.mask == 1
            expected += zip(r.tokens[at], r.behaviour_logp[at], [advantage] * at.sum(), r.versions[at])
    dealt = []
    for row in (row for b in batches for row in b.rows):
        assert (row.tokens[row.predictors + 1] == row.targets).all()
        columns = (row.targets, row.behaviour_logp, row.advantages.round(decimals=6), row.versions)
        dealt += zip(*(c.tolist() for c in columns))
    assert sorted(dealt) == sorted((int(t), float(b), a, int(v)) for t, b, a, v in expected)


def test_tokens_are_balanced_over_ranks():
    """Rows of 64, 48, 40 and 34 tokens for two ranks: the one with the longest gets the shortest."""
    rng = np.random.default_rng(3)
    rollouts = [tiny.rollout(rng, 4, n - 4, reward=float(n > 40)) for n in (40, 64, 34, 48)]
    batches = make_batches([trajectory.Group(0, 0, "p", "s", "q", rollouts)], 2, capacity=64, version=0)
    assert [[len(row.tokens) for row in b.rows] for b in batches] == [[64, 34], [48, 40]]


def test_advantages_of_dr_grpo_are_not_divided_by_the_spread():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert objective_choices.advantages_of("dr_grpo")(rewards).tolist() == [0.75, -0.25, -0.25, -0.25]
    rng = np.random.default_rng(0)
    made = [trajectory.Group(0, 0, "p", "s", "q", [tiny.rollout(rng, reward=float(i == 0)) for i in range(4)])]
    (batch,) = make_batches(made, 1, capacity=64, version=0, objective="dr_grpo")
    assert sorted(set(batch.rows[0].advantages.tolist())) == [-0.25, 0.75]
