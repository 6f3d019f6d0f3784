"""The life of a group on an engine rank with a made-up server: which requests it makes, under which limits, and what
the gates and the length curriculum count."""

import asyncio
import json
import types

import numpy as np
import pytest
import tiny
import torch.distributed as dist

import log
import rollout
import sync
import train
import trajectory
from configs.schema import Config, Stage
from server import Response

STAGES = "[{max_tokens: 8, w_len: 0.25}, {step: 3, max_tokens: 16, w_len: 0.1}, {step: 50, max_tokens: 32, w_len: 0}]"


class FakeEngines:
    """Answers every request at once with responses of `length` tokens, and remembers the requests."""

    def __init__(self, length):
        self.length, self.requests = length, []

    async def generate(self, prompt, n, sampling, version):
        self.requests.append((n, sampling.max_tokens))
        length = min(self.length, sampling.max_tokens)
        finish = "length" if length == sampling.max_tokens else "stop"
        logp, versions = np.zeros(length, np.float32), np.zeros(length, np.int32)
        return [Response(np.full(length, 7, np.int32), logp, versions, finish, len(prompt), 0)] * n


class FakeGraders:
    """Scores in the order of `tasks`."""

    def __init__(self, tasks):
        self.tasks = iter(tasks)

    async def score_all(self, row, text):
        return {"number": float(next(self.tasks))}, None


def run_group(model_dir, tmp_path, tasks, *overrides, length=5, stage=0):
    """(the group as it is sent, the requests that it made, how many groups were given back)"""
    cfg = tiny.config(model_dir, tmp_path, "rollout.responses_per_request=1", *overrides)
    ranks = types.SimpleNamespace(role=sync.Role(1, "engine", 0, 0), store=dist.HashStore())
    engine = rollout.EngineRank(cfg, ranks, rollout.open_prompts(cfg))
    engine.state.create(counted=0, next_ticket=0, redo=[], plan=[])
    engine.engines, engine.graders, sent = FakeEngines(length), FakeGraders(tasks), []
    engine.outbox = types.SimpleNamespace(send=sent.append)
    asyncio.run(engine.run_group(0, stage, 0))
    (group,) = sent
    assert engine.totals.tokens == sum(int(r.mask.sum()) for r in group.rollouts)
    return group, engine.engines.requests, engine.state.read().returned


TWO_STAGES = [
    "rollout.group_size=8", "rollout.early_size=4", "rollout.early_range=[0.2,0.8]", "rollout.keep_range=[0.2,0.6]",
]  # fmt: skip


@pytest.mark.parametrize(
    "tasks, dropped, requests",
    [
        ([0] * 4, "early_gate", 4),
        ([1] * 4, "early_gate", 4),
        ([1, 0, 0, 0] + [0] * 4, "keep_gate", 8),
        ([1, 1, 1, 0] + [1] * 4, "keep_gate", 8),
        ([1, 0, 1, 0] + [0] * 4, None, 8),
        ([0.5] * 2 + [0.5] * 2 + [0.5] * 4, "early_gate", 4),
    ],
)
def test_two_stage_gate_spends_what_it_says(tasks, dropped, requests, model_dir, tmp_path):
    group, made, returned = run_group(model_dir, tmp_path, tasks, *TWO_STAGES)
    assert group.dropped == dropped and returned == (dropped is not None)
    assert [n for n, _ in made] == [1] * requests == [1] * len(group.rollouts)


def test_gate_metrics_count_prompts_by_gate_and_their_tokens(model_dir, tmp_path):
    lives = [
        ([0] * 4, 3, TWO_STAGES), ([1] * 4, 4, TWO_STAGES), ([1, 0, 0, 0] + [0] * 4, 5, TWO_STAGES),
        ([1, 0, 1, 0] + [0] * 4, 6, TWO_STAGES), ([0] * 8, 7, ["rollout.group_size=8"]),
    ]  # fmt: skip
    groups = [run_group(model_dir, tmp_path, tasks, *gates, length=n)[0] for tasks, n, gates in lives]
    stale = run_group(model_dir, tmp_path, [1, 0, 1, 0] + [0] * 4, *TWO_STAGES, length=2)[0]
    stale.dropped = "stale"
    returned = [g for g in groups if g.dropped] + [stale]
    metrics = log.rollout_metrics([groups[3]], returned, 100)
    assert metrics["rollout/gated_early_frac"] == 2 / 6 and metrics["rollout/gated_full_frac"] == 1 / 6
    assert metrics["rollout/zero_std_frac"] == 1 / 6 and metrics["rollout/gated_frac"] == 4 / 6
    gated = 4 * 3 + 4 * 4 + 8 * 5 + 8 * 7
    assert metrics["rollout/gated_tokens"] == gated
    assert metrics["rollout/gated_tokens_frac"] == gated / (gated + 8 * 6 + 8 * 2), "a stale group was not gated"


def test_mask_metrics():
    rng = np.random.default_rng(0)
    groups = [trajectory.decode(trajectory.encode(tiny.group(rng, t, response=5, kept=3))) for t in range(2)]
    metrics = log.rollout_metrics(groups[:1], groups[1:], 100)
    assert metrics["rollout/kept_ids"] == (1 + 2 + 3 + 1 + 2) / 5
    assert metrics["rollout/masked_frac"] == pytest.approx(1 - 0.018)
    assert metrics["rollout/mask_bytes"] == sum(len(trajectory.pack_masks(g.rollouts)) for g in groups) / 20
    assert "rollout/mask_bytes" not in log.rollout_metrics([tiny.group(rng, 0)], [], 100)


def test_metrics_by_source():
    rng = np.random.default_rng(0)
    groups = [tiny.group(rng, t, response=4) for t in range(3)] + [tiny.group(rng, 3, response=10)]
    for g in groups[:3]:
        g.source = "sums"
    metrics = log.rollout_metrics(groups[:2], groups[2:], 100)
    assert metrics["rollout/prompts_frac/sums"] == 0.75 and metrics["rollout/prompts_frac/p"] == 0.25
    assert metrics["rollout/length/sums"] == 4 and metrics["rollout/length/p"] == 10
    assert metrics["rollout/pass_rate/sums"] == 0.5
    assert not any("/sums" in name for name in log.rollout_metrics(groups[:3], [], 100)), "one source needs no split"


# ------------------------------------------------------------------------------------------------- the length curriculum


@pytest.mark.parametrize("stage, limit, w_len", [(0, 8, 0.25), (1, 16, 0.1), (2, 32, 0.0)])
def test_a_group_has_the_limits_of_its_stage_from_begin_to_end(stage, limit, w_len, model_dir, tmp_path):
    overrides = [*TWO_STAGES, f"rollout.stages={STAGES}"]
    group, requests, _ = run_group(model_dir, tmp_path, [1, 0, 1, 0] + [0] * 4, *overrides, length=12, stage=stage)
    assert requests == [(1, limit)] * 8 and group.stage == stage
    length, passed = min(12, limit), 0.25
    for r in group.rollouts:
        assert r.finish == ("length" if limit == 8 else "stop")
        assert r.parts["len"] == pytest.approx(passed * length / limit)
        assert r.reward == pytest.approx(r.task - w_len * passed * length / limit)


def test_the_stage_of_a_group_survives_the_way():
    group = tiny.group(np.random.default_rng(0), 0)
    group.stage = 2
    assert trajectory.decode(trajectory.encode(group)).stage == 2


def test_evaluation_always_has_the_longest_limit(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, f"rollout.stages={STAGES}")
    ranks = types.SimpleNamespace(role=sync.Role(1, "engine", 0, 0), store=dist.HashStore())
    assert rollout.EngineRank(cfg, ranks, rollout.open_prompts(cfg)).eval_sampling.max_tokens == 32


def test_without_stages_there_is_one():
    cfg = Config()
    cfg.reward.w_len = 0.3
    assert cfg.stages == [Stage(0, 32, 0.3)]
    cfg.rollout.stages = [Stage(0, 8), Stage(9, 32, 0.0)]
    assert cfg.stages == [Stage(0, 8, 0.3), Stage(9, 32, 0.0)]


def test_next_stage_table():
    stages = [Stage(0, 8), Stage(20, 16), Stage(40, 32)]
    for step, stage in [(0, 0), (19, 0), (20, 1), (39, 1), (40, 2), (1000, 2)]:
        assert train.next_stage(stages, 0, step, [1.0] * 50, 0.0) == stage, "by step; truncation is not looked at"
    assert train.next_stage(stages, 0, 12, [0.5] * 10, 0.5) == 1, "sooner"
    assert train.next_stage(stages, 0, 12, [0.5] * 9, 0.5) == 0, "not on the word of a few steps"
    assert train.next_stage(stages, 0, 12, [0.9] * 5 + [0.4] * 10, 0.5) == 0, "the last steps count"
    assert train.next_stage(stages, 1, 13, [], 0.5) == 1, "not back before its step"
    assert train.next_stage(stages, 2, 60, [1.0] * 10, 0.5) == 2, "no stage after the last"
    assert train.next_stage(stages, 0, 40, [1.0] * 10, 0.5) == 2, "a resume may skip one"


def learner_in_stage(cfg, stage, step):
    learner = train.Learner.__new__(train.Learner)
    learner.config, learner.stage, learner.step, learner.truncated, learner.groups = cfg, stage, step, [], []
    learner.state = sync.RunState(dist.HashStore(), 0, 1)
    learner.state.create(counted=0, next_ticket=0, redo=[], plan=[], stage=stage)
    learner.buffer = types.SimpleNamespace(returned=[])
    return learner


def test_truncation_begins_the_next_stage_and_groups_of_the_last_one_do_not_count(model_dir, tmp_path, capsys):
    cfg = tiny.config(model_dir, tmp_path, f"rollout.stages={STAGES}", "rollout.grow_when_truncated=0.5")
    rng = np.random.default_rng(0)
    learner = learner_in_stage(cfg, 1, 3)

    def groups(stage, finish):
        made = tiny.group(rng, 0, finish=finish)
        made.stage = stage
        return [made]

    for _ in range(15):
        learner.groups = groups(0, "length")
        assert learner.move_stage() == {"rollout/stage": 1, "rollout/max_tokens": 16}
    assert learner.state.read().stage == 1
    for _ in range(10):
        assert learner.state.read().stage == 1
        learner.groups, learner.buffer.returned = groups(1, "stop"), groups(1, "length")
        learner.move_stage()
    assert learner.state.read().stage == learner.stage == 2 and learner.truncated == []
    assert capsys.readouterr().out == (
        "stage 2 of the length curriculum after step 3: max_tokens 16 -> 32, w_len 0.1 -> 0\n"
    )
    learner.groups, learner.buffer.returned = groups(1, "length"), []
    assert learner.move_stage()["rollout/max_tokens"] == 32 and learner.truncated == []


def test_run_goes_through_its_stages_and_resumes_in_the_one_it_was_in(model_dir, tmp_path):
    from test_learner import RUN, learner_or_fake_engine, lines

    overrides = [*RUN, f"rollout.stages={STAGES}", "rollout.grow_when_truncated=0.9", "train.steps=2"]
    cfg = tiny.config(model_dir, tmp_path, *overrides)
    tiny.run_ranks(cfg, learner_or_fake_engine)
    path = tmp_path / "checkpoints" / "step_2" / "progress.json"
    progress = json.loads(path.read_text())
    assert progress["stage"] == 0 and progress["truncated"] == [0.0, 0.0]
    path.write_text(json.dumps(progress | {"stage": 1, "truncated": [1.0] * 9}))  # truncation had begun it
    cfg.train.steps = 3
    tiny.run_ranks(cfg, learner_or_fake_engine)
    seen = [(m["rollout/stage"], m["rollout/max_tokens"]) for m in lines(tmp_path, "metrics.jsonl")]
    assert seen == [(0, 8), (0, 8), (1, 16)]
    progress = json.loads((tmp_path / "checkpoints" / "step_3" / "progress.json").read_text())
    assert progress["stage"] == 1 and progress["truncated"] == [1.0] * 9  # groups of stage 0 only
    assert {r["max_tokens"] for r in lines(tmp_path / "rollouts", "step_000001.jsonl")} == {8}
