"""What a run does about faults, beside the engines' own supervision.

    Recorder    the flight recorder: events.jsonl, a line for whatever happens beside training itself
    restarts    which attempt of its job a process belongs to, and the ends that no further attempt would mend
    Watchdog    ends a process whose run does not move, and leaves its stacks behind
"""

import asyncio
import faulthandler
import json
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

import psutil

# ------------------------------------------------------------------------------------------------------ flight recorder


class Recorder:
    """Appends to events.jsonl of the run directory; every rank writes its own lines.

    A line: {"time": unix seconds, "rank", "attempt": of the job, by torchrun, "event", and what belongs to the event}.
    """

    def __init__(self, run_dir: str, rank: int):
        self.path = os.path.join(run_dir, "events.jsonl")
        self.rank = rank

    def __call__(self, event: str, **facts) -> None:
        line = {"time": round(time.time(), 3), "rank": self.rank, "attempt": attempt(), "event": event, **facts}
        with open(self.path, "a") as f:  # one write in append mode: lines of several processes do not mix
            f.write(json.dumps(line) + "\n")

    def start(self, step: int) -> None:
        """Rank 0: an attempt of the job begins in this directory, after gradient step `step`, and after what ended the last
        attempt, where our torchrun has said so. A line that a full disk or a kill has cut ends here."""
        with open(self.path, "a+b") as f:
            if f.tell() and (f.seek(-1, os.SEEK_END), f.read(1))[1] != b"\n":
                f.write(b"\n")
        self("start", job=job(), step=step, after=os.environ.get("MODEL_ROCKET_AFTER", ""))

    def end(self, code: int, why: str, final: bool) -> None:
        """This rank ends with exit code `code`. `final`: another attempt would end the same way."""
        self("end", job=job(), code=code, why=why, final=final)


def events(run_dir: str) -> list[dict]:
    """The lines of events.jsonl, without those that a kill or a full disk cut short."""
    lines = []
    try:
        with open(os.path.join(run_dir, "events.jsonl")) as f:
            for line in f:
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
    except FileNotFoundError:
        pass  # the directory holds no run yet
    return lines


# ------------------------------------------------------------------------------------------------------------- restarts


def attempt() -> int:
    """How often torchrun has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def job() -> str:
    """Names this torchrun among all that have worked on a run directory. Without --standalone and --rdzv-id its run id is
    "none": then by its agent, of which a later one, after a reboot or in another container, may have the process id."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return run_id
    agent = psutil.Process(os.getppid())
    return f"agent {agent.pid} since {agent.create_time():.0f}"


def _earlier(run_dir: str) -> list[dict]:
    """The starts and ends of earlier attempts of this job."""
    return [e for e in events(run_dir) if e.get("job") == job()] if attempt() > 0 else []


def began(run_dir: str) -> bool:
    """Whether an earlier attempt of this job has begun in this directory: then the run in it is its own."""
    return any(e["event"] == "start" for e in _earlier(run_dir))


def final_end(run_dir: str) -> Optional[dict]:
    """The end of the attempt before, where another attempt would not end in another way; else None."""
    end = None
    for event in _earlier(run_dir):
        if event["event"] == "start":
            end = None
        elif event["event"] == "end" and event["final"]:
            end = event
    return end


def has_moved(run_dir: str) -> bool:
    """Whether any attempt of the job that has last begun in this directory has taken a gradient step."""
    moved = False
    for event in events(run_dir):
        if event["event"] == "start" and event["attempt"] == 0:
            moved = False
        moved |= event["event"] == "first_step"
    return moved


# ------------------------------------------------------------------------------------------------------------- deadlines


@contextmanager
def deadline(seconds: float, words: str) -> Iterator[None]:
    """Ends the process with exit code 1, and `words` on stderr, if the block takes longer: for calls into C that know no
    deadline of their own."""

    def expire():
        print(words, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


GRACE = 5.0  # seconds from the first rank that gives up to its end, in which all others write their stacks too


class Watchdog:
    """Ends this process, with exit code 1, once the run has not moved for `patience` seconds, or another rank has ended
    for that reason. Before that it writes what its rank is doing to stall/rank_R.txt of the run directory: what `describe`
    says (under "doing" in half a sentence), the stacks of all threads, and those of the tasks in `loop`.

    It is a thread that looks at a clock, and touches nothing that a stuck main thread could hold. Where that is Python's
    own lock, code in C ends the process a little later (faulthandler).
    """

    def __init__(
        self, patience: float, run_dir: str, record: Recorder, describe: Callable[[], dict],
        loop: Optional[asyncio.AbstractEventLoop] = None,
    ):  # fmt: skip
        self.patience, self.record, self.describe, self.loop = patience, record, describe, loop
        self.folder = os.path.join(run_dir, "stall")
        self.progress = 0
        self.moved_at = math.inf
        self.before = self.stacks()
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()

    def saw(self, progress: int) -> None:
        """The rank's main loop: how far the run is. The clock starts with the first value that is not 0."""
        if progress != self.progress:
            self.progress, self.moved_at = progress, time.monotonic()
            faulthandler.dump_traceback_later(self.patience + 4 * GRACE, exit=True, file=sys.__stderr__)

    def watch(self) -> None:
        while (still := time.monotonic() - self.moved_at) < self.patience and not self.another_gave_up():
            time.sleep(min(1.0, self.patience / 10))
        threading.Timer(GRACE, os._exit, (1,)).start()  # whatever becomes of the words below
        try:
            state = self.describe()
        except Exception as error:  # it reads what other threads change; the stacks must not be lost over it
            state = {"doing": f"nobody knows what ({error!r})"}
        path = os.path.join(self.folder, f"rank_{self.record.rank}.txt")
        os.makedirs(self.folder, exist_ok=True)
        with open(path, "a") as f:
            f.write(f"{time.strftime('%F %T')}, attempt {attempt()} of the job\n")
            f.writelines(f"{name}: {value}\n" for name, value in state.items())
            f.flush()
            faulthandler.dump_traceback(f, all_threads=True)
            if self.loop is not None:
                f.writelines(f"\n{n} task(s) at\n{stack}" for stack, n in task_stacks(self.loop).most_common())
            f.write("\n")
        self.record("stall", seconds=round(still, 1), doing=state["doing"], stacks=path)
        what = f"no gradient step for {still:.0f} s" if still >= self.patience else "another rank saw no gradient step"
        print(
            f"error on rank {self.record.rank}: {what} (faults.stall_after) while {state['doing']}; stacks in {path}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def stacks(self) -> dict[str, int]:
        """The stacks in the folder, with the time of each in its file system: no clock is compared with another."""
        try:
            files = [entry for entry in os.scandir(self.folder) if re.fullmatch(r"rank_\d+\.txt", entry.name)]
            return {entry.name: entry.stat().st_mtime_ns for entry in files}
        except OSError:
            return {}  # no rank ever has given up, or the folder is out of reach

    def another_gave_up(self) -> bool:
        return any(self.before.get(name) != written for name, written in self.stacks().items())


def task_stacks(loop: asyncio.AbstractEventLoop) -> Counter:
    """How many tasks wait at each stack; outermost call first, down to what is awaited in the end."""
    stacks = Counter()
    for task in asyncio.all_tasks(loop):
        inner, stack = task.get_coro(), ""
        while (frame := getattr(inner, "cr_frame", None)) is not None:
            stack += f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}\n'
            inner = inner.cr_await
        stacks[stack] += 1
    return stacks
