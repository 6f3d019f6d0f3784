"""The engines under supervision: servers that are watched, given weights, started again, and asked for responses.

    Engine    this rank's server: probes, restarts, weights and a copy of them for the server that comes after it
    Engines   all engines of the run, as one rank asks them: whom, and what becomes of a request that fails

Whoever has a reason to doubt an engine says so in the run's store; its rank then opens its breaker (nobody asks it),
probes it, and closes the breaker or starts the server again.
"""

import asyncio
import math
import os
import random
import sys
import time
from collections import deque
from typing import Optional

import torch
import torch.distributed as dist
from transformers import AutoConfig

import faults
import sync
from configs.schema import Config
from server import Draft, EngineError, Peer, Refused, Response, Sampling, Server, WrongWeights, stop_signals

LOOK = 0.2  # seconds between looks at a server
PROBES = 3  # wrong answers to a probe, in a row, until a server is started again
HOUR = 3600.0

SERVING = "serving"  # its breaker is closed: anyone may ask it
SUSPECT = "suspect"  # its breaker is open until a probe has succeeded
DOWN = "down"  # it is being started again
GIVEN_UP = "given up"

# ----------------------------------------------------------------------------------------- the server under supervision

class Engine:
    """The server of this rank, and what it takes to have one all the time."""

    def __init__(
        self, config: Config, ranks: sync.Ranks, state: sync.RunState, model_path: str, stop_ids: list[int]
    ):  # fmt: skip
        self.config, self.ranks, self.state = config, ranks, state
        self.faults = config.faults
        self.index = ranks.role.engine
        log_path = os.path.abspath(os.path.join(config.run.dir, "logs", f"engine_{self.index}.log"))
        self.server = Server(config, model_path, self.index, stop_ids, log_path)
        self.kv_heads = AutoConfig.from_pretrained(model_path).num_key_value_heads
        self.status = DOWN
        self.doubts = 0  # of all ranks together that a probe has answered
        self.failed = ""  # why the server must be started again, where that is known already
        self.restarts: deque[float] = deque(maxlen=config.faults.restarts_per_hour or 1)  # when
        self.restarted = 0  # times in all
        self.served_at = time.monotonic()  # when it last began to serve
        self.memory_gb = 0.0
        self.pause = 0.0  # seconds that generation stood still in the last publication
        # What the server must hold, bucket by bucket, in the memory of this rank: a server that is started again gets it
        # from here, so that nobody has to wait for it.
        self.copy: list[torch.Tensor] = []
        self.copy_version = -1
        self.copying = asyncio.Lock()  # the copy is being overwritten, or read by a server that catches up
        self.loading: Optional[asyncio.Task] = None

    async def start(self) -> None:
        """The first start. A server that does not come up is a mistake, not a fault, unless one did in an earlier attempt
        of the job. Raises EngineError."""
        try:
            await self.launch()
            self.tell(SERVING)
        except EngineError as error:
            if not faults.has_moved(self.config.run.dir):
                raise
            self.failed = str(error)

    async def launch(self) -> None:
        began = time.monotonic()
        await self.server.start(self.ranks.host, self.ranks.device.index or 0)
        self.ranks.record(
            "engine_up", engine=self.index, seconds=round(time.monotonic() - began, 1), group=self.server.process.pid,
            processes={worker.name(): worker.pid for worker in self.server.workers},
        )  # fmt: skip

    def tell(self, status: str, why: str = "") -> None:
        """Lets every rank know how the engine is."""
        if status != self.status:
            self.ranks.record("breaker", engine=self.index, before=self.status, now=status, why=first_line(why))
            if self.status == DOWN:
                self.served_at = time.monotonic()
        self.status = status
        known = sync.EngineRecord(status, self.server.url, self.server.version, self.doubts)
        self.state.tell_engine(self.index, known)

    # -- supervision

    async def supervise(self) -> None:
        """Keeps the server serving until it is given up. Raises EngineError where the run cannot go on without it, and
        WrongWeights."""
        while True:
            why = await self.trouble()
            if stop_signals:
                return  # the run ends
            self.tell(DOWN, why)
            self.ranks.record("engine_down", engine=self.index, why=why)
            print(f"engine {self.index} is started again: {first_line(why)}", file=sys.stderr, flush=True)
            self.failed = await self.stop()
            # Those within an hour, and those that were in vain however long each of them took.
            since = min(time.monotonic() - HOUR, self.served_at)
            recent = [t for t in self.restarts if t > since]
            if len(recent) >= self.faults.restarts_per_hour:
                return self.give_up(why)
            await asyncio.sleep(min(60.0, self.faults.backoff * 2 ** len(recent)))
            self.restarts.append(time.monotonic())
            self.restarted += 1
            self.doubts = self.state.doubts(self.index)  # of the server that was
            if self.failed:
                continue
            try:
                await self.launch()
                await self.catch_up()
            except WrongWeights:
                raise
            except EngineError as error:
                self.failed = str(error)

    async def stop(self) -> str:
        """Ends the server and whatever still talks to it; why that failed, or nothing."""
        try:
            await asyncio.to_thread(self.server.stop)
        except EngineError as error:
            return str(error)
        if self.loading:
            await asyncio.wait([self.loading])
        return ""

    def give_up(self, why: str) -> None:
        self.tell(GIVEN_UP, why)
        left = self.config.layout.engines - sum(e.status == GIVEN_UP for e in self.state.engines(self.config.layout.engines).values())
        if left < self.faults.min_engines:
            raise EngineError(
                f"engine {self.index} failed after {len(self.restarts)} restarts within an hour or in a row "
                f"(faults.restarts_per_hour={self.faults.restarts_per_hour}), and {left} engines are fewer than "
                f"faults.min_engines={self.faults.min_engines}: {why}"
            )

    async def trouble(self) -> str:
        """What is wrong with the server, as soon as something is."""
        while not self.failed:
            if death := self.server.death():
                return death
            self.memory_gb = self.server.memory_gb()
            if 0 < self.faults.engine_memory_gb < self.memory_gb:
                limit = self.faults.engine_memory_gb
                return f"engine {self.index} takes {self.memory_gb:.1f} GiB, above faults.engine_memory_gb={limit:g}"
            doubts = self.state.doubts(self.index)
            quiet = time.monotonic() - self.server.heard > self.faults.probe_every
            if doubts > self.doubts:
                self.tell(SUSPECT)
            if doubts > self.doubts or quiet:
                if why := await self.probe():
                    return why
                self.doubts = doubts
                self.tell(SERVING)
            await asyncio.sleep(LOOK)
        return self.failed

    async def probe(self) -> str:
        """Asks the server for one token; why it is not well, or nothing. A server that is silent for faults.probe_timeout
        is stuck, one that answers wrongly is asked again. Tokens of other requests are signs of life too, and the time of
        weight updates does not count."""
        why = ""
        for _ in range(PROBES):
            silent, looked, heard = 0.0, time.monotonic(), self.server.heard
            probe = asyncio.create_task(self.server.generate([0], [Draft()], Sampling(1.0, 1)))
            try:
                while not (await asyncio.wait([probe], timeout=LOOK))[0]:
                    if self.failed:  # it did not take a publication; the next must not pass for a sign of life
                        return self.failed
                    if death := self.server.death():
                        return death
                    since, looked = looked, time.monotonic()
                    if self.server.heard > heard:
                        silent, heard = 0.0, self.server.heard
                    elif not self.loading or self.loading.done():
                        silent += looked - since
                    if silent > self.faults.probe_timeout:
                        limit = self.faults.probe_timeout
                        return self.server.last_words(f"gave no token within faults.probe_timeout={limit:g} s")
                probe.result()
                return ""
            except EngineError as error:
                why = str(error)
            finally:
                probe.cancel()
            await asyncio.sleep(1.0)
        return why

    # -- weights

    async def receive(self, announced: int, plan: list[list[sync.Slot]]) -> None:
        """Takes part in the next publication that this rank has not taken, up to the announced one, whatever state the server
        is in, and begins to load it where it serves. Raises WrongWeights where it is none of those."""
        if self.loading:
            await asyncio.wait([self.loading])  # it still reads the copy; its calls have a deadline
        async with self.copying:
            version = await asyncio.to_thread(sync.receive_version, announced, self.ranks)
            if not self.copy_version < version <= announced:
                raise WrongWeights(
                    f"engine {self.index}: version {version} came, where {self.copy_version} is here and {announced} is announced"
                )
            if not self.copy:
                self.plan = plan
                sync.bucket_buffers(plan, self.ranks)
                self.copy = [torch.empty(sync.bucket_nbytes(bucket), dtype=torch.uint8) for bucket in plan]
            arrived: asyncio.Queue[int] = asyncio.Queue()
            if self.status in (SERVING, SUSPECT) and not self.failed:
                self.loading = asyncio.create_task(self.load_published(version, arrived))
            for i, flat in enumerate(self.copy):
                await asyncio.to_thread(sync.receive_bucket, flat, version, self.ranks)
                arrived.put_nowait(i)
            self.copy_version = version

    async def load_published(self, version: int, arrived: asyncio.Queue) -> None:
        first = self.server.version < 0 and not faults.has_moved(self.config.run.dir)
        try:
            await self.load(version, arrived, self.config.sync.verify)
            self.tell(self.status)
        except WrongWeights:
            raise
        except EngineError as error:
            if first and isinstance(error, Refused):  # no fault: the engine and the policy do not fit
                raise
            self.failed = str(error)

    async def catch_up(self) -> None:
        """Gives a new server the current weights, bitwise, and lets it serve."""
        async with self.copying:
            if self.copy_version >= 0:
                arrived: asyncio.Queue[int] = asyncio.Queue()
                for i in range(len(self.plan)):
                    arrived.put_nowait(i)
                await self.load(self.copy_version, arrived, verify=True)
            self.tell(SERVING)

    async def load(self, version: int, arrived: asyncio.Queue, verify: bool) -> None:
        """Loads the copy into the server, each bucket once its number is in `arrived`, while the next ones travel.

        Running requests keep their tokens and their KV, and go on under the new version. Raises EngineError, also where the
        server takes more than faults.probe_timeout over all of it: the next publication waits for that.
        """
        left = self.faults.probe_timeout

        async def tell(path: str, body: dict) -> None:
            nonlocal left
            began = time.monotonic()
            await self.server.post(path, body, max(left, 0.01))  # aiohttp takes 0 for no limit
            left -= time.monotonic() - began

        for i, bucket in enumerate(self.plan):
            await arrived.get()
            if i == 0:
                paused_at = time.monotonic()
                await tell("/pause_generation", {"mode": "in_place"})
                self.server.version = version  # whatever is asked for from now on runs under it
                await tell("/begin_weight_update", {})
            body = {
                "serialized_named_tensors": await asyncio.to_thread(share_bucket, self.copy[i], i, bucket, self.ranks),
                "load_format": "flattened_bucket",
                "flush_cache": False,  # a busy engine refuses to flush; extra_key keeps versions apart instead
                "weight_version": str(version),
            }
            await tell("/update_weights_from_tensor", body)
        await tell("/end_weight_update", {})
        if verify:
            published = {}
            for flat, bucket in zip(self.copy, self.plan):
                published |= sync.unpack(flat, bucket)
            await self.verify(published, max(left, 0.01))
        await tell("/continue_generation", {"torch_empty_cache": False})
        self.pause = time.monotonic() - paused_at

    async def verify(self, published: dict[str, torch.Tensor], patience: float) -> None:
        """Compares every parameter of the server with what was published, by the names of the HF checkpoint, bitwise (by
        SHA-256), once it has answered within `patience` seconds. Raises WrongWeights, and EngineError."""
        answer = await self.server.post("/weights_checker", {"action": "checksum"}, patience)
        size = self.config.layout.engine_tp
        try:
            held = {rank["parallelism_info"][0]["tp_rank"]: rank["checksums"] for rank in answer["ranks"]}
        except (KeyError, IndexError, TypeError) as error:
            raise self.server.blame(f"answered /weights_checker with {answer!r:.200}") from error
        if sorted(held) != list(range(size)):
            raise self.server.blame(f"answered /weights_checker for the tensor-parallel ranks {list(held)} of {size}")
        for rank in range(size):
            expected = await asyncio.to_thread(sync.engine_checksums, published, self.kv_heads, rank, size)
            mine = held.get(rank, {})
            wrong = sorted(name for name in mine.keys() | expected.keys() if mine.get(name) != expected.get(name))
            if wrong:
                where = f"engine {self.index}" + f", tensor-parallel rank {rank}" * (size > 1)
                raise WrongWeights(f"{where}: {len(wrong)} of {len(expected)} parameters differ from the learner's: {wrong[:5]}")

    async def release_lenders(self) -> None:
        """The end of the run for the other ranks of this engine."""
        if self.loading:
            await asyncio.wait([self.loading])
        await asyncio.to_thread(command, -1, self.ranks)

    def describe(self) -> dict:
        """The state of the engine, for whoever has to find out why a run stands still."""
        return {
            "engine": self.index, "status": self.status, "version": self.server.version, "copy": self.copy_version,
            "loading": bool(self.loading and not self.loading.done()), "failed": first_line(self.failed),
            "silent_s": round(time.monotonic() - self.server.heard, 1), "restarts": self.restarted,
            "alive": self.server.process is not None and not self.server.death(), "memory_gb": round(self.memory_gb, 2),
        }  # fmt: skip


def first_line(text: str) -> str:
    """Without a server's last lines."""
    return text.partition("\n")[0].partition("; the last lines of")[0][:300]


# ------------------------------------------------------------------------- how a bucket gets from the rank to its server


def share_bucket(flat: torch.Tensor, i: int, bucket: list[sync.Slot], ranks: sync.Ranks) -> list[str]:
    """Puts bucket `i` where the server can map it, on every tensor-parallel rank of the engine; the payloads for
    /update_weights_from_tensor, one per rank. Called by the rank that hosts the server."""
    command(i, ranks)
    staged = sync.staging(ranks, bucket)
    staged.copy_(flat)
    return share_staged(staged, bucket, ranks)


def share_staged(staged: torch.Tensor, bucket: list[sync.Slot], ranks: sync.Ranks) -> Optional[list[str]]:
    if ranks.tp is None:
        return [serialize(staged, bucket)]
    host = dist.get_global_rank(ranks.tp, 0)
    dist.broadcast(staged, host, ranks.tp)
    gathered = [None] * dist.get_world_size(ranks.tp) if ranks.role.tp == 0 else None
    dist.gather_object(serialize(staged, bucket), gathered, dst=host, group=ranks.tp)
    return gathered


def command(i: int, ranks: sync.Ranks) -> int:
    """What the rank that hosts a server tells the others of its engine: the number of the bucket that comes next, or -1 at
    the end of the run."""
    told = torch.tensor(i)
    if ranks.tp is not None:
        dist.broadcast(told, dist.get_global_rank(ranks.tp, 0), ranks.tp)
    return int(told)


def lend_device(config: Config, ranks: sync.Ranks, state: sync.RunState) -> None:
    """A further tensor-parallel rank of an engine: its GPU serves, and it passes on weights to its part of the server. It
    waits in a collective for what comes next, so it leaves it to the others to find out that the run stands still."""
    state.open()
    plan = state.plan()
    faults.Watchdog(math.inf, config.run.dir, ranks.record, lambda: {"doing": "waiting for the rank of its server"})
    sync.bucket_buffers(plan, ranks)
    while (i := command(-1, ranks)) >= 0:
        share_staged(sync.staging(ranks, plan[i]), plan[i], ranks)


def serialize(flat: torch.Tensor, bucket: list[sync.Slot]) -> str:
    """SGLang's `flattened_bucket` payload: a handle to the memory of `flat`, not a copy of it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(
            s.name, torch.Size(s.shape), getattr(torch, s.dtype), s.start, s.start + s.nbytes, s.nbytes
        )
        for s in bucket
    ]
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata}, output_str=True)


# --------------------------------------------------------------------------------------------------- all engines of a run


class Engines:
    """Whom a rank asks: its own engine, or while that one is not well another one."""

    def __init__(self, config: Config, ranks: sync.Ranks, state: sync.RunState, own: Engine):
        self.config, self.ranks, self.state, self.own = config, ranks, state, own
        self.avoided: dict[int, int] = {}  # engine -> the doubt that its rank has to answer before it is asked again
        self.retried = 0  # responses that went on elsewhere

    async def generate(self, prompt: list[int], n: int, sampling: Sampling, version: int) -> list[Response]:
        """`n` responses to one prompt, by engines that hold `version` or a later one. Where an engine fails, another one,
        or the same once it is well, goes on from the tokens that there are.

        Raises EngineError where that happens more than faults.request_retries times without a further token: the request
        itself is at fault.
        """
        drafts = [Draft() for _ in range(n)]
        failures = most = 0
        while missing := [draft for draft in drafts if not draft.finish]:
            engine = await self.choose(version)
            failed = ""
            try:
                await engine.generate(prompt, missing, sampling)
            except EngineError as error:
                failed = str(error)
            if failed := self.refuse_unpublished(missing, engine) or failed:
                tokens = sum(len(draft.ids) for draft in drafts)
                failures = 1 if tokens > most else failures + 1
                most = max(most, tokens)
                cut = [draft for draft in missing if not draft.finish]
                self.retried += len(cut)
                self.avoided[engine.index] = self.state.doubt(engine.index)
                came = sum(len(draft.ids) for draft in cut)
                self.ranks.record("retry", engine=engine.index, responses=len(cut), tokens=came, why=first_line(failed))
                if failures > self.config.faults.request_retries:
                    raise EngineError(
                        f"a request of {len(prompt)} prompt tokens failed {failures} times in a row "
                        f"(faults.request_retries={self.config.faults.request_retries}), the last time because {failed}"
                    )
                version = max([version, *(v for draft in drafts for v in draft.versions[-1:])])
                if failures > 1:  # the first time it is rather the engine's fault, and another one may go on at once
                    await asyncio.sleep(min(60.0, self.config.faults.backoff * 2 ** (failures - 2)))
        return [draft.response() for draft in drafts]

    def refuse_unpublished(self, drafts: list[Draft], engine: Peer) -> str:
        """Forgets what a request has brought under versions that nobody has published; why, or nothing."""
        announced = self.state.read().version
        odd = [draft for draft in drafts if any(not 0 <= v <= announced for v in draft.versions[draft.begun :])]
        if not odd:
            return ""
        versions = sorted({v for draft in odd for v in draft.versions[draft.begun :]})
        for draft in odd:
            draft.forget()
        return str(engine.blame(f"answered /generate with weight versions {versions[:10]}, the newest is {announced}"))

    async def choose(self, version: int) -> Peer:
        """An engine whose breaker is closed and that holds `version` or a later one; waits for one where there is none."""
        while True:
            own = self.own
            if own.status == SERVING and own.server.version >= version and self.trusts(own.index, own.doubts):
                return own.server
            others = [
                (i, engine)
                for i, engine in self.state.engines(self.config.layout.engines).items()
                if i != own.index and engine.status == SERVING and engine.version >= version and self.trusts(i, engine.doubts)
            ]
            if others:
                i, engine = random.choice(others)
                peer = Peer(self.config, i, own.server.stop_ids, engine.url, engine.version)
                peer.http = own.server.http
                return peer
            await asyncio.sleep(LOOK)

    def trusts(self, engine: int, answered: int) -> bool:
        return answered >= self.avoided.get(engine, 0)
