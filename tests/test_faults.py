"""Faults on the learner's side: the watchdog, the flight recorder, what a restarted job does, and deadlines."""

import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import tiny
import torch
import torch.distributed as dist
from test_log import Recorder, part, read, step

import faults
import launch
import log
import rollout
import server
import sync
import train
from rewards import GraderError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def attempt(monkeypatch):
    """attempt(n, job="j"): this process belongs to the n-th restart of a job."""

    def be(n, job="j"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(n))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)

    return be


# ------------------------------------------------------------------------------------------------------------- watchdog

STUCK = """
import asyncio, sys, threading, time
import faults

faults.GRACE = float(sys.argv[3])
rank = int(sys.argv[2])
recorder = faults.Recorder(sys.argv[1], rank)

async def deep_wait():
    await asyncio.sleep(1000)

def never():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # stuck here

async def main():
    tasks = [asyncio.create_task(deep_wait()) for _ in range(3)]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    watchdog = faults.Watchdog(1.0, sys.argv[1], recorder, lambda: {"doing": "testing", "step": 7}, loop)
    if rank == 0:
        watchdog.saw(1)
    never()

asyncio.run(main())
"""


def stuck(folder, rank, grace):
    command = [sys.executable, "-c", STUCK, str(folder), str(rank), str(grace)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_is_stuck_in_a_lock_leaves_its_stacks_and_takes_the_others_along(tmp_path):
    first, other = stuck(tmp_path, 0, 10), stuck(tmp_path, 3, 0.5)  # the other's clock has not even started
    try:
        words = [process.communicate(timeout=60)[1] for process in (other, first)]
    finally:
        for process in (first, other):
            process.kill()
    assert first.returncode == other.returncode == 1
    path = tmp_path / "stall" / "rank_0.txt"
    said = rf"error on rank 0: no gradient step for \d+ s \(faults.stall_after\) while testing; stacks in {path}\n"
    assert re.fullmatch(said, words[1])
    assert words[0].startswith("error on rank 3: another rank saw no gradient step")
    for rank in (0, 3):
        stacks = (tmp_path / "stall" / f"rank_{rank}.txt").read_text()
        assert "step: 7" in stacks
        assert re.search(r'Current thread .*\n.* in watch\n', stacks) and re.search(r'File "<string>", line \d+ in never\n', stacks)
        assert re.search(r"3 task\(s\) at\n.* in deep_wait\n.* in sleep\n", stacks)
    stalls = read(tmp_path / "events.jsonl")
    assert sorted((e["event"], e["rank"], e["doing"]) for e in stalls) == [("stall", 0, "testing"), ("stall", 3, "testing")]


def be_stuck_in_a_collective(cfg, ranks, pids):
    """Rank 0 moves once, then waits for a rank that never comes; the other one goes on and on."""
    (Path(pids) / str(ranks.role.rank)).write_text(str(os.getpid()))
    faults.GRACE = 2.0
    watchdog = faults.Watchdog(cfg.faults.stall_after, cfg.run.dir, ranks.record, lambda: {"doing": "testing"})
    watchdog.saw(1)
    if ranks.role.rank == 0:
        dist.all_reduce(torch.zeros(1), group=ranks.learners)
    for progress in range(1000):
        watchdog.saw(progress)
        time.sleep(0.1)


def test_a_rank_that_is_stuck_in_a_collective_is_caught(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, "layout.trainers=2", "faults.stall_after=2", engines=0)
    with pytest.raises(AssertionError, match="rank [01]: it ended without a word"):
        tiny.run_ranks(cfg, be_stuck_in_a_collective, str(tmp_path), timeout=60)
    stacks = (tmp_path / "stall" / "rank_0.txt").read_text()
    assert "in all_reduce" in stacks and "in be_stuck_in_a_collective" in stacks
    assert "in be_stuck_in_a_collective" in (tmp_path / "stall" / "rank_1.txt").read_text(), "the others write theirs too"


def test_stacks_are_written_also_where_the_rank_cannot_say_what_it_does(tmp_path):
    program = STUCK.replace('lambda: {"doing": "testing", "step": 7}', "lambda: None.poll()")
    done = subprocess.run([sys.executable, "-c", program, tmp_path, "0", "5"], cwd=ROOT, capture_output=True, timeout=60, text=True)
    assert done.returncode == 1 and "while nobody knows what (AttributeError" in done.stderr
    assert " in never\n" in (tmp_path / "stall" / "rank_0.txt").read_text()


def test_it_does_not_fire_while_the_run_moves_nor_before_its_first_publication(tmp_path):
    program = STUCK.replace("never()\n\nasyncio", "[(watchdog.saw(n), time.sleep(0.2)) for n in range(10)]\n\nasyncio")
    early = program.replace("range(10)", "[0] * 10").replace("watchdog.saw(1)", "pass")
    for text in (program, early):
        done = subprocess.run([sys.executable, "-c", text, tmp_path, "0", "1"], cwd=ROOT, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "stall").exists()


def test_stacks_of_an_earlier_attempt_end_no_run(tmp_path):
    (tmp_path / "stall").mkdir()
    (tmp_path / "stall" / "rank_1.txt").write_text("of a file server whose clock is ahead\n")
    os.utime(tmp_path / "stall" / "rank_1.txt", (time.time() + 1000, time.time() + 1000))
    record = faults.Recorder(tmp_path, 0)
    watchdog = faults.Watchdog.__new__(faults.Watchdog)
    watchdog.folder, watchdog.record = tmp_path / "stall", record
    watchdog.before = watchdog.stacks()
    assert not watchdog.another_gave_up()
    (tmp_path / "stall" / "rank_1.txt.swp").write_text("somebody reads it\n")
    assert not watchdog.another_gave_up()
    (tmp_path / "stall" / "rank_2.txt").write_text("now\n")
    assert watchdog.another_gave_up()


def learner_without_batches(cfg, ranks):
    """A learner whose only engine rank takes its weights and then does nothing."""
    if ranks.role.kind == "learner":
        return train.Learner(cfg, ranks, rollout.open_prompts(cfg)).learn()
    state = sync.RunState(ranks.store, cfg.staleness.max, cfg.groups_per_update)
    state.open()
    watchdog = faults.Watchdog(cfg.faults.stall_after, cfg.run.dir, ranks.record, lambda: {"doing": "nothing"})
    state.ready()
    version = -1
    while not (seen := state.read()).stop:
        watchdog.saw(seen.progress)
        if seen.version > version:
            version = sync.receive_version(seen.version, ranks)
            for bucket in state.plan():
                sync.receive_bucket(torch.empty(sync.bucket_nbytes(bucket), dtype=torch.uint8), version, ranks)
        time.sleep(0.05)


def test_a_run_without_batches_is_given_up_by_every_rank(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, "layout.trainers=2", "faults.stall_after=3")
    with pytest.raises(AssertionError, match="rank [012]: it ended without a word"):
        tiny.run_ranks(cfg, learner_without_batches, timeout=90)
    words = [(tmp_path / "stall" / f"rank_{rank}.txt").read_text() for rank in range(3)]
    doing = [re.search("doing: (.*)", text)[1] for text in words]
    assert doing == ["waiting for a full batch", "waiting for its part of a batch", "nothing"]
    assert "groups waiting: 0, a batch takes" in words[0]


# ------------------------------------------------------------------------------------------------------ flight recorder


def write_events(folder, rank):
    record = faults.Recorder(folder, rank)
    for i in range(300):
        record("test", i=i, filling="x" * (i % 50) * 20)


def test_a_line_that_was_cut_takes_no_other_along(tmp_path):
    record = faults.Recorder(tmp_path, 0)
    record.start(0)
    with open(tmp_path / "events.jsonl", "a") as f:
        f.write('{"time": 1, "rank": 0, "event": "publ')
    record.start(4)
    record("first_step", step=5)
    assert [e["event"] for e in faults.events(tmp_path)] == ["start", "start", "first_step"] and faults.has_moved(tmp_path)


def test_lines_of_several_processes_do_not_mix(tmp_path):
    writers = [tiny.processes.Process(target=write_events, args=(str(tmp_path), rank)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    lines = read(tmp_path / "events.jsonl")
    assert len(lines) == 1200
    for rank in range(4):
        assert [line["i"] for line in lines if line["rank"] == rank] == list(range(300))
    assert all(abs(line["time"] - time.time()) < 600 and line["attempt"] == 0 for line in lines)


def test_a_line_that_was_cut_short_hides_no_other(tmp_path, attempt):
    attempt(1)
    faults.Recorder(tmp_path, 0).start(0)
    (tmp_path / "events.jsonl").open("a").write('{"time": 1, "ra\n{"time": 2, "event": "x"}\n{"ti')
    assert [e["event"] for e in faults.events(tmp_path)] == ["start", "x"]
    assert faults.events(tmp_path / "no run") == []


# ------------------------------------------------------------------------------------------------------------- restarts


def test_which_ends_are_final(tmp_path, attempt):
    record = faults.Recorder(tmp_path, 0)
    attempt(0, "before")
    record.start(0)
    record.end(1, "collapsed", final=True)
    attempt(0)
    assert faults.final_end(tmp_path) is None and not faults.began(tmp_path), "somebody starts it again by hand"
    attempt(1)
    assert faults.final_end(tmp_path) is None and not faults.began(tmp_path), "that was another job"
    record.start(3)
    attempt(2)
    assert faults.final_end(tmp_path) is None and faults.began(tmp_path), "killed"
    record.end(1, "a disk was full", final=False)
    assert faults.final_end(tmp_path) is None
    record.end(1, "no engine starts", final=True)
    record.end(0, "stopped", final=False)  # another rank, which was told to stop for that
    assert faults.final_end(tmp_path)["why"] == "no engine starts"
    record.start(3)
    assert faults.final_end(tmp_path) is None, "whatever it was, the run has gone on since"


def test_without_a_run_id_a_job_is_known_by_its_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    faults.Recorder(tmp_path, 0).start(0)
    assert faults.began(tmp_path)
    agent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not faults.began(tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: agent)
    assert faults.began(tmp_path)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 5.0)  # a container later, with the same number
    assert not faults.began(tmp_path)


@pytest.fixture
def run_main(model_dir, tmp_path, monkeypatch):
    """run_main(what, *overrides): the exit code of train.main on rank 0, whose learner raises or returns `what`."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch, "arm_signals", lambda config: None)
    monkeypatch.setattr(server, "parent_death_signal", lambda number: None)
    monkeypatch.setattr(sync, "join", lambda config: types.SimpleNamespace(role=sync.Role(0, "learner")))

    def run(what, *overrides):
        class Learner:
            def __init__(self, *args):
                pass

            def learn(self):
                if callable(what):
                    what(self)
                if isinstance(what, Exception):
                    raise what
                return what

        monkeypatch.setattr(train, "Learner", Learner)
        locks = []
        monkeypatch.setattr(launch, "lock_run_dir", lambda config: locks.append(lock(config)))
        try:
            return train.main([f"model.path={model_dir}", f"run.dir={tmp_path}", "wandb.mode=disabled", *overrides])
        finally:
            for held in locks:  # as the end of a process does
                held.close()

    lock = launch.lock_run_dir
    return run


@pytest.mark.parametrize(
    "what, code",
    [
        (train.NothingToLearn("all solved"), 1),
        (train.Collapse("entropy"), 1),
        (train.ConfigError("data.train[0].path: row 7"), 2),
        (GraderError("grader math: cannot import sympy"), 1),
        (server.EngineError("engine 0 ended with exit code 2"), 1),
        (True, 0),
    ],
)
def test_an_end_that_no_restart_would_mend_is_not_tried_again(what, code, run_main, attempt, tmp_path, monkeypatch, capsys):
    attempt(0)
    assert run_main(what) == code
    attempt(1)
    capsys.readouterr()
    monkeypatch.setattr(rollout, "open_prompts", None)  # nothing expensive
    assert run_main(RuntimeError("tried again")) == code
    reason = "the run is finished" if what is True else str(what)
    assert capsys.readouterr().err == f"not tried again: {reason}\n"


@pytest.mark.parametrize("what", [TimeoutError("version 3"), OSError(28, "No space left on device"), False])
def test_any_other_end_is_tried_again(what, run_main, attempt):
    attempt(0)
    assert run_main(what) == (0 if what is False else 1)
    attempt(1)
    assert run_main(True) == 0


@pytest.mark.parametrize("moved", [False, True])
def test_a_slip_in_the_code_is_tried_again_only_where_the_run_had_moved(moved, run_main, attempt, tmp_path, capsys):
    class Slip(Exception):
        pass

    def learn(self):
        record = faults.Recorder(tmp_path, 0)
        record("publication", version=0)
        if moved:
            record("first_step", step=1)
        raise Slip("in an edited script")

    attempt(0, "an earlier one")
    with pytest.raises(Slip):
        run_main(lambda self: learn(self) if moved else faults.Recorder(tmp_path, 0)("first_step", step=1) or learn(self))
    attempt(0)
    with pytest.raises(Slip):
        run_main(learn)
    attempt(1)
    capsys.readouterr()
    if moved:
        with pytest.raises(Slip):  # before the first step of this attempt; the job has moved all the same
            run_main(Slip("again"))
        attempt(2)
    assert run_main(True) == (0 if moved else 1)
    assert moved or capsys.readouterr().err == "not tried again: Slip: in an edited script\n"


def test_a_slow_rank_does_not_take_the_run_that_its_first_rank_has_begun_for_an_earlier_one(run_main, attempt, monkeypatch):
    attempt(0)
    assert run_main(False, "run.resume=never") == 0
    monkeypatch.setenv("RANK", "1")
    assert run_main(False, "run.resume=never") == 0


def test_two_runs_do_not_share_a_directory(run_main, attempt, tmp_path, capsys):
    attempt(0)
    with launch.lock_run_dir(types.SimpleNamespace(run=types.SimpleNamespace(dir=str(tmp_path)))):
        assert run_main(True) == 2
        assert capsys.readouterr().err == (
            f"error: run.dir: another run is at work in {tmp_path}; choose another one, or end that run\n"
        )
    assert not (tmp_path / "config.yaml").exists() and not (tmp_path / "events.jsonl").exists()
    attempt(0, "later")
    assert run_main(True) == 0


def test_what_another_ranks_death_breaks_before_the_first_step_is_tried_again(run_main, attempt, monkeypatch):
    """torchrun's signal comes a moment after the broken connection."""
    monkeypatch.setattr(server, "stop_signals", [])

    def learn(self):
        threading.Timer(0.3, server.stop_signals.append, ("SIGTERM",)).start()
        raise RuntimeError("gloo: Connection closed by peer")

    attempt(0)
    with pytest.raises(RuntimeError):
        run_main(learn)
    server.stop_signals.clear()
    attempt(1)
    assert run_main(True) == 0


def test_an_engine_that_was_told_to_stop_while_it_started_ends_no_job(run_main, attempt, monkeypatch):
    monkeypatch.setattr(server, "stop_signals", ["SIGTERM"])
    attempt(0)
    assert run_main(server.EngineError("engine 0: SIGTERM came while it started")) == 1
    attempt(1)
    assert run_main(True) == 0


def test_resume_never_refuses_a_foreign_run_on_every_attempt_and_its_own_on_none(run_main, attempt, tmp_path):
    attempt(0, "foreign")
    assert run_main(False) == 0
    for n in (0, 1):
        attempt(n)
        assert run_main(True, "run.resume=never") == 2
    (tmp_path / "config.yaml").unlink()
    for n in (0, 1):
        attempt(n)
        assert run_main(False, "run.resume=never") == 0
    attempt(0)
    assert run_main(False, "run.resume=never") == 2


def test_python_train_py_lets_torchrun_restart(model_dir, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command) or sys.exit(0))
    with pytest.raises(SystemExit):
        train.main([f"model.path={model_dir}", f"run.dir={tmp_path}", "faults.max_restarts=7"])
    assert "--max-restarts=7" in started[0]


# ---------------------------------------------------------------------------------------------------------------- wandb


def test_wandb_gets_no_step_twice_and_misses_none_over_several_restarts(model_dir, tmp_path, monkeypatch):
    cfg = tiny.config(model_dir, tmp_path, "train.steps=20")
    wandb = Recorder()
    monkeypatch.setattr(log, "start_wandb", lambda config: wandb)
    for begin, end in [(0, 7), (5, 6), (5, 9), (8, 10)]:  # lives of the run: (checkpoint, last step before the crash)
        life = log.RunLog(cfg, begin)
        if 0 not in life.evaluated:
            life.evaluation(0, [part(0, 1.0)], k=1)
        for n in range(begin + 1, end + 1):
            step(life, n)
            if n % 2 == 0:
                life.evaluation(n, [part(n, 1.0)], k=1)
    steps = [line["step"] for line in wandb.logged if "version" in line]
    evals = [line["step"] for line in wandb.logged if "eval/sums" in line]
    assert steps == list(range(1, 11)) and evals == list(range(0, 11, 2))
    assert [m["step"] for m in read(tmp_path / "metrics.jsonl")] == list(range(1, 11))


# ------------------------------------------------------------------------------------------------------------ deadlines

@pytest.fixture
def joining(tmp_path, monkeypatch):
    """joining(world, port=None): rank 0 of a job joins, in this process; its groups are not formed."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(sync, "form_groups", lambda config, store, *args: store)

    def join(world, port=None):
        place = {
            "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or agent.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        return sync.join(tiny.config("model", tmp_path, "faults.join_timeout=2"))

    return join


def test_a_rank_that_does_not_come_is_named(joining):
    with pytest.raises(TimeoutError, match=r"^no sign of rank\(s\) \[1, 2\] within faults.join_timeout=2 s$"):
        joining(3)


def test_a_store_that_does_not_answer_is_named(joining):
    with server.hold_port() as nobody:
        port = nobody.getsockname()[1]
        with pytest.raises(TimeoutError, match=rf"^no store at 127.0.0.1:{port} within faults.join_timeout=2 s$"):
            joining(2, port)


def test_a_restarted_job_sees_nothing_of_the_attempt_before(joining, attempt):
    """torchrun hosts one store for all attempts."""
    for n in (0, 1):
        attempt(n)
        store = joining(1)
        assert store.add("seen", 1) == 1


def test_what_takes_too_long_ends_the_process_in_one_line():
    program = "import faults, time\nwith faults.deadline(1, 'error: too long'): time.sleep(1000)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == "error: too long\n"
    with faults.deadline(1, "error: not at all"):
        pass
    time.sleep(1.5)


def publish_to_nobody(cfg, ranks, gone):
    """The learner publishes; its engine rank sleeps, or ends. Returns what the learner says."""
    if ranks.role.kind == "engine":
        return time.sleep(0 if gone else 8)
    plan = sync.plan_buckets({"w": (1024,)}, "float32", 1 << 20)
    with pytest.raises(TimeoutError) as error:
        sync.send_weights({"w": torch.zeros(1024)}, plan, ranks, version=7)
    return str(error.value)


@pytest.mark.parametrize("gone", [False, True])
def test_a_broadcast_has_a_deadline(gone, model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, "faults.sync_timeout=3")
    words, _ = tiny.run_ranks(cfg, publish_to_nobody, gone, timeout=60)
    assert "not every engine rank has taken version 7 within faults.sync_timeout=3 s, or a rank is gone (" in words
    assert "\n" not in words


SIGNALLED = """
import sys, threading, time, types
import launch, server

launch.arm_signals(types.SimpleNamespace(faults=types.SimpleNamespace(stop_timeout=float(sys.argv[1]))))
def tell():
    while not server.stop_signals:
        time.sleep(0.05)
    print("heard", *server.stop_signals, flush=True)
threading.Thread(target=tell, daemon=True).start()
print("ready", flush=True)
import torch.distributed as dist
from datetime import timedelta
dist.HashStore().wait(["never"], timedelta(seconds=1000))  # in C, where no Python handler runs
"""


def test_a_signal_is_heard_and_ends_a_rank_that_is_stuck_in_c():
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, "2"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # it is in C by then
        process.terminate()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out == "heard SIGTERM\n" and process.returncode == 1
    assert "not stopped 2 s after SIGTERM: giving up" in err
