"""The way of groups to the learner: a wire that loses, garbles, repeats and reorders what it carries, a learner that
does not read for a while, and the end of a run."""

import asyncio
import json
import random
import socket
import threading
import time
import types

import numpy as np
import pytest
import tiny
import torch.distributed as dist
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import RUN, learner_or_fake_engine, lines, rollout_lines

import engine as engines
import rollout
import sync
import train
import trajectory
from server import Response


class Wire:
    """Stands for both sockets. `fault(frames)` says what arrives of a message: a list of messages."""

    def __init__(self, fault):
        self.fault, self.arrived = fault, []

    def send_multipart(self, frames, flags, copy):
        self.arrived += self.fault([bytes(frame) for frame in frames])

    def poll(self, timeout):
        return bool(self.arrived)

    def recv_multipart(self, flags):
        if not self.arrived:
            raise zmq.Again
        return self.arrived.pop(0)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")


def ends(engines=1, limit=1000, fault=None):
    """(inbox, outboxes, the events that they record), on real sockets or, with a fault, on a wire of their own each."""
    events = []
    store = dist.HashStore()

    def record(event, **facts):
        events.append({"event": event, **facts})

    def place(rank):
        return types.SimpleNamespace(store=store, record=record, role=sync.Role(rank, "engine", rank - 1, 0), host="127.0.0.1")

    inbox = trajectory.Inbox(place(0))
    outboxes = [trajectory.Outbox(place(1 + engine), limit) for engine in range(engines)]
    if fault:
        inbox.socket.close()
        inbox.socket = Wire(fault)
        for outbox in outboxes:
            outbox.socket.close()
            outbox.socket = inbox.socket
    return inbox, outboxes, events


def stats(engine=0):
    return trajectory.EngineStats(engine, 1.0, 0.5, 1, 1, 1, 0.0)


def exchange(inbox, outboxes, rounds=1):
    """What the rest of the program does all the time: engines report and look at their receipt, the learner reads."""
    got = []
    for _ in range(rounds):
        for outbox in outboxes:
            outbox.looked = 0.0
            outbox.pump()
            outbox.send(stats(outbox.engine))
        got += inbox.receive(0)
    return got


def tickets(messages):
    return [m.ticket for m in messages if isinstance(m, trajectory.Group)]


def garble(rng, frames):
    """One frame cut short, or with one byte changed, or away."""
    i = rng.randrange(2)
    frame, at = frames[i], rng.randrange(len(frames[i]))
    how = rng.randrange(3)
    if how == 0:
        frames[i] = frame[:at]
    elif how == 1:
        frames[i] = frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1 :]
    else:
        del frames[i]
    return frames


# --------------------------------------------------------------------------------------------------- a wire with faults


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), engines=st.integers(1, 3), odds=st.floats(0.0, 0.5))
def test_every_message_comes_out_once_whatever_the_wire_does(seed, engines, odds):
    rng = random.Random(seed)

    def fault(frames):
        if rng.random() > odds:
            return [frames]
        kind = rng.randrange(4)
        if kind == 0:
            return []
        if kind == 1:
            return [frames, list(frames)]
        if kind == 2 and inbox.socket.arrived:  # it overtakes what was sent before it
            return [frames, inbox.socket.arrived.pop()]
        return [garble(rng, frames)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory, "RESENDS", 10**6)
        inbox, outboxes, _ = ends(engines, fault=fault)
        got, sent = [], []
        for n in range(40):
            outbox = rng.choice(outboxes)
            message = tiny.group(np.random.default_rng(n), n)
            message.engine = outbox.engine
            if n % 10 == 9:
                message = trajectory.EvalPart(n, outbox.engine, 0, ["a"], [0.5])
            outbox.send(message)
            sent.append(trajectory.encode(message))
            if rng.random() < 0.3:
                got += exchange(inbox, outboxes)
        for _ in range(2000):
            got += exchange(inbox, outboxes)
            if not any(outbox.kept for outbox in outboxes):
                break
        got = [trajectory.encode(m) for m in got if not isinstance(m, trajectory.EngineStats)]
        assert sorted(got) == sorted(sent)
        assert not any(outbox.kept for outbox in outboxes), "all is acknowledged, and forgotten"


def numbers(events, event):
    return [e["sequence"] for e in events if e["event"] == event]


def test_a_good_wire_makes_no_events_and_no_resends():
    inbox, outboxes, events = ends(engines=2, fault=lambda frames: [frames])
    got = []
    for n in range(20):
        outboxes[n % 2].send(tiny.group(np.random.default_rng(n), n))
        got += exchange(inbox, outboxes)
    assert tickets(got) == list(range(20)) and events == []
    exchange(inbox, outboxes)
    assert not outboxes[0].kept and not outboxes[1].kept


@pytest.mark.parametrize("how", ["lost", "truncated", "header"])
def test_the_very_message_that_was_hurt_is_sent_again_also_the_last_one(how):
    """Message 2 of 3, and message 3, after which only the engine's statistics come."""
    hurt = [2, 5]  # of the messages on the wire
    count = 0

    def fault(frames):
        nonlocal count
        count += 1
        if count not in hurt:
            return [frames]
        return {
            "lost": [],
            "truncated": [[frames[0], frames[1][:-9]]],
            "header": [[frames[0][:3], frames[1]]],
        }[how]

    inbox, (outbox,), events = ends(fault=fault)
    for n in range(2):
        outbox.send(tiny.group(np.random.default_rng(n), n))
    assert tickets(inbox.receive(0)) == [0]
    outbox.send(stats())
    assert tickets(inbox.receive(0)) == []
    assert numbers(events, "missing_message") == [2], "nothing but the statistics showed it"
    outbox.pump()  # message 4 on the wire
    assert tickets(inbox.receive(0)) == [1]
    outbox.send(tiny.group(np.random.default_rng(2), 2))
    assert tickets(exchange(inbox, [outbox], 3)) == [2]
    assert numbers(events, "resend") == [2, 3] == numbers(events, "missing_message")
    garbled = [(e["engine"], e["sequence"]) for e in events if e["event"] == "garbled_message"]
    assert garbled == {"lost": [], "truncated": [(0, 2), (0, 3)], "header": [(None, None)] * 2}[how]
    assert not outbox.kept


def test_a_resend_that_is_lost_is_asked_for_again_and_one_on_its_way_is_not():
    lose = True
    inbox, (outbox,), events = ends(fault=lambda frames: [] if lose else [frames])
    outbox.send(tiny.group(np.random.default_rng(0), 0))
    lose = False
    exchange(inbox, [outbox])
    lose = True
    outbox.looked = 0.0
    outbox.pump()
    lose = False
    assert numbers(events, "resend") == [1]
    for _ in range(3):
        outbox.looked = 0.0
        outbox.pump()
    assert numbers(events, "resend") == [1], "once per request"
    outbox.send(stats())
    assert tickets(inbox.receive(0)) == [] and [e["times"] for e in events if e["event"] == "missing_message"] == [1, 2]
    outbox.looked = 0.0
    outbox.pump()
    held, inbox.socket.arrived = inbox.socket.arrived, []  # on its way while another one is lost
    lose = True
    outbox.send(tiny.group(np.random.default_rng(1), 1))
    lose = False
    inbox.socket.arrived += held
    assert sorted(tickets(exchange(inbox, [outbox], 3))) == [0, 1]
    assert numbers(events, "resend") == [1, 1, 2]


def test_several_that_are_lost_at_once_are_each_sent_again_once():
    lose = True
    inbox, (outbox,), events = ends(fault=lambda frames: [] if lose else [frames])
    for n in range(4):
        outbox.send(tiny.group(np.random.default_rng(n), n))
    lose = False
    assert tickets(exchange(inbox, [outbox], 4)) == [0, 1, 2, 3]
    assert numbers(events, "resend") == [1, 2, 3, 4] == numbers(events, "missing_message")


def test_a_message_that_never_comes_through_ends_the_run():
    """Its content is what breaks it: every time again."""

    def fault(frames):
        return [[frames[0], frames[1][:-1]]] if len(frames[1]) > 200 else [frames]

    inbox, (outbox,), events = ends(fault=fault)
    outbox.send(tiny.group(np.random.default_rng(0), 0))
    with pytest.raises(RuntimeError, match="message 1 of engine 0 did not come through"):
        exchange(inbox, [outbox], 100)
    assert numbers(events, "resend") == [1] * trajectory.RESENDS


def test_what_no_engine_has_sent_is_ignored():
    inbox, (outbox,), events = ends(fault=lambda frames: [frames])
    inbox.socket.arrived += [[b""], [b"GET / HTTP/1.1", b""], [b"\x94\x00\x05\x00\x00", b"x"], [b"", b"", b""]]
    assert tickets(exchange(inbox, [outbox])) == [] and len(events) == 4
    assert {e["event"] for e in events} == {"garbled_message"}
    outbox.send(tiny.group(np.random.default_rng(0), 0))
    assert tickets(exchange(inbox, [outbox], 3)) == [0] and not outbox.kept and len(events) == 4


# ---------------------------------------------------------------------------------------------------- and real sockets


def receive_until(inbox, outboxes, ready, seconds=30):
    got = []
    for _ in range(seconds * 20):
        got += inbox.receive(0.05)
        for outbox in outboxes:
            outbox.pump()
        if ready(got):
            return got
    raise AssertionError(f"after {seconds} s there is {len(got)} and not what was waited for")


def test_a_learner_that_does_not_read_makes_no_send_wait_or_fail():
    inbox, outboxes, events = ends(engines=2, limit=1000)
    large = tiny.group(np.random.default_rng(0), 0, response=4000)
    for n in range(1000):  # about 50 MB
        large.ticket = n
        outboxes[n % 2].send(large)
    assert [len(outbox.kept) for outbox in outboxes] == [500, 500] and not outboxes[0].is_full
    got = receive_until(inbox, outboxes, lambda got: len(got) >= 1000 and not outboxes[0].kept and not outboxes[1].kept)
    assert sorted(tickets(got)) == list(range(1000)) and events == []
    for outbox in outboxes:
        outbox.close()


def test_sending_to_a_process_that_is_stopped_does_not_wait_or_fail():
    """Its kernel takes the connection, and nothing reads."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        ranks = types.SimpleNamespace(store=dist.HashStore(), record=None, role=sync.Role(1, "engine", 0, 0), host="127.0.0.1")
        ranks.store.set("inbox", json.dumps([f"tcp://127.0.0.1:{stopped.getsockname()[1]}", "00" * 16]))
        outbox = trajectory.Outbox(ranks, 2000)
        for n in range(2000):
            outbox.send(tiny.group(np.random.default_rng(0), n))
            outbox.send(stats())
        assert outbox.is_full
        outbox.close()


def test_nobody_waits_at_the_end_for_what_nobody_reads(monkeypatch):
    context = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    inbox, (outbox,), _ = ends()
    inbox.socket.close()
    for n in range(100):
        outbox.send(tiny.group(np.random.default_rng(0), n, response=4000))
    outbox.close()
    end = threading.Thread(target=context.term, daemon=True)  # as it happens when a process ends
    end.start()
    end.join(20)
    assert not end.is_alive()


# --------------------------------------------------------------------------------------------------------- backpressure


class FakeEngine:
    """An engine that always serves version 0, and all engines of the run."""

    index, status, copy_version, server = 0, engines.SERVING, 0, types.SimpleNamespace(version=0)
    loading, pause, restarted, retried, memory_gb = None, 0.0, 0, 0, 0.0

    async def supervise(self):
        pass

    async def release_lenders(self):
        pass

    async def generate(self, prompt, n, sampling, version):
        await asyncio.sleep(0.001)
        logp, versions = np.zeros(3, np.float32), np.zeros(3, np.int32)
        return [Response(np.full(3, 7, np.int32), logp, versions, "stop", len(prompt), 0)] * n


class RejectingGraders:
    """Every group has no variance."""

    def __init__(self, *args):
        pass

    async def score_all(self, row, text):
        return {"number": 0.0}, None

    def close(self):
        pass


def test_rejected_groups_stop_at_the_limit_while_the_learner_is_busy_and_go_on_when_it_reads(
    model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(rollout, "GraderPool", RejectingGraders)
    overrides = ["train.groups_per_step=4", "staleness.max=1", "rollout.group_size=2", "rollout.max_concurrent=4"]
    cfg = tiny.config(model_dir, tmp_path, *overrides)
    store = dist.HashStore()
    ranks = types.SimpleNamespace(
        role=sync.Role(1, "engine", 0, 0), store=store, record=lambda *args, **facts: None, host="127.0.0.1"
    )
    inbox = trajectory.Inbox(ranks)
    engine = rollout.EngineRank(cfg, ranks, rollout.open_prompts(cfg))
    engine.engine = engine.engines = FakeEngine()
    state = engine.state
    state.create(counted=0, next_ticket=0, redo=[], plan=[])
    state.announce(0)
    limit, under_way = 2 * 4, 4

    async def until(ready):
        for _ in range(1500):
            if ready():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{state.read().started} groups were begun")

    async def main():
        work = asyncio.create_task(engine.work())
        seen = [0]
        for _ in range(3):
            await until(lambda: state.read().started >= seen[-1] + limit)
            await asyncio.sleep(0.5)
            assert state.admits(state.read(), 0), "it is not the staleness gate that stops them"
            assert len(engine.outbox.kept) <= limit + under_way
            started = state.read().started
            await asyncio.sleep(0.3)
            assert state.read().started == started <= seen[-1] + limit + under_way
            seen.append(started)
            got = [m for m in inbox.receive(1.0) if isinstance(m, trajectory.Group)]
            assert len(got) == seen[-1] - seen[-2] and all(group.dropped == "zero_variance" for group in got)
        state.stop()
        await work
        assert engine.outbox.socket.closed

    asyncio.run(main())


def test_a_message_of_another_attempt_is_no_message_of_this_one():
    """Its rank may live a little longer, and ports come again."""
    inbox, _, events = ends(fault=lambda frames: [frames])
    _, (stranger,), _ = ends(fault=lambda frames: [frames])
    stranger.send(tiny.group(np.random.default_rng(0), 7))
    inbox.socket.arrived = stranger.socket.arrived
    assert list(inbox.receive(0)) == [] and [e["event"] for e in events] == ["garbled_message"]
    assert not inbox.received


# ---------------------------------------------------------------------------------------------------------- whole runs


def learner_or_engine_on_a_bad_wire(cfg, ranks):
    """One message of four is lost or garbled, between the real sockets."""
    trajectory.RESENDS, trajectory.LOOK_EVERY = 10**6, 0.02
    if ranks.role.kind == "engine":
        rng = random.Random(ranks.role.engine)

        class Outbox(trajectory.Outbox):
            def __init__(self, *args):
                super().__init__(*args)
                self.socket, wire = self, self.socket
                self.send_multipart = lambda frames, *how, **more: self.carry(wire, frames)
                self.close = wire.close

            def carry(self, wire, frames):
                if rng.random() < 0.75:
                    wire.send_multipart(frames)
                elif rng.random() < 0.5:
                    wire.send_multipart(garble(rng, list(frames)))

        trajectory.Outbox = Outbox
    return learner_or_fake_engine(cfg, ranks)


def test_a_run_on_a_bad_wire_settles_every_prompt_once(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, *RUN, "train.steps=6", "eval.every=2", "staleness.max=1", engines=2)
    tiny.run_ranks(cfg, learner_or_engine_on_a_bad_wire)
    events = {line["event"] for line in lines(tmp_path, "events.jsonl")}
    assert {"garbled_message", "missing_message", "resend"} <= events
    assert [m["step"] for m in lines(tmp_path, "metrics.jsonl")] == list(range(1, 7))
    assert [e["step"] for e in lines(tmp_path, "eval.jsonl")] == [0, 2, 4, 6]
    stored = rollout_lines(tmp_path)
    assert len({r["ticket"] for r in stored}) * 2 == len(stored), "no group is stored twice"
    assert sum(r["learned_at"] is not None for r in stored) == 6 * 3 * 2
    with open(tmp_path / "checkpoints" / "step_6" / "progress.json") as f:
        saved = json.load(f)
    assert sorted({r["ticket"] for r in stored}) == list(range(saved["low"])) + saved["done"]


def last_words(inbox, patience=20.0):
    """What Learner.receive_the_rest takes in, and how many seconds it takes."""
    learner, got = train.Learner.__new__(train.Learner), []
    learner.inbox, learner.buffer, learner.engines = inbox, types.SimpleNamespace(add=got.append), {}
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LAST_WORDS_S", patience)
        learner.receive_the_rest()
    return tickets(got), time.monotonic() - began


def test_the_last_checkpoint_waits_for_what_was_sent_and_not_for_the_dead():
    lose = [2]

    def fault(frames):
        lose[0] -= 1
        return [frames] if lose[0] else []

    inbox, (outbox,), _ = ends(fault=fault)
    outbox.send(stats())
    list(inbox.receive(0))
    outbox.send(tiny.group(np.random.default_rng(0), 0))  # lost

    def live():
        while outbox.kept:
            time.sleep(0.05)
            outbox.send(stats())
            outbox.pump()

    engine = threading.Thread(target=live, daemon=True)
    engine.start()
    got, seconds = last_words(inbox)
    assert got == [0] and seconds < 15
    engine.join(20)
    inbox.socket.arrived.clear()
    got, seconds = last_words(inbox, patience=0.3)  # the engine says nothing any more
    assert got == [] and 0.3 <= seconds < 15
