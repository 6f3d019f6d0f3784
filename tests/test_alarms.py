"""Collapse alarms: loops against brute force, thresholds, what moved first, and what an alarm leaves on disk."""

import json
import os
import types

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import alarms
import checkpoint
import log
import train
from batch import make_batches
from configs import schema

# ------------------------------------------------------------------------------------------------------------------ loops


def loop_by_definition(ids, tokens=16, repeats=4):
    for period in range(1, len(ids) + 1):
        need = max(tokens, repeats * period)
        if need <= len(ids) and all(ids[-i] == ids[-i - period] for i in range(1, need - period + 1)):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    head=st.lists(st.integers(0, 3), max_size=40),
    block=st.lists(st.integers(0, 3), max_size=9),
    times=st.integers(0, 6),
    cut=st.integers(0, 3),
)
def test_loops_are_those_of_the_definition(head, block, times, cut):
    ids = (head + block * times)[: -cut or None]
    assert alarms.ends_in_loop(np.array(ids, dtype=np.int32)) == loop_by_definition(ids)


def test_where_a_loop_begins_and_ends():
    def ends(ids):
        return alarms.ends_in_loop(np.array(ids, dtype=np.int32))

    assert ends([7] * 16) and not ends([7] * 15) and not ends([7] * 30 + [8])
    assert ends([*range(100), *[1, 2, 3, 4, 5] * 4]) and not ends([*range(100), *[1, 2, 3, 4, 5] * 3, 2, 3, 4, 5, 6])
    assert ends([*range(5000), *range(700)] + [*range(700)] * 3) and not ends([*range(700)] * 3)
    assert not ends([]) and not ends([1])


def test_the_strings_that_deceive_such_a_hash_do_not_deceive_the_comparison():
    """Thue-Morse: modulo 2^64 a block and its complement have one hash, whatever the base."""
    block = np.array([bin(i).count("1") % 2 for i in range(2048)])
    ids = np.concatenate([1 - block, block, block, block]).astype(np.int32)
    assert not alarms.ends_in_loop(ids)
    assert alarms.ends_in_loop(np.tile(block, 4).astype(np.int32))


def test_a_stop_token_does_not_hide_a_loop():
    r = tiny.rollout(np.random.default_rng(0), prompt=3, response=20)
    r.tokens[3:-1], r.tokens[-1] = 5, 6
    assert log.loops(r)
    r.finish = "length"
    assert not log.loops(r)
    r.tokens[-1] = 5
    assert log.loops(r)
    r.mask[:10] = 0  # the rest alone is too short, and the prompt is not the policy's
    assert not log.loops(r)


# ----------------------------------------------------------------------------------------------------------- thresholds

HEALTHY = {
    "train/entropy": 0.3, "train/mismatch_kl": 1e-4, "train/grad_norm": 0.3, "train/ess": 0.98,
    "rollout/repetition": 0.0, "rollout/truncated_frac": 0.02,
}  # fmt: skip
BAD = {
    "entropy_low": ("train/entropy", 0.001), "entropy_high": ("train/entropy", 9.0),
    "mismatch_kl": ("train/mismatch_kl", 0.5), "grad_norm": ("train/grad_norm", 80.0), "ess": ("train/ess", 0.1),
    "repetition": ("rollout/repetition", 0.9), "truncated_frac": ("rollout/truncated_frac", 0.9),
}  # fmt: skip


def line(step, **changes):
    rng = np.random.default_rng(step)
    return {"step": step} | {k: v * rng.uniform(0.8, 1.0) for k, v in HEALTHY.items()} | changes


def watched(cfg, lines):
    """[(step, key)] of every alarm."""
    watch = alarms.Watch(cfg, [])
    return [(a.step, a.signal.key) for metrics in lines for a in watch.see(metrics)]


@pytest.mark.parametrize("key", BAD)
def test_each_signal_alarms_after_its_patience_and_once(key):
    metric, value = BAD[key]
    lines = [line(n, **({metric: value} if n >= 30 else {})) for n in range(1, 60)]
    assert watched(schema.Alarms(patience=4), lines) == [(33, key)]
    assert watched(schema.Alarms(**{key: 0}), lines) == [], "a threshold of 0 is off"
    stopped = watched(schema.Alarms(patience=4, action="stop"), lines)
    assert stopped == [(n, key) for n in range(33, 60)], "where it stops the run, for as long as it lasts"


def test_a_spike_and_the_warm_up_do_not_alarm():
    spikes = [line(n, **({"train/grad_norm": 80.0} if n % 3 else {})) for n in range(1, 60)]
    assert watched(schema.Alarms(patience=3), spikes) == []
    start = [line(n, **({"train/mismatch_kl": 1.0} if n <= 12 else {})) for n in range(1, 60)]
    assert watched(schema.Alarms(after=10), start) == []
    assert watched(schema.Alarms(after=9), start) == [(12, "mismatch_kl")]


def test_nan_is_beyond_every_threshold():
    lines = [line(n, **({"train/ess": float("nan")} if n > 20 else {})) for n in range(1, 30)]
    assert watched(schema.Alarms(), lines) == [(23, "ess")]


# ------------------------------------------------------------------------------------------------------ what moved first


def collapse(n):
    """The gradient moves at step 41, loops at 49, the entropy is below its threshold from 55 on."""
    changes = {}
    if n >= 41:
        changes["train/grad_norm"] = 2.0 + 0.2 * (n - 41)
    if n >= 49:
        changes["rollout/repetition"] = 0.03 * (n - 48)
    if n >= 51:
        changes["train/entropy"] = 0.3 * 0.4 ** (n - 50)
    return line(n, **changes)


def test_alarm_tells_what_moved_first():
    watch = alarms.Watch(schema.Alarms(), [])
    (alarm,) = [a for n in range(1, 57) for a in watch.see(collapse(n))]
    assert alarm.moved == [("train/grad_norm", 41), ("rollout/repetition", 49), ("train/entropy", 51)]
    assert alarm.line(40, "train/grad_norm") == (
        "alarm at step 56: train/entropy 0.001229 below alarms.entropy_low=0.01 for 3 steps; "
        "moved first: train/grad_norm (step 41), then rollout/repetition (step 49), then train/entropy (step 51); "
        "checkpoints/step_40 is the last from before train/grad_norm moved"
    )
    assert alarm.line(-1, "train/grad_norm").endswith("; no checkpoint from before is kept (run.keep_checkpoints, run.checkpoint_every)")


@pytest.mark.parametrize("cut", [0, 5, 30, 54, 55, 56])
def test_a_resumed_run_alarms_as_if_it_had_not_been_interrupted(cut):
    lines = [collapse(n) for n in range(1, 58)]
    first = alarms.Watch(schema.Alarms(), [])
    expected = [a for metrics in lines for a in first.see(metrics)]
    second = alarms.Watch(schema.Alarms(), lines[:cut])
    assert [a for metrics in lines[cut:] for a in second.see(metrics)] == [a for a in expected if a.step > cut]


def test_lines_from_before_a_metric_existed_are_left_out():
    old = [{k: v for k, v in collapse(n).items() if k != "train/ess"} for n in range(1, 50)]
    watch = alarms.Watch(schema.Alarms(), old)
    (alarm,) = [a for n in range(50, 58) for a in watch.see(collapse(n))]
    assert alarm.step == 56


def test_departure_table():
    flat = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95] * 4
    assert alarms.departure(flat, 10.0, +1) is None
    assert alarms.departure(flat + [2.5, 2.6, 2.7], 10.0, +1) == 24
    assert alarms.departure(flat + [2.5, 1.0, 2.7], 10.0, +1) == 26, "it came back once"
    assert alarms.departure(flat + [1.8, 1.8], 10.0, +1) is None, "less than a tenth of the way to the threshold"
    assert alarms.departure(flat + [2.5] * 3, 0.1, -1) is None, "the harmless side"
    assert alarms.departure(flat + [0.2] * 3, 0.1, -1) == 24
    assert alarms.departure(flat + [2.5] * 19, 10.0, +1) == 24
    assert alarms.departure(flat + [2.5] * 21, 10.0, +1) is None, "a new normal"
    assert alarms.departure(flat + [12.0] * 60, 10.0, +1) == 24, "no normal lies beyond the threshold"
    assert alarms.departure([12.0] * 9, 10.0, +1) == 0
    wild = [1.0, 5.0, 9.0] * 8
    assert alarms.departure(wild + [10.5], 10.0, +1) == 24, "however wide the range, it ends at the threshold"


# ----------------------------------------------------------------------------------------- what an alarm leaves behind


@pytest.fixture
def run_log(model_dir, tmp_path, monkeypatch):
    said = []
    wandb = types.SimpleNamespace(log=lambda metrics: None, alert=lambda **alert: said.append(alert))
    monkeypatch.setattr(log, "start_wandb", lambda config: wandb)
    made = log.RunLog(tiny.config(model_dir, tmp_path), 0)
    made.said = said
    return made


def checkpoints(folder, *steps):
    for step in steps:
        os.makedirs(folder / "checkpoints" / f"step_{step}")


def test_alarm_marks_the_checkpoint_before_and_is_told_everywhere(run_log, tmp_path, capsys):
    checkpoints(tmp_path, 20, 40, 41, 60)
    alarm = alarms.Alarm(57, alarms.SIGNALS[0], 0.001, 0.01, 3, [("train/grad_norm", 41), ("train/entropy", 50)])
    told = run_log.alarm(alarm)
    assert told == alarm.line(40, "train/grad_norm")
    assert [p.parent.name for p in tmp_path.glob("checkpoints/*/before_alarm.json")] == ["step_40"]
    (entry,) = map(json.loads, (tmp_path / "alarms.jsonl").read_text().splitlines())
    assert json.loads((tmp_path / "checkpoints/step_40/before_alarm.json").read_text()) == entry
    assert (entry["step"], entry["metric"], entry["checkpoint"]) == (57, "train/entropy", 40)
    assert (entry["key"], entry["threshold"]) == ("alarms.entropy_low", 0.01)
    assert entry["moved"] == [["train/grad_norm", 41], ["train/entropy", 50]] and entry["line"] == told
    assert capsys.readouterr().err == told + "\n"
    assert [alert["text"] for alert in run_log.said] == [told]
    log.RunLog(run_log.config, 56)
    assert (tmp_path / "alarms.jsonl").read_text() == "", "a run that goes on from before the alarm has not had it"


def test_alarm_without_a_checkpoint_from_before_says_so(run_log, tmp_path):
    checkpoints(tmp_path, 41, 60)
    alarm = alarms.Alarm(57, alarms.SIGNALS[0], 0.001, 0.01, 3, [("train/grad_norm", 41)])
    assert "no checkpoint from before is kept" in run_log.alarm(alarm)
    assert json.loads((tmp_path / "alarms.jsonl").read_text())["checkpoint"] is None


# ------------------------------------------------------------------------------------------------------- in a whole run


def test_run_that_collapses_is_stopped_with_its_checkpoint_from_before(model_dir, tmp_path):
    """Every response of the fake engine is cut at its limit, which is beyond the threshold from step 4 on."""
    from test_learner import RUN, learner_or_fake_engine

    overrides = [
        *RUN, "train.steps=30", "run.checkpoint_every=1", "run.keep_checkpoints=1", "alarms.after=3",
        "alarms.patience=2", "alarms.action=stop", "alarms.mismatch_kl=0", "alarms.ess=0", "alarms.grad_norm=0", "alarms.entropy_low=0",
        "alarms.entropy_high=0", "alarms.truncated_frac=0.9",
    ]  # fmt: skip
    cfg = tiny.config(model_dir, tmp_path, *overrides)
    words = r"Collapse: stopped \(alarms.action=stop\) by the alarm at step 5: rollout/truncated_frac 1 above"
    with pytest.raises(AssertionError, match=words):
        tiny.run_ranks(cfg, learner_or_truncating_engine, learner_or_fake_engine)
    assert checkpoint.latest(tmp_path) == 5, "it was saved"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    with pytest.raises(AssertionError, match="Collapse: .* alarm at step 6"):  # started again as it is
        tiny.run_ranks(cfg, learner_or_truncating_engine, learner_or_fake_engine)


def learner_or_truncating_engine(cfg, ranks, play):
    if ranks.role.kind == "engine":
        make = tiny.group
        tiny.group = lambda *args, **options: make(*args, **options, finish="length")
    return play(cfg, ranks)


def test_of_marked_checkpoints_the_first_and_the_last_are_never_removed(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, "run.keep_checkpoints=2", engines=0)
    tiny.run_ranks(cfg, save_and_mark)
    assert checkpoint.steps(tmp_path) == [2, 4, 6, 7]


def save_and_mark(cfg, ranks):
    from test_checkpoint import Learner

    learner = Learner(cfg, ranks)
    for step in range(1, 8):
        learner.save(step)
        if step in (3, 4, 5):  # 2, 3 and 4 are marked
            checkpoint.mark(cfg.run.dir, checkpoint.last_before(cfg.run.dir, step), {"step": step})


# ------------------------------------------------------------------------------------------------------------- the size


def sample_size(cfg, ranks, groups):
    policy = train.load_policy(cfg, ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    (batch,) = make_batches(groups, 1, 32, version=0)
    logp = torch.cat([policy(row) for row in batch.rows]).detach().double().numpy()
    behaviour = torch.cat([row.behaviour_logp for row in batch.rows]).double().numpy()
    measured = train.gradient_step(policy, optimizer, batch, 0.0, cfg, lambda: False)
    return logp, behaviour, measured["train/ess"]


def test_effective_sample_size_is_of_the_whole_batch(model_dir, tmp_path):
    rng = np.random.default_rng(0)
    groups = [tiny.group(rng, t, size=2, vocab=100) for t in range(4)]
    cfg = tiny.config(model_dir, tmp_path, "train.max_tokens_per_microbatch=32", engines=0)
    ((logp, behaviour, measured),) = tiny.run_ranks(cfg, sample_size, groups)
    r = np.exp(logp - behaviour)
    assert measured == pytest.approx(r.sum() ** 2 / (len(r) * (r**2).sum()), rel=1e-4) and measured < 0.9


def test_signal_that_was_out_for_ages_does_not_cost_the_checkpoint(run_log, tmp_path):
    checkpoints(tmp_path, 480, 500, 520)
    moved = [("rollout/truncated_frac", 1), ("train/grad_norm", 501)]
    told = run_log.alarm(alarms.Alarm(510, alarms.SIGNALS[3], 1e3, 10, 3, moved))
    assert told.endswith("checkpoints/step_500 is the last from before train/grad_norm moved")
    assert (tmp_path / "checkpoints/step_500/before_alarm.json").exists()
