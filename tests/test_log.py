"""What a run leaves behind: no step twice, none missing, one wandb run, and what a full disk gets."""

import errno
import json
import math
import os
import types

import numpy as np
import pytest
import tiny

import launch
import log
import plot
import server
import sync
import train
import trajectory


class Recorder:
    """A wandb run that remembers."""

    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, metrics):
        self.logged.append(metrics)

    def finish(self):
        self.finished = True


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(log, "start_wandb", lambda config: recorder)
    return recorder


@pytest.fixture
def cfg(model_dir, tmp_path):
    return tiny.config(model_dir, tmp_path, "train.steps=20")


def step(run_log, n, learned=1, returned=0, **metrics):
    """Logs gradient step n as the learner does."""
    rng = np.random.default_rng(n)
    groups = [tiny.group(rng, 10 * n + i, prompt=2, response=4) for i in range(learned)]
    dropped = [tiny.group(rng, 10 * n + 5 + i, prompt=2, response=8) for i in range(returned)]
    for g in dropped:
        g.dropped = "zero_variance"
        for r in g.rollouts:
            r.task = r.reward = 0.0
    stats = trajectory.EngineStats(0, 2.0 * n, 1.5 * n, 100 * n, 40 * n, 30 * n, 0.25)
    buffer = types.SimpleNamespace(returned=dropped)
    learner = types.SimpleNamespace(
        step=n, version=n, groups=groups, buffer=buffer, engines={0: (stats, math.inf)},
        prompts=types.SimpleNamespace(vocab_size=100),
    )  # fmt: skip
    clock = log.Clock()
    clock.start()
    for part in ("wait", "train", "sync"):
        clock.lap(part)
    made_up = {
        "train/entropy": 1.0, "train/mismatch_kl": 0.0, "train/grad_norm": 1.0, "train/ess": 1.0, "train/lr": 0.5,
        "train/tokens": 4, "staleness/mean": 0.5,
    }  # fmt: skip
    run_log.step(learner, made_up | metrics, clock)
    return learner


def part(step_, *passed):
    return trajectory.EvalPart(step_, 0, step_, ["sums"] * len(passed), list(passed))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------- resuming


def test_what_lies_beyond_the_checkpoint_is_logged_once(cfg, recorder, tmp_path):
    first = log.RunLog(cfg, 0)
    first.evaluation(0, [part(0, 0.0, 1.0)], k=1)
    for n in range(1, 8):
        step(first, n)
        if n % 2 == 0:
            first.evaluation(n, [part(n, 0.0, 1.0)], k=1)
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 8, "ver')  # killed in mid-line

    second = log.RunLog(cfg, 5)
    assert [m["step"] for m in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [e["step"] for e in read(tmp_path / "eval.jsonl")] == [0, 2, 4] and second.evaluated == {0, 2, 4}
    assert sorted(os.listdir(tmp_path / "rollouts")) == [f"step_00000{n}.jsonl" for n in range(1, 6)]
    for n in range(6, 9):
        step(second, n)
    second.evaluation(6, [part(6, 1.0)], k=1)
    second.close(finished=True)
    metrics = read(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 9))
    assert [e["step"] for e in read(tmp_path / "eval.jsonl")] == [0, 2, 4, 6]
    stored = [r for path in sorted((tmp_path / "rollouts").iterdir()) for r in read(path)]
    assert len(stored) == 16 and len({r["ticket"] for r in stored}) == 8
    assert recorder.finished and (tmp_path / "curves.png").stat().st_size > 1000


def test_every_metric_goes_to_wandb_under_its_step(cfg, recorder, tmp_path):
    run_log = log.RunLog(cfg, 0)
    run_log.evaluation(0, [part(0, 1.0)], k=1)
    for n in (1, 2):
        step(run_log, n)
    lines = read(tmp_path / "metrics.jsonl")
    assert recorder.logged == [{"step": 0, "eval/sums": 1.0}, *lines]


def test_fresh_run_directory_and_one_that_holds_nothing_yet(cfg, recorder, tmp_path):
    log.RunLog(cfg, 0)
    assert not (tmp_path / "metrics.jsonl").exists()
    log.RunLog(cfg, 0)


# -------------------------------------------------------------------------------------------------------------- content

CONTRACT = """
    rollout/pass_rate rollout/reward rollout/reward_task rollout/reward_lang rollout/reward_len rollout/length
    train/ess rollout/repetition alarm rollout/gated_tokens rollout/gated_tokens_frac rollout/gated_early_frac
    rollout/gated_full_frac rollout/truncated_frac rollout/zero_std_frac rollout/gated_frac rollout/prefix_hit_rate
    rollout/tokens_per_s
    staleness/mean staleness/dropped version time/step time/wait time/train time/sync time/sync_pause idle/trainer
    idle/engine engine/alive engine/restarts engine/retried step
""".split()


def test_metrics_of_a_step(cfg, recorder, tmp_path):
    run_log = log.RunLog(cfg, 0)
    step(run_log, 1, learned=3, returned=1)
    step(run_log, 2, learned=3, returned=1)
    metrics = read(tmp_path / "metrics.jsonl")[1]
    assert set(CONTRACT) <= metrics.keys()
    assert metrics["rollout/pass_rate"] == 3 / 8, "rejected groups count, so that the gate does not flatter"
    assert metrics["rollout/length"] == (3 * 4 + 8) / 4
    assert metrics["rollout/gated_frac"] == metrics["rollout/zero_std_frac"] == 1 / 4
    assert metrics["rollout/tokens_per_s"] == 50, "100 tokens in the 2 seconds since the last step"
    assert metrics["rollout/prefix_hit_rate"] == 0.75 and metrics["idle/engine"] == 0.25
    assert metrics["staleness/dropped"] == 0 and metrics["train/lr"] == 0.5 and metrics["version"] == 2


def test_rollouts_are_stored_whole(cfg, recorder, tmp_path):
    run_log = log.RunLog(cfg, 0)
    learner = step(run_log, 3, learned=1, returned=1)
    assert learner.buffer.returned == [], "a rejected group is stored once"
    stored = read(tmp_path / "rollouts" / "step_000003.jsonl")
    assert [r["learned_at"] for r in stored] == [3, 3, None, None]
    assert [r["dropped"] for r in stored] == [None, None, "zero_variance", "zero_variance"]
    r = learner.groups[0].rollouts[1]
    assert stored[1]["tokens"] == r.tokens.tolist() and stored[1]["mask"] == r.mask.tolist()
    assert stored[1]["behaviour_logp"] == pytest.approx(r.behaviour_logp.tolist(), abs=1e-6)
    assert stored[1]["versions"] == r.versions.tolist()
    for name in ("prompt_id", "source", "prompt"):
        assert stored[1][name] == getattr(learner.groups[0], name)
    for name in ("text", "task", "reward", "parts", "finish"):
        assert stored[1][name] == getattr(r, name)


def test_evaluation_is_the_mean_over_prompts_with_its_standard_error(cfg, recorder, tmp_path):
    parts = [
        trajectory.EvalPart(4, 0, 2, ["a", "b", "a"], [0.5, 1.0, 1.0]),
        trajectory.EvalPart(4, 1, 2, ["b", "a"], [0.25, 0.0]),
    ]  # fmt: skip
    log.RunLog(cfg, 0).evaluation(4, parts, k=4)
    a, b = read(tmp_path / "eval.jsonl")
    assert (a["source"], a["pass_at_1"], a["prompts"], a["k"], a["step"], a["version"]) == ("a", 0.5, 3, 4, 4, 2)
    assert a["stderr"] == pytest.approx(0.5 / 3**0.5)
    assert (b["source"], b["pass_at_1"], b["prompts"]) == ("b", 0.625, 2)


def test_evaluation_of_one_prompt_is_valid_json_without_a_standard_error(cfg, recorder, tmp_path):
    log.RunLog(cfg, 0).evaluation(0, [part(0, 1.0)], k=1)
    (line,) = (tmp_path / "eval.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["stderr"] is None
    plot.curves(str(tmp_path))


# ---------------------------------------------------------------------------------------------------------------- wandb


@pytest.mark.parametrize(
    "key, netrc, expected",
    [
        ("", None, False),
        ("abc", None, True),
        ("", "machine api.wandb.ai login user password abc\n", True),
        ("", "machine elsewhere login user password abc\n", False),
        ("", "not a netrc", False),
    ],
)
def test_logged_in_where_there_is_a_key(key, netrc, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    if netrc is not None:
        (tmp_path / "netrc").write_text(netrc)
        (tmp_path / "netrc").chmod(0o600)
    assert log.logged_in() is expected


def two_lives_in_wandb(cfg, pipe):
    """A run and its resume, by a user without a key and without a terminal."""
    os.environ.pop("WANDB_API_KEY", None)
    os.environ["NETRC"] = os.path.join(cfg.run.dir, "no netrc")
    import builtins
    import getpass

    builtins.input = getpass.getpass = lambda *args: pipe.send("asked a question") or os._exit(1)
    cfg.wandb.mode = "auto"
    seen = []
    for at in (0, 1):
        run_log = log.RunLog(cfg, at)
        step(run_log, at + 1)
        seen.append((run_log.wandb.id, run_log.wandb.settings.mode, run_log.wandb.dir))
        run_log.close(finished=False)
    pipe.send(seen)


def test_without_a_key_wandb_is_offline_never_asks_and_keeps_its_run(cfg, tmp_path):
    pipe, theirs = tiny.processes.Pipe()
    child = tiny.processes.Process(target=two_lives_in_wandb, args=(cfg, theirs))  # its stdin is closed
    child.start()
    theirs.close()
    try:
        assert pipe.poll(120), "wandb hangs"
        first, second = pipe.recv()
    finally:
        child.kill()
        child.join()
    assert first[:2] == second[:2] and first[1] == "offline"
    for _, _, folder in (first, second):
        assert os.path.realpath(folder).startswith(str(tmp_path / "wandb"))


def test_disabled_wandb_leaves_nothing(cfg, tmp_path):
    run_log = log.RunLog(cfg, 0)
    run_log.wandb.log({"step": 1})
    run_log.wandb.finish()
    assert not (tmp_path / "wandb").exists()


# ------------------------------------------------------------------------------------------------------------ full disk


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts"])
@pytest.mark.parametrize("saved", [True, False])
def test_full_disk_is_one_line_that_names_the_checkpoint(name, saved, cfg, tmp_path, recorder, monkeypatch, capsys):
    """train.main with a learner whose log is on a full disk: /dev/full takes no byte."""
    if saved:
        os.makedirs(tmp_path / "checkpoints" / "step_7")

    class Learner:
        def __init__(self, cfg, ranks, prompts):
            self.log = log.RunLog(cfg, 7)
            if name == "rollouts":
                os.symlink("/dev/full", tmp_path / "rollouts" / "step_000008.jsonl")
            else:
                os.symlink("/dev/full", tmp_path / name)

        def learn(self):
            step(self.log, 8)

    monkeypatch.setattr(train, "Learner", Learner)
    monkeypatch.setattr(launch, "arm_signals", lambda config: None)
    monkeypatch.setattr(server, "parent_death_signal", lambda number: None)
    monkeypatch.setattr(sync, "join", lambda config: types.SimpleNamespace(role=sync.Role(0, "learner")))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main([f"model.path={cfg.model.path}", f"run.dir={tmp_path}", "wandb.mode=disabled"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error on rank 0: the disk is full") and err.count("\n") == 1
    assert (f"{tmp_path}/checkpoints/step_7" in err) == saved and "step_-1" not in err


def test_other_errors_of_the_system_are_not_called_a_full_disk(cfg, tmp_path, monkeypatch, capsys):
    class Learner:
        def __init__(self, *args):
            raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(train, "Learner", Learner)
    monkeypatch.setattr(launch, "arm_signals", lambda config: None)
    monkeypatch.setattr(server, "parent_death_signal", lambda number: None)
    monkeypatch.setattr(sync, "join", lambda config: types.SimpleNamespace(role=sync.Role(0, "learner")))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OSError, match="no"):
        train.main([f"model.path={cfg.model.path}", f"run.dir={tmp_path}"])
