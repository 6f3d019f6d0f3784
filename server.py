"""One SGLang server: its process, the questions that it is asked, and what it answers.

    Draft    a response under way: what has come of it, so that another engine can go on from there
    Peer     an engine as any rank asks it, over HTTP
    Server   the peer whose process this rank has started

A server is a child process behind HTTP, not an in-process engine, so that it can die and be started again without taking
the rank and its process group along. engine.py decides when.
"""

import asyncio
import base64
import binascii
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import AsyncIterator, Iterator, Optional

import aiohttp
import msgspec
import numpy as np
import psutil
import torch

from configs.schema import Config
from routing import Routing

STOP_S = 20.0  # seconds that the kernel may take to end a killed server

stop_signals: list[str] = []  # names of the signals that this process has received; train.main fills it


class EngineError(RuntimeError):
    """An SGLang server did not start, died, or answered with something else than it was asked for."""


class Refused(EngineError):
    """A server answered that it does not do what it was asked for."""


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
    vocab_size: int = 1 << 31  # a token id is below it


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
    """The version that a server calls by this name; -1 for the weights that it was started with. Raises
    ValueError and, where that is no string, TypeError."""
    version = -1 if name == "default" else int(name, base=10)
    if version not in range(-1, 1 << 31):
        raise ValueError(f"weight version {name!r:.50}")
    return version


def are_tokens(ids: list, vocab_size: int) -> bool:
    return all(type(i) is int and 0 <= i < vocab_size for i in ids)


def are_logprobs(values: list) -> bool:
    """Rounding may lift the logprob of a certain token a little above 0."""
    return all(type(x) in (int, float) and -1e30 < x <= 1e-4 for x in values)


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

    def add(self, answer: dict, sampling: Sampling, stop_ids: list[int]) -> None:
        """Takes in the next answer of the request, checked. Raises EngineError where its parts do not fit together, and
        KeyError, TypeError or ValueError where it is something else altogether; nothing of it is kept then."""
        meta, ids = answer["meta_info"], answer["output_ids"]
        total = len(self.ids) + len(ids)
        finish = meta["finish_reason"]["type"] if meta["finish_reason"] else ""
        if finish not in ("", "stop", "length") or total > sampling.max_tokens or finish and not total:
            reason = meta["finish_reason"] and meta["finish_reason"].get("message", "")
            raise EngineError(f"response of {total} tokens (limit {sampling.max_tokens}) finished with {finish!r} {reason}")
        triples = meta["output_token_logprobs"]
        if [t[1] for t in triples] != ids or not are_tokens(ids, sampling.vocab_size):
            raise EngineError(f"{len(triples)} logprobs do not belong to the {len(ids)} tokens of a response: {ids!r:.200}")
        if self.finish:
            raise EngineError(f"{len(ids)} more tokens of a response that was finished ({self.finish})")
        if early := [i for i in (ids[:-1] if finish == "stop" else ids) if i in stop_ids]:
            raise EngineError(f"a response that goes on after its stop token {early[0]}")
        if finish == "stop" and meta["finish_reason"]["matched"] != (self.ids + ids)[-1]:  # e.g. "NaN happened"
            raise EngineError(f"a response that ends in {(self.ids + ids)[-1]} and says {meta['finish_reason']!r:.200}")
        logp, kept = [t[0] for t in triples], []
        if sampling.mask_replay:
            kept, logp = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
            if not len(kept) == len(logp) == len(ids) or not all(i in k for i, k in zip(ids, kept)):
                raise EngineError("the sampler's kept ids do not contain the tokens that it sampled")
            if not all(are_tokens(k, sampling.vocab_size) and len(set(k)) == len(k) < 1 << 16 for k in kept):
                raise EngineError("the sampler's kept ids are no sets of tokens")
        if not are_logprobs(logp):
            raise EngineError(f"logprobs of a response: {logp!r:.200}")
        now = version_number(meta["weight_version"])
        before = self.versions[-1] if len(self.versions) > self.begun else now
        versions = self.versions + [before] * (len(ids) - 1) + [now] * bool(ids)
        experts = None
        if finish:
            spans, n = meta["weight_versions"], total - self.begun
            starts, ends = [s["start"] for s in spans], [s["end"] for s in spans]
            if [*starts, n] != [0, *ends] or [0, *ends] != sorted([0, *ends]):
                raise EngineError(f"weight versions {spans!r:.200} do not cover the {n} tokens of a response")
            versions[self.begun :] = [version_number(s["version"]) for s in spans for _ in range(s["start"], s["end"])]
            if sampling.routing:
                experts = parse_experts(meta, meta["prompt_tokens"] + total - 1, sampling.routing)
        counted = meta["prompt_tokens"], meta["cached_tokens"]
        if not are_tokens(counted, 1 << 31):
            raise EngineError(f"a response to {counted!r:.200} tokens")
        if not self.begun:  # of a request that goes on, the prompt holds tokens of the response
            self.prompt_tokens, self.cached_tokens = counted
        self.ids, self.logp, self.kept = self.ids + ids, self.logp + logp, self.kept + kept
        self.versions, self.finish, self.experts = versions, finish, experts

    def forget(self) -> None:
        """As if the request under way had brought nothing."""
        for values in (self.ids, self.logp, self.versions, self.kept):
            del values[self.begun :]
        self.finish, self.experts = "", None

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
        self.heard = time.monotonic()  # when it last gave a token

    def blame(self, what: str, kind: type[EngineError] = EngineError) -> EngineError:
        return kind(f"engine {self.index} {what}")

    def prefix_key(self) -> str:
        """What a request must share with another one to use its cached prefixes. A rank does not know when an engine of
        another one gets its next weights, so what it asks there shares nothing."""
        return uuid.uuid4().hex

    async def generate(self, prompt: list[int], drafts: list[Draft], sampling: Sampling) -> None:
        """Goes on with unfinished responses to one prompt, in one request, until all are finished.

        Raises EngineError; the drafts then hold what has come until then.
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
            "extra_key": self.prefix_key(),
            "stream": True,
        }
        try:
            async for answer in self.stream("/generate", body):
                if "error" in answer:
                    raise self.blame(f"answered /generate with an error: {str(answer['error'])[:500]}")
                if answer["index"] not in range(len(drafts)):
                    raise self.blame(f"answered /generate with response {answer['index']!r} of {len(drafts)}")
                told, asked = answer["meta_info"]["prompt_tokens"], len(body["input_ids"][answer["index"]])
                if told != asked:
                    raise self.blame(f"answered /generate for a prompt of {told!r:.50} tokens instead of {asked}")
                drafts[answer["index"]].add(answer, sampling, self.stop_ids)
                if answer["output_ids"]:
                    self.heard = time.monotonic()
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
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

    async def post(self, path: str, body: dict, patience: Optional[float] = None) -> dict:
        """A control call, answered within `patience` seconds (faults.probe_timeout). SGLang reports a refusal with status 200 or 400 and
        `success: false`: both are errors here."""
        limit = aiohttp.ClientTimeout(self.config.faults.probe_timeout if patience is None else patience)
        try:
            async with self.http.post(self.url + path, json=body, timeout=limit) as reply:
                text = await reply.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self.blame(f"did not answer {path} ({error!r})") from error
        if reply.status != 200:
            raise self.blame(f"answered {path} with status {reply.status}: {text[:500]}", Refused)
        try:
            answer = msgspec.json.decode(text, type=dict)
        except (ValueError, RecursionError) as error:
            raise self.blame(f"answered {path} with {text[:200]!r}") from error
        if answer.get("success") is False:
            raise self.blame(f"refused {path}: {text[:500]}", Refused)
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
        if self.config.layout.engine_tp > 1 and not torch.cuda.is_available():
            # SGLang wants a NUMA node for each tensor-parallel rank, or to be told which cores it may use.
            cores = [i % os.cpu_count() for i in range(self.config.layout.engine_tp)]
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
        self.version, self.workers = -1, []
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
            process_group=0,
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
        self.workers = list(self.lasting_children())
        self.heard = time.monotonic()

    def lasting_children(self) -> Iterator[psutil.Process]:
        """The server's processes without those that it starts for a moment."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if child.ppid() == self.process.pid or child.name().startswith("sglang::"):
                    yield child
            except psutil.NoSuchProcess:
                pass

    def death(self) -> str:
        """Why the server is not alive, with its last lines; empty while it is."""
        process = self.process  # the watchdog asks from another thread
        if process is None:
            return f"engine {self.index} has no server"
        if (code := process.poll()) is not None:
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

    def blame(self, what: str, kind: type[EngineError] = EngineError) -> EngineError:
        return kind(self.last_words(what))

    def prefix_key(self) -> str:
        return str(self.version)  # prefixes of other weights are of no use

    def last_words(self, what: str, lines: int = 15) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(max(0, os.path.getsize(self.log_path) - 20000))
            tail = log.read().decode(errors="replace").splitlines()[-lines:]
        return f"engine {self.index} {what}; the last lines of {self.log_path}:\n" + "\n".join("    " + t for t in tail)

    def stop(self) -> None:
        """Ends the server and everything that it started."""
        process = self.process
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
        self.process = None
        self.held.close()
        self.log.close()


# The server runs under a shell that leads its process group and ends the whole of it on SIGTERM, which the kernel sends
# when the rank dies. SGLang's children ask the kernel to die with their parent, but only once they are up: one that is
# still importing when the server is killed would stay behind and hold the GPU. A stopped one (SIGSTOP) is woken: the group
# is of the rank's session, so by its death it loses the last parent in there, and the kernel sends it SIGHUP and SIGCONT.
GUARD = ["sh", "-c", 'trap "kill -9 0" HUP TERM; "$@" & wait $!', "sh"]


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
