"""Engines that fail: are they noticed, started again with the right weights, and do their requests go on elsewhere?

With stand-ins for SGLang (fake_sglang.py) that are up in a second and fail on demand; the real one is in test_engine.py
and test_chaos.py. Their next token is a function of all before it, so a response that went through several servers must be
the one that a single server would have given.
"""

import asyncio
import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import types

import numpy as np
import psutil
import pytest
import tiny
import torch
import torch.distributed as dist
from fake_sglang import next_token

import engine as engines
import faults
import server
import sync
import train
from server import EngineError, Sampling

PROMPT = [40, 41, 42]
PLAN = [[sync.Slot(f"layer.{i}.weight", [8], "float32", 0, 32)] for i in range(3)]
QUICK = [
    "faults.backoff=0.05", "faults.probe_every=1000", "faults.probe_timeout=3", "faults.restarts_per_hour=3",
    "rollout.stream_interval=4", "layout.engines=2",
]  # fmt: skip


def expected(prompt, n):
    ids = []
    for _ in range(n):
        ids.append(next_token(prompt + ids))
    return ids


class Job:
    """Engine ranks of one job in one process, with servers of their own."""

    def __init__(self, model_dir, tmp_path, monkeypatch, *overrides, engine_ranks=2):
        self.config = tiny.config(model_dir, tmp_path, *QUICK, *overrides, engines=2)
        self.path = tmp_path / "events.jsonl"
        (tmp_path / "logs").mkdir()
        store = dist.HashStore()
        fake = os.path.join(os.path.dirname(__file__), "fake_sglang.py")
        real = server.Server.command

        def command(self, host, port, base_gpu):
            assert "--incremental-streaming-output" in real(self, host, port, base_gpu)
            return [sys.executable, fake, "--port", str(port), "--stream-interval", str(self.config.rollout.stream_interval)]

        def serialize(staged, bucket):
            (slot,) = bucket
            return json.dumps({slot.name: base64.b64encode(staged.numpy().tobytes()).decode()})

        monkeypatch.setattr(server.Server, "command", command)
        monkeypatch.setattr(engines, "serialize", serialize)
        monkeypatch.setattr(sync, "receive_version", lambda announced, ranks: announced)
        monkeypatch.setattr(sync, "receive_bucket", lambda flat, version, ranks: flat.copy_(self.wire.pop(0)))
        monkeypatch.setattr(sync, "engine_checksums", checksums)
        self.wire: list[torch.Tensor] = []
        self.engines, self.asks = [], []
        for i in range(engine_ranks):
            ranks = types.SimpleNamespace(
                role=sync.Role(1 + i, "engine", i, 0), store=store, device=torch.device("cpu"), wire=torch.device("cpu"),
                tp=None, record=faults.Recorder(str(tmp_path), 1 + i), host="127.0.0.1", buffers=[],
            )  # fmt: skip
            self.state = state = sync.RunState(store, 2, 8)
            if i == 0:
                state.create(counted=0, next_ticket=0, redo=[], plan=[])
            hosted = engines.Engine(self.config, ranks, state, model_dir, [1])
            self.engines.append(hosted)
            self.asks.append(engines.Engines(self.config, ranks, state, hosted))
        self.plain_ranks = ranks

    def run(self, story):
        """Starts the engines, publishes version 0 to each, and runs story(job)."""

        async def main():
            watchers = []
            try:
                await asyncio.gather(*(e.start() for e in self.engines))
                for e in self.engines:
                    await self.publish(e, 0)
                watchers = [asyncio.create_task(e.supervise()) for e in self.engines]
                self.watchers = watchers
                await story(self)
            finally:
                for task in watchers:
                    task.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)
                for e in self.engines:
                    await e.server.http.close()
                    e.server.stop()

        asyncio.run(asyncio.wait_for(main(), 120))

    async def publish(self, e, version):
        weights = [torch.full([8], float(version * 10 + i)).view(torch.uint8) for i in range(len(PLAN))]
        self.wire += weights
        self.state.announce(version)
        await e.receive(version, PLAN)
        if e.loading:
            await asyncio.wait([e.loading])

    async def behave(self, e, mode):
        await e.server.post("/behave", {"mode": mode})

    async def until(self, condition):
        while not condition():
            for watcher in self.watchers:
                if watcher.done():
                    watcher.result()
            await asyncio.sleep(0.02)

    def events(self, *kinds):
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [e for e in lines if e["event"] in kinds]

    def check(self, responses, n, prompt=PROMPT):
        for r in responses:
            assert r.ids.tolist() == expected(prompt, n) and r.finish == "length"
            assert len(r.logp) == len(r.versions) == n and (r.versions >= 0).all()


def checksums(published, *place):
    return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in published.items()}


@pytest.fixture
def job(model_dir, tmp_path, monkeypatch):
    return lambda *overrides, **options: Job(model_dir, tmp_path, monkeypatch, *overrides, **options)


async def held(e):
    """What the server itself says that it holds: its version, and whether that is the copy, bitwise."""
    answer = await e.server.post("/weights_checker", {})
    mine = {name: c for rank in answer["ranks"] for name, c in rank["checksums"].items()}
    published = {}
    for flat, bucket in zip(e.copy, PLAN):
        published |= sync.unpack(flat, bucket)
    return mine == checksums(published)


# ------------------------------------------------------------------------------------------------- requests go on elsewhere


def test_a_killed_engines_requests_go_on_elsewhere_from_the_tokens_they_have(job):
    job = job()

    async def story(job):
        first, second = job.engines
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 4, Sampling(1.0, 200), 0))
        await asyncio.sleep(0.7)
        os.killpg(first.server.process.pid, signal.SIGKILL)
        job.check(await request, 200)
        (retry,) = job.events("retry")
        assert retry["engine"] == 0 and retry["responses"] == 4 and retry["tokens"] >= 4 * 5
        assert job.asks[0].retried == 4
        keys = (await second.server.post("/behave", {"mode": "ok"}))["keys"]
        assert len(keys) == 1 and keys[0] != "0"  # the other engine has finished it, from no cached prefix
        await job.until(lambda: first.status == engines.SERVING and first.restarted == 1)
        assert await held(first) and first.server.version == 0
        job.check(await job.asks[0].generate(PROMPT, 1, Sampling(1.0, 8), 0), 8)

    job.run(story)
    kinds = [(e["event"], e.get("now")) for e in job.events("engine_up", "engine_down", "breaker") if e["engine"] == 0]
    assert kinds[-4:-1] == [("breaker", "down"), ("engine_down", None), ("engine_up", None)]
    assert kinds[-1] == ("breaker", "serving")


def test_with_a_single_engine_a_request_waits_for_it_and_goes_on(job):
    job = job(engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 2, Sampling(1.0, 100), 0))
        await asyncio.sleep(0.6)
        os.killpg(only.server.process.pid, signal.SIGKILL)
        job.check(await request, 100)
        assert only.restarted == 1 and job.events("retry")[0]["tokens"] > 0

    job.run(story)


@pytest.mark.parametrize("mode", ["500", "garbage", "other", "cut"])
def test_wrong_answers_open_the_breaker_until_a_probe_succeeds(job, mode):
    job = job()

    async def story(job):
        first, second = job.engines
        await job.behave(first, mode)
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 2, Sampling(1.0, 40), 0))
        await job.until(lambda: job.events("retry"))
        await job.behave(first, "ok")
        job.check(await request, 40)
        await job.until(lambda: first.status == engines.SERVING and first.doubts)
        assert first.restarted == 0
        job.check(await job.asks[0].generate(PROMPT, 2, Sampling(1.0, 40), 0), 40)

    job.run(story)
    states = [e["now"] for e in job.events("breaker") if e["engine"] == 0]
    assert states == ["serving", "suspect", "serving"]


def test_an_engine_that_goes_on_answering_wrongly_is_started_again(job, monkeypatch):
    monkeypatch.setattr(engines, "PROBES", 2)
    job = job()

    async def story(job):
        await job.behave(job.engines[0], "500")
        job.check(await job.asks[0].generate(PROMPT, 2, Sampling(1.0, 40), 0), 40)
        await job.until(lambda: job.engines[0].restarted == 1 and job.engines[0].status == engines.SERVING)

    job.run(story)
    assert "status 500" in job.events("engine_down")[0]["why"]


def test_no_server_is_started_beside_one_that_has_not_ended(job, monkeypatch):
    job = job()
    wait, stubborn = subprocess.Popen.wait, []

    def slow_kernel(process, timeout=None):
        if timeout == server.STOP_S and len(stubborn) < 2:
            stubborn.append(process)
            raise subprocess.TimeoutExpired("sglang", timeout)
        return wait(process, timeout)

    async def story(job):
        first = job.engines[0]
        start, old = server.Server.start, first.server.process

        async def checked_start(*args):
            assert old.returncode is not None, "the old one is there"
            await start(*args)

        monkeypatch.setattr(server.Server, "start", checked_start)
        monkeypatch.setattr(subprocess.Popen, "wait", slow_kernel)
        os.killpg(old.pid, signal.SIGSTOP)
        first.failed = "stuck"
        await job.until(lambda: first.status == engines.SERVING and first.restarted)
        assert stubborn == [old, old] and first.restarted == 3

    job.run(story)
    assert ["is still there" in e["why"] for e in job.events("engine_down")] == [False, True, True]


def test_another_ranks_failure_opens_the_breaker_too(job):
    """Rank 1's engine is down; its request goes to engine 1 of rank 2, which cuts the connection."""
    job = job()

    async def story(job):
        first, second = job.engines
        first.status = engines.DOWN  # as while it is started again
        await job.behave(second, "cut")
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 1, Sampling(1.0, 40), 0))
        await job.until(lambda: job.events("retry"))
        await job.behave(second, "ok")
        job.check(await request, 40)
        assert second.doubts == 1

    job.run(story)
    assert [e["now"] for e in job.events("breaker") if e["engine"] == 1] == ["serving", "suspect", "serving"]


def test_a_request_that_no_engine_survives_ends_the_run(job):
    job = job("faults.request_retries=2", "faults.restarts_per_hour=10")

    async def story(job):
        for e in job.engines:
            await job.behave(e, "poison")
        with pytest.raises(EngineError, match=r"failed 3 times in a row \(faults.request_retries=2\).*did not answer /generate"):
            failing = asyncio.create_task(job.asks[0].generate([13], 1, Sampling(1.0, 8), 0))
            while not failing.done():  # a server that is started again does not remember
                for e in job.engines:
                    if e.status == engines.SERVING:
                        try:
                            await job.behave(e, "poison")
                        except EngineError:
                            pass
                await asyncio.sleep(0.02)
            await failing

    job.run(story)


def test_a_request_that_gets_on_between_deaths_is_not_at_fault(job):
    """More deaths than a request may have in a row, with tokens before each of them."""
    job = job("faults.request_retries=1", "faults.restarts_per_hour=20", engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 1, Sampling(1.0, 30), 0))
        while not request.done():
            if only.status == engines.SERVING:
                try:
                    await job.behave(only, "cut")
                except EngineError:
                    pass
            await asyncio.sleep(0.02)
        job.check(await request, 30)
        assert len(job.events("retry")) > 3

    job.run(story)


def test_retries_of_a_request_leave_the_engines_time_to_recover(job):
    """Both refuse it four times, and answer every probe."""
    job = job("faults.request_retries=4", "faults.backoff=0.2")

    async def story(job):
        for e in job.engines:
            await job.behave(e, "refuse")
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 1, Sampling(1.0, 8), 0))
        await job.until(lambda: len(job.events("retry")) == 4)
        for e in job.engines:
            await job.behave(e, "ok")
        job.check(await request, 8)
        assert not job.events("engine_down")
        times = [e["time"] for e in job.events("retry")]
        assert times[2] - times[1] >= 0.2 and times[3] - times[2] >= 0.4

    job.run(story)


@pytest.mark.parametrize("mode", ["version:77", "version:default"])
def test_tokens_of_a_version_that_nobody_has_published_are_not_taken(job, mode):
    job = job(engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        await job.behave(only, mode)
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 2, Sampling(1.0, 12), 0))
        await job.until(lambda: job.events("retry"))
        await job.behave(only, "ok")
        responses = await request
        job.check(responses, 12)
        assert {v for r in responses for v in r.versions} == {0}
        assert "the newest is 0" in job.events("retry")[0]["why"]

    job.run(story)


# ------------------------------------------------------------------------------------------------------- stuck, slow, large


def test_a_stopped_server_is_stuck_and_is_started_again(job):
    job = job("faults.probe_every=0.5", "faults.probe_timeout=1")

    async def story(job):
        first, _ = job.engines
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 2, Sampling(1.0, 100), 0))
        await asyncio.sleep(0.5)
        os.killpg(first.server.process.pid, signal.SIGSTOP)
        job.check(await request, 100)
        await job.until(lambda: first.restarted == 1 and first.status == engines.SERVING)

    job.run(story)
    assert "no token within faults.probe_timeout=1 s" in job.events("engine_down")[0]["why"]


def test_a_stopped_server_is_stuck_also_while_publications_go_on(job):
    job = job("faults.probe_every=0.5", "faults.probe_timeout=1", engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        os.killpg(only.server.process.pid, signal.SIGSTOP)
        version = 0
        while not job.events("engine_down"):
            version += 1
            assert version <= 20, "a learner that publishes without a pause hides that the server is stuck"
            await job.publish(only, version)
            await asyncio.sleep(0.2)
        await job.until(lambda: only.status == engines.SERVING)
        assert only.server.version == version and await held(only)

    job.run(story)


def test_a_server_that_takes_every_publication_and_gives_no_token_is_stuck(job):
    job = job("faults.probe_every=0.5", "faults.probe_timeout=1.5", engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        await job.behave(only, "mute")
        version = 0
        while not job.events("engine_down"):
            version += 1
            assert version <= 100, "its answers to control calls hide that it is stuck"
            await job.publish(only, version)
            await asyncio.sleep(0.1)
        assert "gave no token" in job.events("engine_down")[0]["why"]

    job.run(story)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_death_in_the_first_publication_is_a_fault_and_a_refusal_a_mistake(job, refuses):
    job = job(engine_ranks=1)

    async def story(job):
        await job.until(lambda: job.engines[0].status == engines.SERVING and job.engines[0].restarted == 1)
        assert job.engines[0].server.version == 0 and await held(job.engines[0])

    (only,) = job.engines
    launch = only.server.start

    async def start(*place):
        await launch(*place)
        if only.server.starts == 1:
            await job.behave(only, f"{'refuse' if refuses else 'die'}:/update_weights_from_tensor")

    only.server.start = start
    job.run(story if not refuses else refused(only))


def refused(only):
    async def story(job):
        with pytest.raises(server.Refused, match="answered /update_weights_from_tensor with status 400"):
            await only.loading
        assert not only.restarted

    return story


def test_a_slow_server_is_not_stuck(job):
    """A second for the first token of the probe, as behind a long prefill."""
    job = job("faults.probe_every=0.2", "faults.probe_timeout=3")

    async def story(job):
        for e in job.engines:
            await job.behave(e, "slow")
        job.check(await job.asks[0].generate(PROMPT, 2, Sampling(1.0, 4), 0), 4)
        await asyncio.sleep(1.0)

    job.run(story)
    assert not job.events("engine_down", "retry")


def test_a_server_above_its_memory_is_started_again(job):
    job = job("faults.engine_memory_gb=0.001", "faults.restarts_per_hour=1", "faults.min_engines=2")

    async def story(job):
        with pytest.raises(EngineError, match=r"after 1 restarts.*faults.min_engines=2.*above faults.engine_memory_gb=0.001"):
            await job.until(lambda: False)

    job.run(story)


def test_too_many_restarts_give_the_engine_up_and_the_others_go_on(job):
    job = job()

    async def story(job):
        first, second = job.engines
        while first.status != engines.GIVEN_UP:
            if first.status == engines.SERVING and first.server.process:
                os.killpg(first.server.process.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
        assert first.restarted == 3
        await job.publish(first, 1)  # its rank goes on taking part in publications
        await job.publish(second, 1)
        job.check(await job.asks[0].generate(PROMPT, 2, Sampling(1.0, 20), 1), 20)  # and in the work, elsewhere

    job.run(story)


def test_restarts_that_are_in_vain_count_however_long_they_take(job, monkeypatch):
    monkeypatch.setattr(engines, "HOUR", 0.0)  # each takes an hour
    job = job("faults.restarts_per_hour=2")

    async def story(job):
        first, second = job.engines
        monkeypatch.setattr(first.server, "command", lambda *args: ["false"])
        os.killpg(first.server.process.pid, signal.SIGKILL)
        await job.until(lambda: first.status == engines.GIVEN_UP)
        assert first.restarted == 2 and second.status == engines.SERVING

    job.run(story)


@pytest.mark.parametrize("moved", [False, True])
def test_a_first_start_that_fails_is_a_fault_only_in_a_job_that_has_moved(job, moved, monkeypatch):
    job = job(engine_ranks=1)
    (only,) = job.engines
    real, tries = only.server.command, []

    def command(*args):
        tries.append(args)
        return real(*args) if len(tries) > 1 else ["false"]

    monkeypatch.setattr(only.server, "command", command)
    if moved:
        only.ranks.record("first_step", step=1)

    async def story(job):
        await job.until(lambda: only.status == engines.SERVING)
        assert len(tries) == 2 and only.server.version == 0 and await held(only)
        job.check(await job.asks[0].generate(PROMPT, 1, Sampling(1.0, 8), 0), 8)

    if moved:
        job.run(story)
    else:
        with pytest.raises(EngineError, match="ended with exit code 1"):
            job.run(story)


def test_below_min_engines_the_run_ends_with_the_engines_last_lines(job):
    job = job("faults.restarts_per_hour=0", "faults.min_engines=2")

    async def story(job):
        os.killpg(job.engines[0].server.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"(?s)1 engines are fewer than faults.min_engines=2.*the fake server is up"):
            await job.until(lambda: False)

    job.run(story)


RANK = """
import asyncio, os, sys, time
sys.path[:0] = [{tests!r}, {root!r}]
import server, tiny

os.makedirs({folder!r} + "/logs")
hosted = server.Server(tiny.config({model!r}, {folder!r}), {model!r}, 0, [], {folder!r} + "/logs/engine_0.log")
fake = [sys.executable, {tests!r} + "/fake_sglang.py", "--stream-interval", "4", "--port"]
hosted.command = lambda host, port, base_gpu: fake + [str(port)]
asyncio.run(hosted.start())
print(hosted.process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("own_session", [False, True])
def test_no_server_outlives_its_rank(model_dir, tmp_path, stopped, own_session):
    tests = os.path.dirname(os.path.abspath(__file__))
    program = RANK.format(tests=tests, root=os.path.dirname(tests), folder=str(tmp_path / "run"), model=str(model_dir))
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=own_session)
    try:
        group = int(rank.stdout.readline())
        if stopped:
            os.killpg(group, signal.SIGSTOP)
    finally:
        rank.kill()
        rank.wait()
    deadline = time.monotonic() + 60
    while any(is_living_in(p, group) for p in psutil.process_iter()):
        assert time.monotonic() < deadline, "the server goes on without its rank"
        time.sleep(0.05)


def is_living_in(process, group):
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


# --------------------------------------------------------------------------------------------------------------- weights

STEPS = [
    "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/continue_generation",
]  # fmt: skip


def test_a_server_that_is_slow_at_every_step_holds_a_publication_up_no_longer_than_probe_timeout(job):
    job = job("faults.probe_timeout=1.5", engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        await job.behave(only, "slow calls")
        await job.publish(only, 1)  # seven calls of half a second
        assert "did not answer /" in only.failed
        await job.until(lambda: only.status == engines.SERVING and only.restarted == 1)
        assert only.server.version == 1 and await held(only)

    job.run(story)


@pytest.mark.parametrize("path", STEPS)
def test_a_death_at_any_step_of_an_update_costs_a_restart_that_ends_with_the_new_weights(job, path):
    job = job(engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 2, Sampling(1.0, 100), 0))
        await asyncio.sleep(0.4)
        await job.behave(only, f"die:{path}")
        await job.publish(only, 1)  # returns: the learner is not held up
        assert only.copy_version == 1
        job.check(await request, 100)
        await job.until(lambda: only.status == engines.SERVING)
        assert only.restarted == 1 and only.server.version == 1 and await held(only)
        assert float(only.copy[2].view(torch.float32)[0]) == 12.0

    job.run(story)


def test_a_server_that_is_away_catches_up_with_the_last_of_several_publications(job):
    job = job()

    async def story(job):
        first, second = job.engines
        os.killpg(first.server.process.pid, signal.SIGKILL)
        await job.until(lambda: first.status == engines.DOWN)
        for version in (1, 2, 3):
            await job.publish(first, version)
            await job.publish(second, version)
        job.check(await job.asks[0].generate(PROMPT, 2, Sampling(1.0, 20), 3), 20)
        await job.until(lambda: first.status == engines.SERVING)
        assert first.server.version == 3 and await held(first)
        (r,) = await job.asks[0].generate(PROMPT, 1, Sampling(1.0, 4), 3)
        assert set(r.versions) == {3}

    job.run(story)


def test_a_restarted_server_with_other_weights_stops_the_run(job, monkeypatch):
    job = job(engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        monkeypatch.setattr(engines, "serialize", lambda staged, bucket: json.dumps({bucket[0].name: ""}))
        os.killpg(only.server.process.pid, signal.SIGKILL)
        with pytest.raises(server.WrongWeights, match="3 of 3 parameters differ"):
            await job.until(lambda: False)
        assert only.status == engines.DOWN

    job.run(story)


def test_no_engine_with_older_weights_goes_on_with_a_request(job):
    job = job()

    async def story(job):
        first, second = job.engines
        await job.publish(first, 1)  # the other one is behind
        os.killpg(first.server.process.pid, signal.SIGKILL)
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 1, Sampling(1.0, 8), 1))
        await job.until(lambda: first.status == engines.DOWN)
        (r,) = await request
        assert first.restarted == 1 and set(r.versions) == {1}

    job.run(story)


def test_versions_of_a_response_that_a_death_cut_are_those_of_its_tokens_or_older(job):
    job = job(engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        request = asyncio.create_task(job.asks[0].generate(PROMPT, 1, Sampling(1.0, 200), 0))
        await asyncio.sleep(0.5)
        await job.publish(only, 1)
        await asyncio.sleep(0.5)
        os.killpg(only.server.process.pid, signal.SIGKILL)
        (r,) = await request
        job.check([r], 200)
        assert (np.diff(r.versions) >= 0).all() and set(r.versions) == {0, 1}

    job.run(story)


def publish_past_a_late_rank(cfg, ranks):
    """Runs in a rank; the last engine's stands still while the learner publishes on. What each server was given, by version."""
    engines.serialize = lambda staged, bucket: float(staged.view(torch.float32)[0])
    state = sync.RunState(ranks.store, 2, 8)
    parameters = {"a.weight": torch.nn.Parameter(torch.zeros(8))}
    plan = sync.plan_buckets({"a.weight": (8,)}, "float32", 64 << 20)
    if ranks.role.kind == "learner":
        state.create(counted=0, next_ticket=0, redo=[], plan=[])
        for version in range(4):
            with torch.no_grad():
                parameters["a.weight"].fill_(float(version))
            state.announce(version)
            sync.send_weights(parameters, plan, ranks, version)
            if version == 0:
                ranks.store.wait([f"has 0 {i}" for i in range(cfg.layout.engines)])
            time.sleep(0.3)
        return None
    state.open()
    given = []

    async def host():
        hosted = engines.Engine(cfg, ranks, state, cfg.model.path, [1])
        hosted.status = engines.SERVING

        async def post(path, body, patience=None):
            if path == "/update_weights_from_tensor":
                given.append((body["weight_version"], *body["serialized_named_tensors"]))

        hosted.server.post = post
        while hosted.copy_version < 3:
            if state.read().version > hosted.copy_version:
                await hosted.receive(state.read().version, plan)
                await hosted.loading
            if hosted.copy_version == 0:
                ranks.store.set(f"has 0 {ranks.role.engine}", "")
                if ranks.role.engine == cfg.layout.engines - 1:
                    time.sleep(2.0)
            await asyncio.sleep(0.01)

    asyncio.run(host())
    return given


def test_the_version_of_weights_is_the_one_that_came_with_them(job, monkeypatch):
    job = job(engine_ranks=1)

    async def story(job):
        (only,) = job.engines
        came = iter([1, 2, 2, 9])
        monkeypatch.setattr(sync, "receive_version", lambda announced, ranks: next(came))
        await job.publish(only, 3)  # three are announced, and the first of them comes
        assert only.copy_version == only.server.version == 1
        await job.publish(only, 3)
        assert only.copy_version == only.server.version == 2 and await held(only)
        for _ in range(2):  # one that was here, and one that nobody announced
            with pytest.raises(server.WrongWeights, match="where 2 is here and 3 is announced"):
                await only.receive(3, PLAN)

    job.run(story)


def test_a_rank_that_is_late_takes_no_publication_for_a_later_one(model_dir, tmp_path):
    """With three engines gloo's broadcast of one bucket is over before the last rank has taken it."""
    (tmp_path / "logs").mkdir()
    _, *given = tiny.run_ranks(tiny.config(model_dir, tmp_path, engines=3), publish_past_a_late_rank, timeout=90)
    assert given == [[(str(version), float(version)) for version in range(4)]] * 3


# ------------------------------------------------------------------------------------------------- tensor-parallel ranks


def publish_to_two_ranks(cfg, ranks):
    """Runs in a rank. Learner: the digest of every bucket that it sent. The rank of the server: what it handed over."""
    engines.serialize = lambda staged, bucket: hashlib.sha256(staged.numpy().tobytes()).hexdigest()
    state = sync.RunState(ranks.store, 0, 1)
    if ranks.role.kind == "learner":
        policy = train.load_policy(cfg, ranks)
        parameters = sync.published_parameters(policy.lm)
        plan = sync.plan_buckets(sync.published_shapes(policy.lm), "float32", 64 << 10)
        slots = [[tuple(vars(slot).values()) for slot in bucket] for bucket in plan]
        state.create(counted=0, next_ticket=0, redo=[], plan=slots)
        sent = []
        for version in range(2):
            with torch.no_grad():
                for p in policy.parameters():
                    p.mul_(1.5)
            sync.send_weights(parameters, plan, ranks, version)
            tensors = dict(sync.published_tensors(parameters))
            for bucket in plan:
                content = b"".join(tensors[slot.name].detach().contiguous().numpy().tobytes() for slot in bucket)
                sent.append(hashlib.sha256(content).hexdigest())
        return sent
    if ranks.role.tp > 0:
        return engines.lend_device(cfg, ranks, state)
    state.open()
    handed = []

    async def host():
        hosted = engines.Engine(cfg, ranks, state, cfg.model.path, [1])
        hosted.status = engines.SERVING

        async def post(path, body, patience):
            handed.append((path, body.get("serialized_named_tensors")))

        hosted.server.post = post
        for version in range(2):
            await hosted.receive(version, state.plan())
            await hosted.loading
        await hosted.release_lenders()

    asyncio.run(host())
    return handed


def test_every_rank_of_an_engine_hands_its_server_what_the_learner_sent(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, "layout.engine_tp=2")
    sent, handed, _ = tiny.run_ranks(cfg, publish_to_two_ranks)
    buckets = [payloads for path, payloads in handed if path == "/update_weights_from_tensor"]
    assert len(sent) > 4 and buckets == [[digest, digest] for digest in sent]
    per_version = [*STEPS[:2], *[STEPS[2]] * (len(sent) // 2), *STEPS[3:]]
    assert [path for path, _ in handed] == per_version * 2
