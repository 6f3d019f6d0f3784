"""The engines: SGLang servers that are watched, started again, and asked for responses.

    Draft     a response under way: what has come of it, so that another engine can go on from there
    Peer      an engine as any rank asks it, over HTTP
    Server    the peer whose process this rank has started
    Engine    the server under supervision: probes, restarts, weights and a copy of them for the server that comes after it
    Engines   all engines of the run, as one rank asks them: whom, and what becomes of a request that fails

A server is a child process behind HTTP, not an in-process engine, so that it can die and be started again without taking
the rank and its process group along. Whoever has a reason to doubt an engine says so in the run's store; its rank then
opens its breaker (nobody asks it), probes it, and closes the breaker or starts it again.
"""

import asyncio
import base64
import binascii
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional

import aiohttp
import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist

import sync
from configs.schema import Config
from routing import Routing

LOOK = 0.2  # seconds between looks at a server
PROBES = 3  # wrong answers to a probe, in a row, until a server is started again
HOUR = 3600.0
STOP_S = 20.0  # seconds that the kernel may take to end a killed server

stop_signals: list[str] = []  # names of the signals that this process has received; train.main fills it


class EngineError(RuntimeError):
    """An SGLang server did not start, died, or answered with something else than it was asked for."""


class WrongWeights(EngineError):
    """An engine does not hold what the learner published. Nothing mends that: the run stops."""


# ------------------------------------------------------------------------------------------------------------ a response


@dataclass(frozen=True)
class Sampling:
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    mask_replay: bool = False
    routing: Optional[Routing] = None  # routing replay


@dataclass
class Response:
    ids: np.ndarray  # [R] int32, the stop token included
    logp: np.ndarray  # [R] float32, of the distribution that was sampled from
    versions: np.ndarray  # [R] int32
    finish: str  # stop | length
    prompt_tokens: int
    cached_tokens: int
    kept_counts: Optional[np.ndarray] = None  # [R] uint16
    kept_ids: Optional[np.ndarray] = None  # [sum of kept_counts] int32
    experts: Optional[np.ndarray] = None  # [prompt + R - 1, layers, top_k] uint8 or uint16


def version_number(name: str) -> int:
    """The version that a server calls by this name; -1 for the weights that it was started with."""
    return -1 if name == "default" else int(name)


@dataclass
class Draft:
    """A response under way, as it is streamed in.

    The versions of a finished request's tokens are exact: its last answer has them. Those of a request that an engine's
    death cut short are what its answers had said until then: exact at the end of each, and in between the older of two
    versions where a publication fell into it (at most rollout.stream_interval - 1 tokens).
    """

    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)  # mask replay: the ids that the sampler kept for each token
    finish: str = ""  # stop | length, once it is finished
    begun: int = 0  # tokens that it had when the request under way began
    prompt_tokens: int = 0
    cached_tokens: int = 0
    experts: Optional[np.ndarray] = None

    def begin(self, sampling: Sampling) -> None:
        """Another request goes on from the tokens that are here."""
        if sampling.routing:  # experts come with the last answer only: those of the tokens here are lost
            self.ids, self.logp, self.versions, self.kept = [], [], [], []
        self.begun = len(self.ids)

    def add(self, answer: dict, sampling: Sampling) -> None:
        """Takes in the next answer of the request, checked. Raises EngineError where its parts do not fit together, and
        KeyError, TypeError or ValueError where it is something else altogether; nothing of it is kept then."""
        meta, ids = answer["meta_info"], answer["output_ids"]
        total = len(self.ids) + len(ids)
        finish = meta["finish_reason"]["type"] if meta["finish_reason"] else ""
        if finish not in ("", "stop", "length") or total > sampling.max_tokens or finish and not total:
            reason = meta["finish_reason"] and meta["finish_reason"].get("message", "")
            raise EngineError(f"response of {total} tokens (limit {sampling.max_tokens}) finished with {finish!r} {reason}")
        triples = meta["output_token_logprobs"]
        if [t[1] for t in triples] != ids:
            raise EngineError(f"{len(triples)} logprobs do not belong to the {len(ids)} tokens of a response")
        logp, kept = [t[0] for t in triples], []
        if sampling.mask_replay:
            kept, logp = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
            if not len(kept) == len(logp) == len(ids) or not all(i in k for i, k in zip(ids, kept)):
                raise EngineError("the sampler's kept ids do not contain the tokens that it sampled")
        now = version_number(meta["weight_version"])
        before = self.versions[-1] if len(self.versions) > self.begun else now
        versions = self.versions + [before] * (len(ids) - 1) + [now] * bool(ids)
        experts = None
        if finish:
            spans, n = meta["weight_versions"], total - self.begun
            exact = [version_number(s["version"]) for s in spans for _ in range(s["start"], s["end"])]
            if len(exact) != n or [s["start"] for s in spans] != [0, *(s["end"] for s in spans[:-1])]:
                raise EngineError(f"weight versions {spans} do not cover the {n} tokens of a response")
            versions[self.begun :] = exact
            if sampling.routing:
                experts = parse_experts(meta, meta["prompt_tokens"] + total - 1, sampling.routing)
        if not self.begun:  # of a request that goes on, the prompt holds tokens of the response
            self.prompt_tokens, self.cached_tokens = meta["prompt_tokens"], meta["cached_tokens"]
        self.ids, self.logp, self.kept = self.ids + ids, self.logp + logp, self.kept + kept
        self.versions, self.finish, self.experts = versions, finish, experts

    def response(self) -> Response:
        """The finished response. Raises EngineError where a token comes from no published version."""
        if min(self.versions) < 0:
            raise EngineError(f"weight versions {self.versions} of a response: not all of them were published")
        counts = ids = None
        if self.kept:
            counts = np.array([len(k) for k in self.kept], dtype=np.uint16)
            ids = np.array([i for k in self.kept for i in sorted(k)], dtype=np.int32)
        return Response(
            np.array(self.ids, dtype=np.int32), np.array(self.logp, dtype=np.float32),
            np.array(self.versions, dtype=np.int32), self.finish, self.prompt_tokens, self.cached_tokens, counts, ids,
            self.experts,
        )  # fmt: skip


def parse_experts(meta: dict, tokens: int, model: Routing) -> np.ndarray:
    """The experts that each of `tokens` tokens went to, [tokens, layers, top_k]. Raises EngineError where they are not
    what the model can choose."""
    try:
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), dtype=np.int32)
        experts = flat.reshape(tokens, model.layers, model.top_k)
        model.check(experts, tokens)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise EngineError(f"the routed experts of {tokens} tokens are not usable: {error!r}") from error
    return experts.astype(model.dtype)


# ------------------------------------------------------------------------------------------------------------ one server


class Peer:
    """An engine as any rank asks it."""

    def __init__(self, config: Config, index: int, stop_ids: list[int], url: str = "", version: int = -1):
        self.config = config
        self.index = index
        self.stop_ids = stop_ids
        self.url = url
        self.version = version  # of the weights that it holds
        self.http: Optional[aiohttp.ClientSession] = None
        self.heard = time.monotonic()  # when it last gave a sign of life

    def blame(self, what: str) -> EngineError:
        return EngineError(f"engine {self.index} {what}")

    async def generate(self, prompt: list[int], drafts: list[Draft], sampling: Sampling) -> None:
        """Goes on with unfinished responses to one prompt, in one request, until all are finished.

        Raises EngineError; the drafts then hold what has come until then. The prefix cache is keyed by the version of
        the weights.
        """
        for draft in drafts:
            draft.begin(sampling)
        limits = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": self.stop_ids,
        }
        body = {
            "input_ids": [prompt + draft.ids for draft in drafts],
            "sampling_params": [limits | {"max_new_tokens": sampling.max_tokens - len(draft.ids)} for draft in drafts],
            "return_logprob": True,
            "return_sampling_mask": sampling.mask_replay,
            "return_routed_experts": sampling.routing is not None,
            "extra_key": str(self.version),
            "stream": True,
        }
        try:
            async for answer in self.stream("/generate", body):
                self.heard = time.monotonic()
                if "error" in answer:
                    raise self.blame(f"answered /generate with an error: {str(answer['error'])[:500]}")
                drafts[answer["index"]].add(answer, sampling)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.blame(f"answered /generate with what is no response: {error!r:.300}") from error
        if cut := sum(not draft.finish for draft in drafts):
            raise self.blame(f"ended /generate with {cut} of {len(drafts)} responses unfinished")

    async def stream(self, path: str, body: dict) -> AsyncIterator[dict]:
        """The server-sent answers to one request. Raises EngineError, and ValueError where one is no JSON."""
        patience = aiohttp.ClientTimeout(total=None, sock_read=self.config.faults.request_timeout)
        try:
            async with self.http.post(self.url + path, json=body, timeout=patience) as reply:
                if reply.status != 200:
                    raise self.blame(f"answered {path} with status {reply.status}: {(await reply.content.read(500))!r}")
                parts: list[bytes] = []
                async for piece in reply.content.iter_any():
                    ended, *more = piece.split(b"\n")
                    parts.append(ended)
                    for next_line in more:
                        line = b"".join(parts)
                        parts = [next_line]
                        if line.startswith(b"data: ") and line != b"data: [DONE]":
                            yield msgspec.json.decode(line[6:])
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self.blame(f"did not answer {path} ({error!r})") from error

    async def post(self, path: str, body: dict) -> dict:
        """A control call, answered within faults.probe_timeout. SGLang reports a refusal with status 200 or 400 and
        `success: false`: both are errors here."""
        patience = aiohttp.ClientTimeout(self.config.faults.probe_timeout)
        try:
            async with self.http.post(self.url + path, json=body, timeout=patience) as reply:
                text = await reply.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self.blame(f"did not answer {path} ({error!r})") from error
        if reply.status != 200:
            raise self.blame(f"answered {path} with status {reply.status}: {text[:500]}")
        try:
            answer = msgspec.json.decode(text) if text.startswith(("{", "[")) else {}
        except ValueError as error:
            raise self.blame(f"answered {path} with {text[:200]!r}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise self.blame(f"refused {path}: {text[:500]}")
        self.heard = time.monotonic()
        return answer


class Server(Peer):
    """An SGLang process of this rank, which may be started again after it was stopped."""

    def __init__(self, config: Config, model_path: str, index: int, stop_ids: list[int], log_path: str):
        super().__init__(config, index, stop_ids)
        self.model_path = model_path
        self.log_path = log_path
        self.process: Optional[subprocess.Popen] = None
        self.workers: list[psutil.Process] = []

    def command(self, host: str, port: int, base_gpu: int) -> list[str]:
        """The command line; `engine.args` of the config goes last and so wins over every default here."""
        config = self.config
        args = {
            "model_path": os.path.abspath(self.model_path) if os.path.isdir(self.model_path) else self.model_path,
            "host": host,
            "port": port,
            "dtype": config.model.dtype,
            "tp_size": config.layout.engine_tp,
            "random_seed": (config.run.seed * 1000 + self.index) * 1000 + self.starts,
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "log_level": "warning",
            "incremental_streaming_output": True,  # each answer has the new tokens alone
            "stream_interval": config.rollout.stream_interval,
        }
        if config.model.context_length:
            args["context_length"] = config.model.context_length
        if config.rollout.mask_replay:
            args["sampling_backend"] = "pytorch"
        if config.rollout.routing_replay:
            args["enable_return_routed_experts"] = True
        if torch.cuda.is_available():
            args["base_gpu_id"] = base_gpu
        else:
            args |= {
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "disable_overlap_schedule": True,
                "sleep_on_idle": True,  # an idle scheduler would spin on a core that the learner needs
                "max_total_tokens": 65536,
                # With the line above this bounds nothing but what other processes may take while the model loads.
                "mem_fraction_static": 0.9,
            }
        line = [sys.executable, "-m", "sglang.launch_server"]
        for name, value in (args | config.engine.args).items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                line.append(flag)
            elif value is not False and value is not None:
                line += [flag, str(value)]
        return line

    starts = 0  # of this server so far; a restarted one must not sample the same numbers again

    async def start(self, host: str = "127.0.0.1", base_gpu: int = 0) -> None:
        """Starts the server and returns when it generates. Raises EngineError with the server's last lines."""
        if self.http is None:
            # The server closes connections that were idle for 5 s; one that is about to be closed must not be used again.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self.http = aiohttp.ClientSession(connector=connector)
        # The server must not believe that it is a rank of this job.
        ours = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "OMP_NUM_THREADS")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env["OMP_NUM_THREADS"] = str(threads(self.config))
        self.version = -1
        self.held = hold_port(host)
        port = self.held.getsockname()[1]
        self.url = f"http://{host}:{port}"
        self.log = open(self.log_path, "ab")
        self.process = subprocess.Popen(
            GUARD + self.command(host, port, base_gpu),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=os.path.dirname(self.log_path),  # not the repository: its module names must not shadow SGLang's
            start_new_session=True,
            preexec_fn=lambda: parent_death_signal(signal.SIGTERM),
        )
        self.starts += 1
        deadline = time.monotonic() + self.config.faults.start_timeout
        while True:
            if death := self.death():
                raise EngineError(death)
            if stop_signals:
                raise EngineError(f"engine {self.index}: {stop_signals[0]} came while it started")
            if time.monotonic() > deadline:
                limit = self.config.faults.start_timeout
                raise self.blame(f"was not up after faults.start_timeout={limit:g} s")
            try:
                async with self.http.get(self.url + "/health_generate", timeout=aiohttp.ClientTimeout(30)) as reply:
                    if reply.status == 200:
                        break
            except (aiohttp.ClientError, asyncio.TimeoutError):
                pass  # not listening yet
            await asyncio.sleep(0.5)
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.workers = [p for p in family if p.ppid() == self.process.pid or p.name().startswith("sglang::")]
        self.heard = time.monotonic()

    def death(self) -> str:
        """Why the server is not alive, with its last lines; empty while it is."""
        if (code := self.process.poll()) is not None:
            return self.last_words(f"ended with exit code {code}")
        for worker in self.workers:  # SGLang notices the death of one too, seconds later
            try:
                if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
                    continue
            except psutil.NoSuchProcess:
                pass
            return self.last_words(f"lost its process {worker.pid}")
        return ""

    def memory_gb(self) -> float:
        """Resident memory of the server's processes; what they share counts for each."""
        total = 0
        for worker in self.workers:
            try:
                total += worker.memory_info().rss
            except psutil.NoSuchProcess:
                pass
        return total / (1 << 30)

    def blame(self, what: str) -> EngineError:
        return EngineError(self.last_words(what))

    def last_words(self, what: str, lines: int = 15) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(max(0, os.path.getsize(self.log_path) - 20000))
            tail = log.read().decode(errors="replace").splitlines()[-lines:]
        return f"engine {self.index} {what}; the last lines of {self.log_path}:\n" + "\n".join("    " + t for t in tail)

    def stop(self) -> None:
        """Ends the server and everything that it started."""
        process, self.process = self.process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)  # not SIGTERM: a stopped process would not take it
        except ProcessLookupError:
            pass  # nothing of it was left
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise self.blame(f"is still there {STOP_S:g} s after it was killed") from error
        self.held.close()
        self.log.close()


# The server runs under a shell that leads its process group and ends the whole of it on SIGTERM, which the kernel sends
# when the rank dies. SGLang's children ask the kernel to die with their parent, but only once they are up: one that is
# still importing when the server is killed would stay behind and hold the GPU.
GUARD = ["sh", "-c", 'trap "kill -9 0" TERM; "$@" & wait $!', "sh"]


def threads(config: Config) -> int:
    """CPU threads of one learner rank or one engine server."""
    return config.layout.threads or max(1, os.cpu_count() // config.world_size)


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket that is bound to a free port and never listens. While it lives nobody who asks for any port gets this one,
    and a server that names the port may still listen on it: engines come up in minutes, and several at once."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def parent_death_signal(number: int) -> None:
    """The kernel sends `number` to this process when the parent dies, however it dies."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


# ----------------------------------------------------------------------------------------- the server under supervision

SERVING = "serving"  # its breaker is closed: anyone may ask it
SUSPECT = "suspect"  # its breaker is open until a probe has succeeded
DOWN = "down"  # it is being started again
GIVEN_UP = "given up"


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
        self.status = DOWN
        self.doubts = 0  # of all ranks together that a probe has answered
        self.failed = ""  # why the server must be started again, where that is known already
        self.restarts: deque[float] = deque(maxlen=config.faults.restarts_per_hour or 1)  # when
        self.restarted = 0  # times in all
        self.memory_gb = 0.0
        self.pause = 0.0  # seconds that generation stood still in the last publication
        # What the server must hold, bucket by bucket, in the memory of this rank: a server that is started again gets it
        # from here, so that nobody has to wait for it.
        self.copy: list[torch.Tensor] = []
        self.copy_version = -1
        self.copying = asyncio.Lock()  # the copy is being overwritten, or read by a server that catches up
        self.loading: Optional[asyncio.Task] = None

    async def start(self) -> None:
        """The first start; a server that does not come up is a mistake, not a fault. Raises EngineError."""
        await self.launch()
        self.tell(SERVING)

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
        self.status = status
        known = sync.EngineRecord(status, self.server.url, self.server.version, self.doubts)
        self.state.tell_engine(self.index, known)

    # -- supervision

    async def supervise(self) -> None:
        """Keeps the server serving until it is given up. Raises EngineError where the run cannot go on without it, and
        WrongWeights."""
        while True:
            why = await self.trouble()
            self.tell(DOWN, why)
            self.ranks.record("engine_down", engine=self.index, why=why)
            print(f"engine {self.index} is started again: {first_line(why)}", file=sys.stderr, flush=True)
            self.failed = await self.stop()
            now = time.monotonic()
            recent = [t for t in self.restarts if now - t < HOUR]
            if len(recent) >= self.faults.restarts_per_hour:
                return self.give_up(why)
            await asyncio.sleep(min(60.0, self.faults.backoff * 2 ** len(recent)))
            self.restarts.append(time.monotonic())
            self.restarted += 1
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
                f"engine {self.index} failed after {len(self.restarts)} restarts within an hour "
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
        is stuck, one that answers wrongly is asked again. Tokens of other requests are signs of life too, and a weight
        update may take its own time."""
        why = ""
        for _ in range(PROBES):
            asked = time.monotonic()
            probe = asyncio.create_task(self.server.generate([0], [Draft()], Sampling(1.0, 1)))
            try:
                while not (await asyncio.wait([probe], timeout=LOOK))[0]:
                    if self.loading and not self.loading.done():
                        asked = time.monotonic()
                    if death := self.server.death():
                        return death
                    if time.monotonic() - max(asked, self.server.heard) > self.faults.probe_timeout:
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

    async def receive(self, version: int, plan: list[list[sync.Slot]]) -> None:
        """Takes part in a publication, whatever state the server is in, and begins to load it where it serves."""
        if self.loading:
            await asyncio.wait([self.loading])  # it still reads the copy; each of its calls has a deadline
        async with self.copying:
            if not self.copy:
                self.plan = plan
                sync.bucket_buffers(plan, self.ranks)
                self.copy = [torch.empty(sync.bucket_nbytes(bucket), dtype=torch.uint8) for bucket in plan]
            arrived: asyncio.Queue[int] = asyncio.Queue()
            if self.status in (SERVING, SUSPECT):
                self.loading = asyncio.create_task(self.load_published(version, arrived))
            for i, flat in enumerate(self.copy):
                await asyncio.to_thread(sync.receive_bucket, flat, self.ranks)
                arrived.put_nowait(i)
            self.copy_version = version

    async def load_published(self, version: int, arrived: asyncio.Queue) -> None:
        first = self.server.version < 0
        try:
            await self.load(version, arrived, self.config.sync.verify)
            self.tell(self.status)
        except WrongWeights:
            raise
        except EngineError as error:
            if first:  # an engine that never held the policy: this is no fault, the two do not fit
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

        Running requests keep their tokens and their KV, and go on under the new version. Raises EngineError.
        """
        for i, bucket in enumerate(self.plan):
            await arrived.get()
            if i == 0:
                paused_at = time.monotonic()
                await self.server.post("/pause_generation", {"mode": "in_place"})
                self.server.version = version  # whatever is asked for from now on runs under it
                await self.server.post("/begin_weight_update", {})
            body = {
                "serialized_named_tensors": await asyncio.to_thread(share_bucket, self.copy[i], i, bucket, self.ranks),
                "load_format": "flattened_bucket",
                "flush_cache": False,  # a busy engine refuses to flush; extra_key keeps versions apart instead
                "weight_version": str(version),
            }
            await self.server.post("/update_weights_from_tensor", body)
        await self.server.post("/end_weight_update", {})
        if verify:
            published = {}
            for flat, bucket in zip(self.copy, self.plan):
                published |= sync.unpack(flat, bucket)
            await self.verify(published)
        await self.server.post("/continue_generation", {"torch_empty_cache": False})
        self.pause = time.monotonic() - paused_at

    async def verify(self, published: dict[str, torch.Tensor]) -> None:
        """Compares every parameter of the server with what was published, by the names of the HF checkpoint, bitwise (by
        SHA-256). Raises WrongWeights."""
        answer = await self.server.post("/weights_checker", {"action": "checksum"})
        held = {n: c for rank in answer["ranks"] for n, c in rank["checksums"].items()}
        expected = await asyncio.to_thread(sync.engine_checksums, published)
        wrong = sorted(name for name in held.keys() | expected.keys() if held.get(name) != expected.get(name))
        if wrong:
            raise WrongWeights(
                f"engine {self.index}: {len(wrong)} of {len(expected)} parameters differ from the learner's: {wrong[:5]}"
            )

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
    return text.partition("\n")[0][:300]


# ------------------------------------------------------------------------- how a bucket gets from the rank to its server


def share_bucket(flat: torch.Tensor, i: int, bucket: list[sync.Slot], ranks: sync.Ranks) -> list[str]:
    """Puts bucket `i` where the server can map it, on every tensor-parallel rank of the engine; the payloads for
    /update_weights_from_tensor, one per rank. Called by the rank that hosts the server."""
    command(i, ranks)
    staged = sync.staging(ranks, bucket)
    staged.copy_(flat)
    return share_staged(staged, bucket, ranks)


def share_staged(staged: torch.Tensor, bucket: list[sync.Slot], ranks: sync.Ranks) -> Optional[list[str]]:
    if (size := dist.get_world_size(ranks.tp)) == 1:
        return [serialize(staged, bucket)]
    host = dist.get_global_rank(ranks.tp, 0)
    dist.broadcast(staged, host, ranks.tp)
    gathered = [None] * size if ranks.role.tp == 0 else None
    dist.gather_object(serialize(staged, bucket), gathered, dst=host, group=ranks.tp)
    return gathered


def command(i: int, ranks: sync.Ranks) -> int:
    """What the rank that hosts a server tells the others of its engine: the number of the bucket that comes next, or -1 at
    the end of the run."""
    told = torch.tensor(i)
    if dist.get_world_size(ranks.tp) > 1:
        dist.broadcast(told, dist.get_global_rank(ranks.tp, 0), ranks.tp)
    return int(told)


def lend_device(ranks: sync.Ranks, state: sync.RunState) -> None:
    """A further tensor-parallel rank of an engine: its GPU serves, and it passes on weights to its part of the server."""
    state.open()
    plan = state.plan()
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

        Raises EngineError where that happens more than faults.request_retries times: the request itself is at fault.
        """
        drafts = [Draft() for _ in range(n)]
        failures = 0
        while missing := [draft for draft in drafts if not draft.finish]:
            engine = await self.choose(version)
            try:
                await engine.generate(prompt, missing, sampling)
            except EngineError as error:
                failures += 1
                cut = [draft for draft in missing if not draft.finish]
                self.retried += len(cut)
                self.avoided[engine.index] = self.state.doubt(engine.index)
                tokens = sum(len(draft.ids) for draft in cut)
                why = first_line(str(error))
                self.ranks.record("retry", engine=engine.index, responses=len(cut), tokens=tokens, why=why)
                if failures > self.config.faults.request_retries:
                    raise EngineError(
                        f"a request of {len(prompt)} prompt tokens failed {failures} times "
                        f"(faults.request_retries={self.config.faults.request_retries}), the last time because {error}"
                    ) from error
                version = max([version, *(v for draft in drafts for v in draft.versions[-1:])])
        return [draft.response() for draft in drafts]

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
