"""Memory of every process of a run, for as long as you like: is it flat?

    python benchmarks/soak.py [--minutes 30] [--every 10] [key=value ...]

A run of the tiny config with two engines, in runs/soak, that SIGTERM ends. Of each process, every few seconds: resident
memory (RSS) and the part of it that no other process shares (USS), which also go to runs/soak/memory.jsonl. The slope is that of a least-squares line through USS,
from WARM of the time on, with its standard error; it is not flat where it is more than three of those and FLAT MB per hour
above 0. Exit code 1 where one is not flat, a process came or went, the run has stumbled, or is not gone after 30 s.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this file's directory

import numpy as np
import psutil

from benchmarks.chaos import ENGINES, TORCHRUN, TRACES
from tests.test_runs import Job

WARM = 0.2  # of the time: caches fill, arenas grow
FLAT = 20.0  # MB per hour


def role(process: psutil.Process, engines: dict[int, int]) -> str:
    """What a process of a run is; `engines` has an engine for each process group."""
    engine = engines.get(os.getpgid(process.pid))
    if engine is not None:
        return f"engine {engine}: {process.name()}"
    rank = process.environ().get("RANK")
    is_grader = any(part.endswith("grading.py") for part in process.cmdline())
    return f"rank {rank}: {'grader' if is_grader else process.name()}" if rank else f"job: {process.name()}"


def sample(job: Job, engines: dict[int, int]) -> dict[tuple[int, str], tuple[float, float]]:
    """(pid, role) -> (RSS, USS) in MB, of every process of the run."""
    seen = {}
    for pid in job.processes():
        try:
            process = psutil.Process(pid)
            memory = process.memory_full_info()
            seen[pid, role(process, engines)] = memory.rss / 1e6, memory.uss / 1e6
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass  # it ended meanwhile
    return seen


def slope(hours: np.ndarray, megabytes: np.ndarray) -> tuple[float, float]:
    """MB per hour of the least-squares line, and its standard error."""
    x = hours - hours.mean()
    b = (x @ megabytes) / (x @ x)
    rest = megabytes - megabytes.mean() - b * x
    return b, float(np.sqrt(rest @ rest / max(1, len(x) - 2) / (x @ x)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=10, help="seconds between two samples")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    run_dir = ROOT / "runs" / "soak"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(exist_ok=True)
    # At this learning rate the policy stays what it is: so does the length of responses, and the load. The KV cache is so
    # small that it is full, and every page of it touched, within minutes.
    job = Job(
        run_dir, TORCHRUN, f"layout.engines={ENGINES}", "layout.threads=1", "wandb.mode=offline", "train.steps=1000000",
        "train.lr=1e-6", "rollout.grader_workers=1", "data.train=[{grader: math}]",
        "engine.args.max_total_tokens=16384", *args.overrides,
    )  # fmt: skip
    series = defaultdict(list)  # (pid, role) -> [(hours, RSS, USS)]
    problems = []
    try:
        job.wait_for_step(1)
        engines = {e["group"]: e["engine"] for e in job.lines("events.jsonl") if e["event"] == "engine_up"}
        began = time.monotonic()
        while (hours := (time.monotonic() - began) / 3600) < args.minutes / 60:
            for process, (rss, uss) in sample(job, engines).items():
                series[process].append((hours, rss, uss))
                with open(run_dir / "memory.jsonl", "a") as f:
                    f.write(json.dumps([*process, round(hours * 60, 2), rss, uss]) + "\n")
            step = max(line["step"] for line in job.lines("metrics.jsonl"))
            uss = sum(points[-1][2] for points in series.values())
            print(f"{hours * 60:5.1f} min, step {step}, {len(series)} processes, USS {uss:.0f} MB in all", flush=True)
            assert job.process.poll() is None, f"the run has ended: {job.words()}"
            time.sleep(args.every)
        job.process.terminate()
        job.wait_gone()
    finally:
        job.kill()
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    problems += [str(e) for e in events if e["event"] in TRACES and e["event"] not in ("start", "engine_up", "breaker")]
    print(f"\n{step} steps in {hours * 60:.0f} minutes\n")
    print(f"| process | RSS at {WARM:.0%} of the time, MB | at the end | USS at {WARM:.0%}, MB | at the end | slope of USS, MB per hour |")
    print("| --- " * 6 + "|")
    longest = max(len(points) for points in series.values())
    for (pid, what), points in sorted(series.items(), key=lambda item: item[0][1]):
        table = np.array([point for point in points if point[0] >= WARM * hours])
        if len(points) < longest - 1 or len(table) < 3:
            problems.append(f"{what} ({pid}) was seen {len(points)} of {longest} times")
            continue
        b, error = slope(table[:, 0], table[:, 2])
        grows = bool(b > max(3 * error, FLAT))
        if grows:
            problems.append(f"{what} ({pid}) grows")
        first, last = table[0], table[-1]
        print(
            f"| {what} | {first[1]:.0f} | {last[1]:.0f} | {first[2]:.0f} | {last[2]:.0f} | {b:+.1f} ± {error:.1f}"
            f"{' (not flat)' * grows} |"
        )
    for problem in problems:
        print(f"\nFAILED {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
