"""How responses are graded without trusting their text and without blocking the engine's loop.

`GraderPool.score_all` gives the scores of a row's graders. Those that could hang or grow on bad text run in worker
processes (this file, run as a script), one text at a time, each with a deadline after which the process is killed; the
judge is awaited (judge.py); the others are called where they are. Whatever goes wrong with one text is a logged 0.0 for
that text and that grader, and changes no other score.
"""

import asyncio
import collections
import importlib
import json
import logging
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Optional

from rewards import GRADERS, GraderError, checked

if TYPE_CHECKING:
    from data import Reference, Row
    from judge import Judge

log = logging.getLogger("grading")

START_S = 120.0  # seconds for a worker to start and import what a grader needs; not part of a grade's deadline
PAUSES = (0.0, 0.0, 1.0, 4.0, 16.0)  # seconds before each try to start one
WORKER_BYTES = 4 << 30  # address space of a worker
READY = b"ready"  # the worker has what the grader needs: its deadline starts


class WorkerLost(Exception):
    """The worker hung or died with this item, or does not start again; the text says which."""


def load(name: str) -> None:
    """Imports what a grader needs. Raises GraderError: that is no fault of the text, so nothing may be scored 0.0."""
    for module in GRADERS[name].imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise GraderError(f"grader {name}: cannot import {module}: {error}") from error


def work(channel: Connection, parent: int) -> None:
    """Main loop of a worker process. Ends, or raises EOFError or ConnectionError, when its parent is gone.

    A grade that hangs is killed by the parent; were the parent gone, the kernel's timer would kill it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run to handle
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    while True:
        while not channel.poll(5.0):
            if os.getppid() != parent:
                return
        job = json.loads(channel.recv_bytes())
        grader = GRADERS[job["grader"]]
        try:
            load(job["grader"])
            channel.send_bytes(READY)
            signal.setitimer(signal.ITIMER_REAL, job["timeout_s"] + 1)
            reply = {"score": checked(grader.score(job["text"], job["answer"]), job["grader"], job["row"])}
        except GraderError as error:
            reply = {"fatal": str(error)}
        except Exception as error:  # whatever a grader raises is that row's failure, never the run's
            reply = {"failure": f"{type(error).__name__}: {str(error)[:200]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send_bytes(json.dumps(reply).encode())


class Worker:
    """A process that grades one text at a time; started when first needed, and again after it was lost."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.loaded: set[str] = set()  # graders whose imports the process has
        self.closed = threading.Event()
        self.lock = threading.Lock()  # between the thread that grades and the one that closes

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        # A worker that is stopped reads nothing: sending it a long text must then fail (OSError) and not block for ever.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(START_S), 0))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
            )
        self.channel = Connection(ours.detach())
        self.loaded = set()

    def receive(self, timeout_s: float, what: str) -> bytes:
        if not self.channel.poll(timeout_s):
            raise WorkerLost(f"{what} took more than {timeout_s:g} s")
        return self.channel.recv_bytes()

    def grade(
        self, grader: str, text: str, answer: Any, timeout_s: float, row_id: str, again: bool = True
    ) -> tuple[float, str | None]:
        """(score, why grading failed or None). Raises GraderError, and WorkerLost where no worker can be started."""
        job = {"grader": grader, "text": text, "answer": answer, "timeout_s": timeout_s, "row": row_id}
        lost = None
        for pause in PAUSES:  # an idle worker may have been killed, by the kernel when memory ran out
            self.closed.wait(pause)
            with self.lock:
                if self.closed.is_set():
                    return 0.0, "the graders were closed"
                if self.process is None:
                    self.start()
            try:
                self.channel.send_bytes(json.dumps(job).encode())
                first = self.receive(timeout_s if grader in self.loaded else START_S, "starting")
                break
            except (WorkerLost, EOFError, OSError) as error:
                self.kill()
                lost = error
        else:
            raise WorkerLost(f"grader {grader}: its worker process does not start: {lost!r}") from lost
        if first == READY:
            self.loaded.add(grader)
        try:
            reply = json.loads(self.receive(timeout_s, "grading") if first == READY else first)
        except WorkerLost as error:
            self.kill()
            return 0.0, str(error)
        except (EOFError, OSError):
            self.kill()
            if again:  # it may have been killed for the memory of others
                return self.grade(grader, text, answer, timeout_s, row_id, again=False)
            return 0.0, "the worker died"
        if "fatal" in reply:
            raise GraderError(reply["fatal"])
        return reply.get("score", 0.0), reply.get("failure")

    def kill(self) -> None:
        with self.lock:
            if self.process is not None:
                os.killpg(self.process.pid, signal.SIGKILL)  # not yet waited for, so the id is still its own
                self.process.wait()
                self.channel.close()
                self.process = None

    def close(self) -> None:
        """No grade starts after this, and one that is being made ends at once."""
        with self.lock:
            self.closed.set()
            if self.process is not None:
                os.killpg(self.process.pid, signal.SIGKILL)


class Crew:
    """The workers of one isolated grader and a thread for each, which start when first needed."""

    def __init__(self, size: int):
        self.workers = [Worker() for _ in range(size)]
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="grader")

    async def grade(self, *job) -> tuple[float, str | None]:
        """Worker.grade of the next worker that is idle."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.grade_in_thread, job)

    def grade_in_thread(self, job: tuple) -> tuple[float, str | None]:
        worker = self.idle.get()  # never waits: there are as many workers as threads
        try:
            return worker.grade(*job)
        finally:
            self.idle.put(worker)


class GraderPool:
    """Grades without blocking the event loop; each grade at most `timeout_s` seconds.

    Every isolated grader has `workers` processes of its own: one that is slow holds up no other. `judge` is asked where
    a row names the grader `judge`. `failures` counts, per grader, the texts that got 0.0 because grading them failed.
    """

    def __init__(self, workers: int, timeout_s: float, judge: Optional["Judge"] = None):
        self.timeout_s = timeout_s
        self.judge = judge
        self.crews = {name: Crew(workers) for name, grader in GRADERS.items() if grader.isolated}
        self.failures: collections.Counter[str] = collections.Counter()

    async def score_all(self, row: "Row", text: str) -> tuple[dict[str, float], str | None]:
        """({grader: score in 0..1} in the order of `row.references`, which graders failed and why or None).

        Raises GraderError where a grader returned something that is no score, and WorkerLost.
        """
        results = await asyncio.gather(*(self.score(row, reference, text) for reference in row.references))
        names = [reference.grader for reference in row.references]
        failures = [f"{name}: {failure}" for name, (_, failure) in zip(names, results) if failure]
        return {name: score for name, (score, _) in zip(names, results)}, "; ".join(failures) or None

    async def score(self, row: "Row", reference: "Reference", text: str) -> tuple[float, str | None]:
        """(score in 0..1, why grading failed or None) by one grader of `row`. Raises GraderError as `score_all`."""
        name, answer = reference.grader, reference.answer
        grader = GRADERS[name]
        if name == "judge":
            if self.judge is None:
                raise GraderError("grader judge: the pool was made without a judge")
            score, failure = await self.judge.score(row.prompt, answer, text)
        elif grader.isolated:
            score, failure = await self.crews[name].grade(name, text, answer, self.timeout_s, row.prompt_id)
        else:
            try:
                score, failure = checked(grader.score(text, answer), name, row.prompt_id), None
            except GraderError:
                raise
            except Exception as error:  # as in a worker
                score, failure = 0.0, f"{type(error).__name__}: {str(error)[:200]}"
        if failure:
            self.failures[name] += 1
            n = self.failures[name]
            if n in (1, 10, 100, 1000):
                log.warning("grader %s failed (%d so far): row %s: %s", name, n, row.prompt_id, failure)
        return score, failure

    def close(self) -> None:
        """Ends the workers, also those that are grading; no process is left."""
        workers = [worker for crew in self.crews.values() for worker in crew.workers]
        for worker in workers:
            worker.close()
        for crew in self.crews.values():
            crew.threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.kill()


ALONE, ALONE_LOCK = Worker(), threading.Lock()  # for direct calls; starts no process until then


def grade_alone(grader: str, response: str, answer: Any, timeout_s: float) -> float:
    """The score by an isolated grader outside of a pool; 0.0 where grading failed. From any thread."""
    with ALONE_LOCK:
        return ALONE.grade(grader, response, answer, timeout_s, "(direct call)")[0]


if __name__ == "__main__":
    try:
        work(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, ConnectionError):
        pass  # the parent is gone
