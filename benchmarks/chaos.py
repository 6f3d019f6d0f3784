"""Runs of two engines and a learner that something happens to: what they lose is time, and how much of it.

    python benchmarks/chaos.py [--faults kill_server http_cut ...] [--seeds 0 1 2] [--steps 100]
    python benchmarks/chaos.py --quick [--faults ...]     # one run, a few faults one after another

First a run of each seed that nothing happens to (one that is there already is not run again), then a run for each fault, in
runs/chaos/. After each: the run has ended well and left no process, every step is there once, every prompt that was begun
was learned from once, or gated, or dropped, or is in flight in the last checkpoint (`audit`); what the fault had to leave in
events.jsonl is there, so that one that was not injected fails too; and the held-out pass rate is one of the undisturbed
runs', give or take two standard errors of the two evaluations. Exit code 1 where any of that does not hold.

Recovery: from the fault to the first gradient step after its last trace, when every engine serves again.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this file's directory

import psutil

import checkpoint
import faults
import trajectory
from configs import schema
from tests.test_runs import Job

ENGINES = 2
DISK = 300 << 20  # bytes of the file system that is filled
SETTLE_S = 400.0  # seconds within which a run must have recovered
# What events.jsonl says of a fault. A run that nothing happens to has none of it beyond its start.
TRACES = ("engine_down", "engine_up", "breaker", "retry", "garbled_message", "missing_message", "resend", "start")
OVERRIDES = [
    f"layout.engines={ENGINES}", "layout.threads=1", "wandb.mode=disabled", "run.checkpoint_every=10", "eval.every=0",
    "eval.k=4", "faults.probe_every=2", "faults.probe_timeout=20", "rollout.grader_timeout=5",
    "rollout.stream_interval=4",  # so that requests have tokens to go on from
]  # fmt: skip
TORCHRUN = [
    str(Path(sys.executable).with_name("torchrun")), "--standalone", "--max-restarts=3", f"--nproc-per-node={ENGINES + 1}",
]  # fmt: skip

# --------------------------------------------------------------------------------------------------------------- a run


class Run:
    """A run that is disturbed: its job, its triggers, what its files say."""

    def __init__(self, job: Job, triggers: Path, seed: int):
        self.job, self.triggers, self.seed = job, triggers, seed
        self.random = random.Random(seed)

    def events(self, since: float = 0.0) -> list[dict]:
        """What events.jsonl says from `since` on (unix seconds)."""
        return [event for event in faults.events(str(self.job.dir)) if event["time"] >= since]

    def steps(self) -> list[tuple[float, int]]:
        """(unix seconds, gradient step) of each publication but the first of an attempt, which follows no step."""
        seen, steps = set(), []
        for event in self.events():
            if event["event"] == "publication":
                if event["attempt"] in seen:
                    steps.append((event["time"], event["version"]))
                seen.add(event["attempt"])
        return steps

    def up(self) -> dict[int, dict]:
        """The last engine_up of each engine."""
        return {event["engine"]: event for event in self.events() if event["event"] == "engine_up"}

    def serving(self) -> bool:
        """Whether every engine of the last attempt serves."""
        events = self.events()
        last = max(event["attempt"] for event in events)
        status = {e["engine"]: e["now"] for e in events if e["event"] == "breaker" and e["attempt"] == last}
        return list(status.values()) == ["serving"] * ENGINES

    def graded_in_vain(self, after: int) -> int:
        """Texts whose grading failed, at the steps after `after`."""
        metrics = self.job.lines("metrics.jsonl")
        return sum(line["rollout/grading_failed"] for line in metrics if line["step"] > after)

    def step(self) -> int:
        return max((line["step"] for line in self.job.lines("metrics.jsonl")), default=0)

    def wait(self, ready: Callable[[], bool], what: str, seconds: float = SETTLE_S, every: float = 0.2) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.job.process.poll() is None, f"the run ended before {what}: {self.job.words()[-1500:]}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
            time.sleep(every)


# -------------------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run.

    inject(run) does it, and says what it did. `shows`: events that must follow, in this order. `ungraded`: texts whose
    grading must fail.
    """

    inject: Callable[[Run], str]
    shows: tuple[str, ...] = ()
    ungraded: int = 0
    overrides: tuple[str, ...] = ()


def kill_server(run: Run) -> str:
    engine = run.random.randrange(ENGINES)
    os.killpg(run.up()[engine]["group"], signal.SIGKILL)
    return f"all of engine {engine} killed"


def kill_scheduler(run: Run) -> str:
    engine = run.random.randrange(ENGINES)
    (pid,) = (pid for name, pid in run.up()[engine]["processes"].items() if "sched" in name)
    os.kill(pid, signal.SIGKILL)
    return f"scheduler of engine {engine} killed"


def stop_server(run: Run, seconds: float = 60.0) -> str:
    engine = run.random.randrange(ENGINES)
    group = run.up()[engine]["group"]
    stopped = [p for p in psutil.process_iter() if is_in(p, group)]
    for process in stopped:
        process.suspend()
    time.sleep(seconds)
    left = [p for p in stopped if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.resume()
    assert not left, f"{len(left)} of {len(stopped)} processes of engine {engine}, stopped for {seconds:g} s, were still there"
    return f"engine {engine} stopped, its {len(stopped)} processes were gone before they went on after {seconds:g} s"


def is_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


def from_within(fault: str, times: int) -> Callable[[Run], str]:
    """A fault of inject/sitecustomize.py."""

    def inject(run: Run) -> str:
        for i in range(times):
            (run.triggers / f"{fault}.{i}").touch()
        run.wait(lambda: not any(run.triggers.iterdir()), f"{fault} to strike {times} time(s)")
        return f"struck {times} time(s)"

    return inject


def kill_rank(run: Run) -> str:
    rank = 1 + run.random.randrange(ENGINES)
    os.kill(run.job.rank(rank), signal.SIGKILL)
    return f"rank {rank} killed after step {run.step()}"


def kill_saving(run: Run) -> str:
    every = schema.load(str(run.job.dir / "config.yaml"), []).run.checkpoint_every
    step = (run.step() // every + 1) * every
    learner = run.job.rank(0)
    run.job.wait_for_step(step - 1)
    whole = run.job.dir / "checkpoints" / f"step_{step}"
    partial = whole.with_name(f"{whole.name}.partial")
    run.wait(partial.exists, f"checkpoint {step}", every=0.002)
    os.kill(learner, signal.SIGKILL)
    assert partial.exists() and not whole.exists(), f"step_{step} was whole before the learner was killed"
    return f"learner killed while it saved step {step}"


def full_disk(run: Run) -> str:
    learner, step = run.job.rank(0), run.step()
    ballast = run.job.dir / "ballast"
    try:
        with open(ballast, "wb", buffering=0) as f:
            while True:
                f.write(bytes(1 << 16))
    except OSError as error:
        said = error.strerror
    run.wait(lambda: not psutil.pid_exists(learner), "the end of the attempt with a full disk")
    ballast.unlink()
    return f"{said} after step {step}, until the learner had ended"


ENGINE_BACK = ("engine_down", "engine_up")
JOB_BACK = ("start",) + ("engine_up",) * ENGINES
ISOLATED = ("data.train=[{grader: math}]",)  # a grader that may hang, for the same answers

FAULTS = {
    "kill_server": Fault(kill_server, ENGINE_BACK),
    "stop_server": Fault(stop_server, ENGINE_BACK),
    "kill_scheduler": Fault(kill_scheduler, ENGINE_BACK),
    "http_500": Fault(from_within("http_500", 4), ("retry",)),
    "http_garbage": Fault(from_within("http_garbage", 4), ("retry",)),
    "http_cut": Fault(from_within("http_cut", 4), ("retry",)),
    "grader_hang": Fault(from_within("grader_hang", 2), ungraded=2, overrides=ISOLATED),
    "grader_raise": Fault(from_within("grader_raise", 8), ungraded=8, overrides=ISOLATED),
    "kill_rank": Fault(kill_rank, JOB_BACK),
    "kill_saving": Fault(kill_saving, JOB_BACK),
    "full_disk": Fault(full_disk, JOB_BACK),
    "truncated_message": Fault(from_within("truncated_message", 1), ("garbled_message", "resend")),
    **{
        f"kill_in_update_{i}": Fault(from_within(f"kill_in_update_{i}", 1), ENGINE_BACK) for i in range(1, 6)
    },
}  # fmt: skip
QUICK = (
    "http_500", "http_garbage", "http_cut", "truncated_message", "grader_raise", "grader_hang", "kill_server",
    "kill_scheduler", "kill_in_update_3", "kill_rank",
)  # fmt: skip


@dataclass
class Outcome:
    did: str  # what was injected, and what the run made of it
    recovery: float  # seconds


def disturb(run: Run, name: str) -> Outcome:
    """Injects a fault and waits until the run has got over it. Raises AssertionError where it does not, or where the fault
    leaves no trace."""
    fault = FAULTS[name]
    step, since = run.step(), time.time()
    did = fault.inject(run)

    def is_over() -> bool:
        events = iter(run.events(since))
        follows = all(any(event["event"] == shown for event in events) for shown in fault.shows)
        if not follows or run.graded_in_vain(step) < fault.ungraded or not run.serving():
            return False
        return any(at > last_trace(run, since) for at, _ in run.steps())

    run.wait(is_over, f"{', '.join(fault.shows) or 'failed grades'} and another step after {name}")
    trace = last_trace(run, since)
    recovered = min(at for at, _ in run.steps() if at > trace)
    events = [event for event in run.events(since) if event["time"] <= recovered]
    counts = Counter(event["event"] for event in events if event["event"] in TRACES and event["event"] != "breaker")
    said = [f"{n} {event}" for event, n in counts.items()]
    if counts["retry"]:
        said.append(f"{sum(e['responses'] for e in events if e['event'] == 'retry')} responses went on")
    if fault.ungraded:
        said.append(f"{run.graded_in_vain(step)} failed grades")
    times = [since, *(at for at, _ in run.steps() if since < at <= recovered)]
    pause = max(b - a for a, b in zip(times, times[1:]))
    return Outcome(f"{did}: {', '.join(said)}; {pause:.0f} s at most without a step", recovered - since)


def last_trace(run: Run, since: float) -> float:
    return max((event["time"] for event in run.events(since) if event["event"] in TRACES), default=since)


# ------------------------------------------------------------------------------------------------------------ accounting


@dataclass
class Account:
    """Where the prompts are that a run has begun, by its last checkpoint and its rollout store."""

    started: int
    learned: int
    gated: int
    stale: int
    waiting: int
    redone: int  # under way when the checkpoint was written: a resumed run does them again

    def __str__(self) -> str:
        return f"{self.started} = {self.learned} + {self.gated} + {self.stale} + {self.waiting + self.redone}"


def audit(run_dir: Path) -> tuple[Account, list[str]]:
    """The account of a run that has ended, and what is wrong with it."""
    config = schema.load(str(run_dir / "config.yaml"), [])
    folder = run_dir / "checkpoints" / f"step_{checkpoint.latest(str(run_dir))}"
    waiting = trajectory.decode_groups((folder / "groups.msgpack").read_bytes())
    progress = checkpoint.Progress(**json.loads((folder / "progress.json").read_text()), waiting=waiting)
    fates: dict[int, list[tuple]] = {}  # ticket -> (step, why dropped) of each of its rollouts
    for path in sorted((run_dir / "rollouts").glob("*.jsonl")):
        for rollout in map(json.loads, path.read_text().splitlines()):
            fates.setdefault(rollout["ticket"], []).append((path.stem, rollout["learned_at"], rollout["dropped"]))
    problems = []
    for ticket, lines in sorted(fates.items()):
        _, learned_at, dropped = lines[0]
        size = config.rollout.early_size if dropped == "early_gate" else config.rollout.group_size
        if len(set(lines)) > 1 or len(lines) != size or (learned_at is None) == (dropped is None):
            problems.append(f"ticket {ticket}: {len(lines)} rollouts for a group of {size}, with the fates {set(lines)}")
    kinds = Counter(lines[0][2] for lines in fates.values())
    learned, stale = kinds.pop(None, 0), kinds.pop("stale", 0)
    account = Account(progress.next_ticket, learned, kinds.total(), stale, len(waiting), len(progress.redo))
    places = Counter([*fates, *(group.ticket for group in waiting), *progress.redo])
    twice = sorted(ticket for ticket, n in places.items() if n > 1)
    lost = sorted(set(range(account.started)) - places.keys())
    unknown = sorted(places.keys() - set(range(account.started)))
    for what, tickets in ("in two places", twice), ("lost", lost), ("never begun", unknown):
        if tickets:
            problems.append(f"{len(tickets)} tickets {what}: {tickets[:10]}")
    if account.learned != progress.step * config.train.groups_per_step:
        problems.append(f"{account.learned} groups learned from in {progress.step} steps")
    metrics = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    if metrics != list(range(1, progress.step + 1)):
        problems.append(f"metrics.jsonl of a run of {progress.step} steps has the steps {metrics}")
    return account, problems


def pass_rate(run_dir: Path, steps: int) -> tuple[float, float] | None:
    """The held-out pass rate after the last step, with its standard error; None where the run is not finished."""
    path = run_dir / "eval.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next(((line["pass_at_1"], line["stderr"]) for line in lines if line["step"] == steps), None)


def is_usual(rate: tuple[float, float], usual: list[tuple[float, float]]) -> bool:
    """Whether a pass rate lies between those of undisturbed runs, give or take two standard errors of a difference."""
    low, high = min(usual), max(usual)
    return low[0] - 2 * math.hypot(low[1], rate[1]) <= rate[0] <= high[0] + 2 * math.hypot(high[1], rate[1])


# ----------------------------------------------------------------------------------------------------------------- main


def begin(name: str, seed: int, *overrides: str) -> Run:
    """A new run in runs/chaos/NAME_SEED, with triggers for faults from within."""
    run_dir = ROOT / "runs" / "chaos" / f"{name}_{seed}"
    triggers = run_dir.with_name(f"{run_dir.name}.triggers")
    for old in run_dir, triggers:
        shutil.rmtree(old, ignore_errors=True)  # full_disk: a mount point, which is empty
    triggers.mkdir(parents=True)
    os.environ |= within(triggers)
    return Run(Job(run_dir, TORCHRUN, f"run.seed={seed}", *OVERRIDES, *overrides), triggers, seed)


def within(triggers: Path) -> dict[str, str]:
    """The environment of a run that takes faults from within."""
    return {"PYTHONPATH": str(ROOT / "benchmarks" / "inject"), "CHAOS_TRIGGERS": str(triggers)}


def finish(run: Run) -> list[str]:
    """Waits for the end of a run; what is wrong with it."""
    code = run.job.finish(timeout=1800)
    return [] if code == 0 else [f"exit code {code}: {run.job.words()[-1500:]}"]


def undisturbed(seed: int, steps: int) -> tuple[tuple[float, float], list[str]]:
    """The final pass rate of a run that nothing happens to, and what is wrong with it."""
    run_dir = ROOT / "runs" / "chaos" / f"undisturbed_{steps}_{seed}"
    if rate := pass_rate(run_dir, steps):
        return rate, []
    run = begin(f"undisturbed_{steps}", seed, f"train.steps={steps}")
    try:
        problems = finish(run)
    finally:
        run.job.kill()
    counts = Counter(event["event"] for event in run.events() if event["event"] in TRACES)
    if counts != {"start": 1, "engine_up": ENGINES, "breaker": ENGINES} or run.graded_in_vain(0):
        problems.append(f"something happened to it: {dict(counts)}, {run.graded_in_vain(0)} failed grades")
    return pass_rate(run_dir, steps), problems + audit(run_dir)[1]


def disturbed(name: str, seed: int, steps: int, usual: list[tuple[float, float]]) -> tuple[list[str], list[str]]:
    """A run with one fault: its row of the table, and what is wrong with it."""
    run = begin(name, seed, f"train.steps={steps}", *FAULTS[name].overrides)
    row, problems = [name, "not got over", "", "", ""], []
    try:
        run.job.wait_for_step(run.random.randint(3, max(3, steps // 6)))  # early: it must not end first
        outcome = disturb(run, name)
        row[1:3] = outcome.did, f"{outcome.recovery:.0f}"
        problems += finish(run)
        account, wrong = audit(run.job.dir)
        rate = pass_rate(run.job.dir, steps)
        problems += wrong
        row[3:5] = str(account), f"{rate[0]:.3f} ± {rate[1]:.3f}" if rate else "none"
        if not rate or not is_usual(rate, usual):
            problems.append(f"final pass rate {row[4]}; undisturbed: {', '.join(f'{p:.3f}' for p, _ in usual)}")
    except (AssertionError, psutil.Error, ProcessLookupError) as error:
        problems.append(str(error))
    finally:
        run.job.kill()
    return row, problems


def quick(names: list[str], seed: int) -> tuple[list[list[str]], list[str]]:
    """One run without end, faults one after another, and SIGTERM: the rows of the table, and what is wrong."""
    run = begin("quick", seed, "train.steps=100000", "train.lr=1e-6", *ISOLATED)
    rows, problems = [], []
    try:
        run.job.wait_for_step(2)
        for name in names:
            outcome = disturb(run, name)
            rows.append([name, outcome.did, f"{outcome.recovery:.0f}", "", ""])
            print(*rows[-1], flush=True)
        run.job.process.terminate()
        run.job.wait_gone()
        account, problems = audit(run.job.dir)
        rows.append(["(all)", "SIGTERM", "", str(account), ""])
    except (AssertionError, psutil.Error, ProcessLookupError) as error:
        problems.append(str(error))
    finally:
        run.job.kill()
    return rows, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, metavar="FAULT", help=f"default: all of {', '.join(FAULTS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the undisturbed runs; faults take turns")
    parser.add_argument("--steps", type=int, default=100, help="enough for an engine to come back before the last")
    parser.add_argument("--quick", action="store_true", help="one run, a few faults one after another")
    args = parser.parse_args()
    if args.quick and "full_disk" in (args.faults or []):
        parser.error("full_disk takes a run of its own, on a small disk: without --quick")
    seeds = {name: args.seeds[i % len(args.seeds)] for i, name in enumerate(FAULTS)}
    rows, problems = [], []
    if args.quick:
        rows, problems = quick(args.faults or list(QUICK), args.seeds[0])
    else:
        names = args.faults or list(FAULTS)
        if "full_disk" in names and "CHAOS_DISK" not in os.environ:
            small_disk(ROOT / "runs" / "chaos" / f"full_disk_{seeds['full_disk']}")
        usual = []
        for seed in args.seeds:
            rate, wrong = undisturbed(seed, args.steps)
            print(f"undisturbed, seed {seed}: pass rate {rate} {wrong or ''}", flush=True)
            usual.append(rate)
            problems += [f"undisturbed, seed {seed}: {problem}" for problem in wrong]
        for name in names:
            row, wrong = disturbed(name, seeds[name], args.steps, usual)
            print("; ".join(row), f"FAILED {wrong}" if wrong else "ok", flush=True)
            rows.append(row)
            problems += [f"{name}: {problem}" for problem in wrong]
    print("\n| fault | what happened | recovery, s | started = learned + gated + dropped + in flight | final pass rate |")
    print("| --- " * 5 + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    for problem in problems:
        print(f"\nFAILED {problem}")
    return 1 if problems else 0


def small_disk(folder: Path) -> None:
    """Goes on in a mount namespace in which `folder` is a small file system of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["CHAOS_DISK"] = "1"
    bwrap = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent", "--size", str(DISK), "--tmpfs", str(folder)]
    os.execvp("bwrap", [*bwrap, sys.executable, *sys.argv])


if __name__ == "__main__":
    sys.exit(main())
