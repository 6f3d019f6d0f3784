"""Whole runs as a user starts them: do they learn, tell the truth about it, end when told to, and go on where they were?

Every process of a run carries a mark in its environment, so that one that stays behind is found wherever it has gone.
The task: a response passes if it contains the letter a. A random policy does that now and then, and soon always.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import checkpoint
import rollout
import trajectory
from configs import schema

ROOT = Path(__file__).resolve().parent.parent
GONE_WITHIN = 30  # seconds from a signal to the last process's end
METRICS = """
    train/loss train/grad_norm train/lr train/entropy train/clip_k train/clip_low_frac train/clip_high_frac
    train/outer_clip_frac train/mismatch_kl train/mismatch_max train/tokens train/packing_fill
    rollout/pass_rate rollout/reward rollout/reward_task rollout/reward_lang rollout/reward_len rollout/length
    train/ess rollout/repetition alarm rollout/stage rollout/max_tokens rollout/gated_tokens rollout/gated_tokens_frac
    rollout/gated_early_frac rollout/gated_full_frac rollout/truncated_frac rollout/zero_std_frac rollout/gated_frac
    rollout/prefix_hit_rate rollout/tokens_per_s
    staleness/mean staleness/max staleness/dropped version step
    time/step time/wait time/train time/sync time/sync_pause idle/trainer idle/engine
    engine/alive engine/restarts engine/retried
""".split()
ROLLOUT = """
    prompt_id source prompt tokens mask behaviour_logp versions text task reward parts finish learned_at dropped
""".split()


class Job:
    """A run started as a subprocess."""

    def __init__(self, run_dir: Path, command: list[str], *overrides: str):
        self.dir = run_dir
        self.mark = f"MODEL_ROCKET_TEST={uuid.uuid4().hex}".encode()
        name, value = self.mark.decode().split("=")
        self.out, self.err = run_dir.parent / f"{run_dir.name}.out", run_dir.parent / f"{run_dir.name}.err"
        with open(self.out, "a") as out, open(self.err, "a") as err:
            self.process = subprocess.Popen(
                [*command, "train.py", f"run.dir={run_dir}", *overrides],
                cwd=ROOT, env=os.environ | {name: value, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def processes(self) -> dict[int, str]:
        """The command line of every living process of the run, by pid."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if self.mark in environment:
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                pass  # it ended meanwhile, or is another user's
        return found

    def rank(self, rank: int) -> int:
        """The pid of a rank."""
        for pid in self.processes():
            try:
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                    if parent == self.process.pid:
                        return pid
            except (FileNotFoundError, ProcessLookupError):
                pass
        raise AssertionError(f"there is no rank {rank} among {self.processes()}")

    def lines(self, name: str) -> list[dict]:
        path = self.dir / name
        written = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in written if line.endswith("\n")]  # not one that is being written

    def wait_for_step(self, step: int, timeout: float = 400) -> None:
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in self.lines("metrics.jsonl")):
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}: {self.words()}"
            assert time.monotonic() < deadline, f"no step {step} after {timeout} s: {self.words()}"
            time.sleep(0.2)

    def wait_gone(self) -> int:
        """The exit code, once every process has ended; fails the test if one is left after GONE_WITHIN seconds."""
        deadline = time.monotonic() + GONE_WITHIN
        while left := self.processes():
            assert time.monotonic() < deadline, f"still there after {GONE_WITHIN} s: {left}"
            time.sleep(0.2)
        return self.process.wait()

    def finish(self, timeout: float = 400) -> int:
        self.process.wait(timeout)
        return self.wait_gone()

    def words(self) -> str:
        return self.out.read_text()[-3000:] + self.err.read_text()[-6000:]

    def kill(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # its parent took it along
        self.process.wait()


@pytest.fixture(scope="module")
def start(model_dir, tmp_path_factory):
    """start(name, *overrides, world=2): a job on the letter task. Whatever is left of it at the end is killed."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"question": f"{i}: write an a", "answer": ".*a.*"} for i in range(40)]
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{kind: file, path: {folder}/letters.jsonl, grader: format}}"
    jobs = []

    def start(name, *overrides, world=2, command=None):
        torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", f"--nproc-per-node={world}"]
        job = Job(
            folder / name, command or torchrun, f"model.path={model_dir}", f"data.train=[{source}]",
            f"data.eval=[{source}]", "rollout.max_tokens=12", "rollout.group_size=8", "rollout.responses_per_request=8",
            "train.groups_per_step=8", "train.lr=5e-4", "eval.prompts=8", "eval.k=8", "eval.every=0", "layout.threads=1",
            "engine.args.max_total_tokens=8192", "wandb.mode=disabled",
            "alarms.entropy_high=0", "alarms.truncated_frac=0",  # a random policy has much of both
            *overrides,
        )  # fmt: skip
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.kill()


# ------------------------------------------------------------------------------------ one run: stopped, and gone on with


@pytest.fixture(scope="module")
def resumed(start):
    """A run of 20 steps that SIGTERM stopped on its way, and that was then started again. Everything is kept."""
    overrides = ("train.steps=20", "wandb.mode=offline", "run.checkpoint_every=5")
    job = start("resumed", *overrides)
    job.wait_for_step(6)
    assert any("sglang" in c for c in job.processes().values()) and any("grading.py" in c for c in job.processes().values())
    job.process.send_signal(signal.SIGTERM)
    job.wait_gone()
    job.stopped_at = checkpoint.latest(str(job.dir))
    job.before = job.lines("metrics.jsonl")
    job.policies = {job.stopped_at: exported(job, job.stopped_at)}
    again = start("resumed", *overrides)
    assert again.finish() == 0, again.words()
    job.policies[15] = exported(job, 15)
    return job


def exported(job, step):
    """The policy of a checkpoint, as transformers loads it."""
    path = job.dir / "checkpoints" / f"step_{step}" / "hf"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.engine
def test_sigterm_saves_the_step_at_which_it_came(resumed):
    assert 6 <= resumed.stopped_at < 20
    assert [line["step"] for line in resumed.before] == list(range(1, resumed.stopped_at + 1))


@pytest.mark.engine
def test_a_resumed_run_has_every_step_once(resumed):
    metrics = resumed.lines("metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 21))
    assert [line["version"] for line in metrics] == list(range(1, 21))
    assert metrics[: resumed.stopped_at] == resumed.before
    assert len(list((resumed.dir / "wandb").glob("offline-run-*"))) == 2
    run_id = (resumed.dir / "wandb_id").read_text()
    assert all(p.name.endswith(run_id) for p in (resumed.dir / "wandb").glob("offline-run-*"))


@pytest.mark.engine
def test_it_learns(resumed):
    first, last = (line for line in resumed.lines("eval.jsonl"))
    assert first["step"] == 0 and last["step"] == 20
    assert first["pass_at_1"] < 0.6 and last["pass_at_1"] > first["pass_at_1"] + 0.3


@pytest.mark.engine
def test_the_run_directory_holds_what_it_promises(resumed):
    config = schema.load(str(resumed.dir / "config.yaml"), [])
    assert config.train.steps == 20 and config.run.dir == str(resumed.dir)
    for line in resumed.lines("metrics.jsonl"):
        assert set(METRICS) <= line.keys()
        assert all(np.isfinite(value) for value in line.values())
        assert line["train/lr"] == 5e-4 and line["engine/alive"] == 1
        assert line["staleness/max"] <= config.staleness.max
        assert 0 < line["train/packing_fill"] <= 1 and 0 <= line["idle/engine"] <= 1
    for line in resumed.lines("eval.jsonl"):
        assert line.keys() == {"step", "version", "source", "pass_at_1", "stderr", "k", "prompts"}
        assert (line["source"], line["k"], line["prompts"]) == ("letters", 8, 8)
    assert (resumed.dir / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert checkpoint.steps(str(resumed.dir)) == [15, 20]  # the last two
    out = resumed.out.read_text()
    for promise in ("rank  role", "engine 0", "step   20/20", "left", "tok/s", "(step 0)", "curves.png", "step_20"):
        assert promise in out, promise


def rollouts_of(job) -> list[dict]:
    return [line for path in sorted((job.dir / "rollouts").glob("*.jsonl")) for line in job.lines(f"rollouts/{path.name}")]


@pytest.mark.engine
def test_every_prompt_is_accounted_for_once(resumed):
    rollouts = rollouts_of(resumed)
    assert all(set(ROLLOUT) <= r.keys() for r in rollouts)
    tickets = Counter(r["ticket"] for r in rollouts)
    assert set(tickets.values()) == {8}, "a group was done twice, or in parts"
    folder = resumed.dir / "checkpoints" / "step_20"
    progress = json.loads((folder / "progress.json").read_text())
    assert set(tickets) == set(range(progress["low"])) | set(progress["done"])
    # Learned from in steps of 8 groups; the others say why not. No prompt was skipped between the two starts.
    learned = Counter(r["learned_at"] for r in rollouts if not r["dropped"])
    assert learned == {step: 64 for step in range(1, 21)}
    assert all(r["learned_at"] is None for r in rollouts if r["dropped"])
    assert max(tickets) < progress["next_ticket"] <= len(tickets) + 3 * 8  # what the gate lets run ahead
    # The same multiset of prompts as without the stop: what a ticket stands for does not depend on it.
    mixture = rollout.open_prompts(schema.load(str(resumed.dir / "config.yaml"), [])).train
    assert {r["ticket"]: r["prompt_id"] for r in rollouts} == {t: mixture.row(t).prompt_id for t in tickets}


@pytest.mark.engine
def test_metrics_are_those_of_the_rollouts(resumed):
    rollouts = rollouts_of(resumed)
    for line in resumed.lines("metrics.jsonl"):
        learned = [r for r in rollouts if r["learned_at"] == line["step"]]
        assert line["train/tokens"] == sum(sum(r["mask"]) for r in learned)
        sampled = [line["version"] - 1 - v for r in learned for v, m in zip(r["versions"], r["mask"]) if m]
        assert line["staleness/mean"] == pytest.approx(np.mean(sampled))
        assert line["staleness/max"] == max(sampled)
    for r in rollouts:
        assert r["task"] == ("a" in r["text"]) == r["reward"]
        assert len(r["tokens"]) == len(r["mask"]) == len(r["behaviour_logp"]) == len(r["versions"])


@pytest.mark.engine
def test_the_engine_of_a_resumed_run_serves_what_was_saved(resumed):
    """Responses that were sampled by one version alone: their logprobs are those of that version's hf/ export."""
    checked = 0
    for r in rollouts_of(resumed):
        n = sum(r["mask"])
        (version, *others) = set(r["versions"][-n:])
        if others or version not in resumed.policies:
            continue
        tokens = torch.tensor([r["tokens"]])
        with torch.no_grad():
            logp = resumed.policies[version](tokens, use_cache=False).logits[0].log_softmax(-1)
        logp = logp[-n - 1 : -1].gather(1, tokens[0, -n:, None])[:, 0]
        assert np.abs(logp.numpy() - r["behaviour_logp"][-n:]).max() < 1e-4
        checked += 1
    assert checked >= 8
    # What it learned from first was sampled before the stop: the learner that was loaded explains it as well as ever.
    kl = {line["step"]: line["train/mismatch_kl"] for line in resumed.lines("metrics.jsonl")}
    assert kl[resumed.stopped_at + 1] < 3 * max(kl[step] for step in range(2, resumed.stopped_at + 1))


# ------------------------------------------------------------------------------------------------ more ranks, sudden ends


@pytest.mark.engine
def test_two_engines_on_policy_then_an_engine_rank_is_killed(start):
    job = start(
        "engines", "layout.engines=2", "staleness.max=0", "train.steps=1000", "rollout.mask_replay=true",
        "rollout.top_k=48", "rollout.top_p=0.95", "rollout.temperature=0.8", world=3,
    )  # fmt: skip
    job.wait_for_step(6)
    os.kill(job.rank(2), signal.SIGKILL)
    assert job.wait_gone() == 1
    metrics = job.lines("metrics.jsonl")
    assert all(line["engine/alive"] == 2 for line in metrics)
    for line in metrics:  # strictly on-policy, so what is left between engine and learner is rounding
        assert line["staleness/max"] == 0 and line["staleness/dropped"] == 0
        assert line["train/mismatch_max"] < 1e-3
    assert metrics[5]["rollout/pass_rate"] > metrics[0]["rollout/pass_rate"]
    (evaluation,) = job.lines("eval.jsonl")
    assert evaluation["prompts"] == 8  # both engines' shares


@pytest.mark.engine
def test_both_parts_of_a_tensor_parallel_engine_hold_the_learners_weights_also_after_its_death(start):
    """sync.verify and a restart compare every shard bitwise; that it samples under them shows in the logprobs."""
    job = start("parallel", "layout.engine_tp=2", "sync.verify=true", "staleness.max=0", "train.steps=1000", world=3)
    job.wait_for_step(3)
    (up,) = (e for e in job.lines("events.jsonl") if e["event"] == "engine_up")
    assert sum("scheduler_TP" in name for name in up["processes"]) == 2
    os.killpg(up["group"], signal.SIGKILL)
    job.wait_for_step(max(line["step"] for line in job.lines("metrics.jsonl")) + 4)
    job.process.send_signal(signal.SIGTERM)
    job.wait_gone()
    metrics, events = job.lines("metrics.jsonl"), job.lines("events.jsonl")
    assert [e["now"] for e in events if e["event"] == "breaker"] == ["serving", "down", "serving"]
    assert all(line["train/mismatch_max"] < 1e-3 and line["staleness/max"] == 0 for line in metrics)
    assert events[-1]["event"] == "end" and events[-1]["code"] == 0


@pytest.mark.engine
def test_a_job_goes_on_by_itself_when_a_rank_is_killed(start):
    """torchrun starts the ranks again; no prompt is lost or learned from twice."""
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    job = start("restarted", "train.steps=16", "run.checkpoint_every=4", "run.resume=never", command=torchrun)
    job.wait_for_step(6)
    os.kill(job.rank(1), signal.SIGKILL)
    assert job.finish() == 0, job.words()
    events = job.lines("events.jsonl")
    (first, second) = (e for e in events if e["event"] == "start")
    assert (first["attempt"], first["step"], second["attempt"]) == (0, 0, 1) and 4 <= second["step"] < 16
    assert first["after"] == "" and "rank 1 was ended by signal 9" in second["after"]
    assert f"the job is started again: {second['after']}" in job.out.read_text()
    assert events[-1]["event"] == "end" and events[-1]["final"] and events[-1]["code"] == 0
    assert [line["step"] for line in job.lines("metrics.jsonl")] == list(range(1, 17))
    assert [line["step"] for line in job.lines("eval.jsonl")] == [0, 16]
    account_balances(job, step=16)


def account_balances(job, step):
    """Every ticket that was handed out is learned from, or returned, in one piece, or waits in the checkpoint, or is to
    be done again: once."""
    folder = job.dir / "checkpoints" / f"step_{step}"
    progress = json.loads((folder / "progress.json").read_text())
    waiting = [group.ticket for group in trajectory.decode_groups((folder / "groups.msgpack").read_bytes())]
    rollouts = rollouts_of(job)
    settled = {r["ticket"] for r in rollouts}
    assert set(Counter(r["ticket"] for r in rollouts).values()) == {8}, "a group was done twice, or in parts"
    assert Counter(r["learned_at"] for r in rollouts if not r["dropped"]) == {n: 64 for n in range(1, step + 1)}
    assert settled == set(range(progress["low"])) | set(progress["done"])
    saved = checkpoint.Progress(low=progress["low"], done=progress["done"], next_ticket=progress["next_ticket"])
    redo = [ticket for ticket in saved.redo if ticket not in waiting]
    assert sorted([*settled, *waiting, *redo]) == list(range(progress["next_ticket"]))


@pytest.mark.engine
def test_two_learners_on_an_exported_policy_then_torchrun_is_killed(start, resumed):
    """`python train.py` starts torchrun itself. The engine serves the hf/ directory of another run's checkpoint."""
    job = start(
        "learners", "layout.trainers=2", f"model.path={resumed.dir}/checkpoints/step_20/hf", "train.steps=1000",
        "train.steps_per_update=2", "rollout.early_size=2", "rollout.early_range=[0,1]", "train.lr=1e-4",
        command=[sys.executable],
    )  # fmt: skip
    job.wait_for_step(3)
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait_gone() == -signal.SIGKILL
    metrics = job.lines("metrics.jsonl")
    assert [line["version"] for line in metrics[:4]] == [0, 1, 1, 2][: len(metrics)]
    assert all(line["staleness/max"] <= 2 for line in metrics)
    (base,) = job.lines("eval.jsonl")
    last = resumed.lines("eval.jsonl")[-1]
    assert abs(base["pass_at_1"] - last["pass_at_1"]) < 0.25  # of 64 samples each


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.engine
def test_an_engine_that_cannot_start_ends_the_run_with_its_own_words(start):
    job = start("badly", "engine.args.no_such_option=1")
    assert job.finish() == 1
    words = job.err.read_text()
    assert "error on rank 1: engine 0 ended with exit code 2" in words
    assert "unrecognized arguments: --no-such-option" in words


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["layout.engines=2"], "error: torchrun started 1 ranks, but .* needs --nproc-per-node 3"),
        (["rollout.group_sise=4"], "error: unknown config key rollout.group_sise; did you mean rollout.group_size?"),
    ],
)
def test_a_mistake_is_one_line_under_torchrun(start, overrides, line):
    job = start(overrides[0], *overrides, world=1)
    assert job.finish() == 2
    written = [x for x in job.err.read_text().splitlines() if x.startswith("error")]
    assert len(written) == 1 and re.match(line, written[0])
    assert not job.dir.exists()
