"""An engine rank: hosts one SGLang server, pulls prompts, runs rollouts, gates, grades, ships groups.

Read it from the bottom: `EngineRank.run` is the loop, `run_group` the life of one prompt (first responses, gate, full
group, gate, penalties), `Server` the supervised SGLang process with the four calls that a policy needs: start, generate,
load weights, stop.

The server is a child process behind loopback HTTP, not an in-process engine, so that it can die, or be restarted,
without taking the rank and its process group along.
"""

import asyncio
import base64
import binascii
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Optional

import aiohttp
import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

import data
import faults
import sync
from configs.schema import Config, ConfigError, Stage
from grading import GraderPool
from judge import Judge
from language import foreign_words
from rewards import language_part, length_part, merge, shape
from routing import Routing, routing_of

POLL = 0.01  # seconds between looks at the run state

stop_signals: list[str] = []  # names of the signals that this process has received; train.main fills it


class EngineError(RuntimeError):
    """The SGLang server did not start, died or refused; carries its own last lines."""


# ------------------------------------------------------------------------------------------------------------- the server


class Server:
    """One SGLang server process, its HTTP client, and the version of the weights that it holds."""

    def __init__(self, config: Config, model_path: str, index: int, stop_ids: list[int], log_path: str):
        self.config = config
        self.model_path = model_path
        self.index = index
        self.stop_ids = stop_ids
        self.log_path = log_path
        self.process: Optional[subprocess.Popen] = None
        self.http: Optional[aiohttp.ClientSession] = None
        self.version = -1

    def command(self, port: int, base_gpu: int) -> list[str]:
        """The command line; `engine.args` of the config goes last and so wins over every default here."""
        config = self.config
        args = {
            "model_path": os.path.abspath(self.model_path) if os.path.isdir(self.model_path) else self.model_path,
            "host": "127.0.0.1",
            "port": port,
            "dtype": config.model.dtype,
            "tp_size": config.layout.engine_tp,
            "random_seed": config.run.seed * 1000 + self.index,
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "log_level": "warning",
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

    async def start(self, base_gpu: int = 0) -> None:
        """Starts the server and returns when it generates. Raises EngineError with the server's last lines."""
        patience = aiohttp.ClientTimeout(total=self.config.faults.request_timeout)
        # The server closes connections that were idle for 5 s; one that is about to be closed must not be used again.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        self.http = aiohttp.ClientSession(timeout=patience, connector=connector)
        # The server must not believe that it is a rank of this job.
        ours = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "OMP_NUM_THREADS")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env["OMP_NUM_THREADS"] = str(threads(self.config))
        self.held = hold_port()
        port = self.held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = open(self.log_path, "ab")
        self.process = subprocess.Popen(
            GUARD + self.command(port, base_gpu),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=os.path.dirname(self.log_path),  # not the repository: its module names must not shadow SGLang's
            start_new_session=True,
            preexec_fn=lambda: parent_death_signal(signal.SIGTERM),
        )
        deadline = time.monotonic() + self.config.faults.start_timeout
        while True:
            self.check_alive()
            if stop_signals:
                raise EngineError(f"engine {self.index}: {stop_signals[0]} came while it started")
            if time.monotonic() > deadline:
                limit = self.config.faults.start_timeout
                raise EngineError(self.last_words(f"was not up after faults.start_timeout={limit:g} s"))
            try:
                async with self.http.get(self.url + "/health_generate", timeout=aiohttp.ClientTimeout(total=30)) as reply:
                    if reply.status == 200:
                        return
            except (aiohttp.ClientError, asyncio.TimeoutError):
                pass  # not listening yet
            await asyncio.sleep(0.5)

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise EngineError(self.last_words(f"ended with exit code {self.process.returncode}"))

    def last_words(self, what: str, lines: int = 15) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(max(0, os.path.getsize(self.log_path) - 20000))
            tail = log.read().decode(errors="replace").splitlines()[-lines:]
        return f"engine {self.index} {what}; the last lines of {self.log_path}:\n" + "\n".join("    " + t for t in tail)

    async def ask(self, path: str, body: dict) -> tuple[int, bytes]:
        """Status and content of the server's answer. Raises EngineError with its last lines if there is none."""
        try:
            async with self.http.post(self.url + path, json=body) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise EngineError(self.last_words(f"did not answer {path} ({error!r})")) from error

    async def post(self, path: str, body: dict) -> dict:
        """A control call. SGLang reports a refusal with status 200 or 400 and `success: false`: both are errors here."""
        status, content = await self.ask(path, body)
        text = content.decode()
        if status != 200:
            raise EngineError(f"engine {self.index}: {path} answered {status}: {text[:500]}")
        answer = json.loads(text) if text.startswith(("{", "[")) else {}
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"engine {self.index}: {path} refused: {text[:500]}")
        return answer

    async def generate(self, prompt: list[int], n: int, sampling: "Sampling") -> list["Response"]:
        """`n` responses to one prompt in one request. The prefix cache is keyed by the version of the weights."""
        body = {
            "input_ids": [prompt] * n,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "max_new_tokens": sampling.max_tokens,
                "stop_token_ids": self.stop_ids,
            },
            "return_logprob": True,
            "return_sampling_mask": sampling.mask_replay,
            "return_routed_experts": sampling.routing is not None,
            "extra_key": str(self.version),
        }
        status, content = await self.ask("/generate", body)
        if status != 200:
            raise EngineError(f"engine {self.index}: /generate answered {status}: {content[:500]!r}")
        answers = msgspec.json.decode(content)
        if len(answers) != n:
            raise EngineError(f"engine {self.index}: asked for {n} responses, got {len(answers)}")
        return [parse_response(answer, sampling) for answer in answers]

    async def load_weights(self, version: int, plan: list[list[sync.Slot]], ranks: sync.Ranks) -> float:
        """Receives a publication and loads it; returns the seconds that generation stood still.

        Double-buffered: while the server loads one bucket, the next one travels. Running requests keep their tokens and
        their KV, and go on under the new version.
        """
        buffers = sync.bucket_buffers(plan, ranks)
        received: dict[str, torch.Tensor] = {}
        loading = paused_at = None
        for i, bucket in enumerate(plan):
            flat = buffers[i % 2][: sync.bucket_nbytes(bucket)]
            await asyncio.to_thread(sync.receive_bucket, flat, version, ranks)
            if loading is not None:
                await loading
                await asyncio.to_thread(tp_barrier, ranks)  # the other ranks of this engine may reuse their buffer
            else:
                paused_at = time.monotonic()
                await self.post("/pause_generation", {"mode": "in_place"})
                await self.post("/begin_weight_update", {})
            payloads = await asyncio.to_thread(gather_payloads, serialize(flat, bucket), ranks)
            body = {
                "serialized_named_tensors": payloads,
                "load_format": "flattened_bucket",
                "flush_cache": False,  # a busy engine refuses to flush; extra_key keeps versions apart instead
                "weight_version": str(version),
            }
            loading = asyncio.create_task(self.post("/update_weights_from_tensor", body))
            if self.config.sync.verify:
                received |= {name: tensor.cpu().clone() for name, tensor in sync.unpack(flat, bucket).items()}
        await loading
        await asyncio.to_thread(tp_barrier, ranks)
        await self.post("/end_weight_update", {})
        if self.config.sync.verify:
            await self.verify(received)
        await self.post("/continue_generation", {"torch_empty_cache": False})
        self.version = version
        return time.monotonic() - paused_at

    async def verify(self, sent: dict[str, torch.Tensor]) -> None:
        """Compares every parameter of the engine with what the learner sent, bitwise (by SHA-256)."""
        answer = await self.post("/weights_checker", {"action": "checksum"})
        held = {n: c for rank in answer["ranks"] for n, c in rank["checksums"].items()}
        expected = sync.engine_checksums(sent)
        wrong = sorted(name for name in held.keys() | expected.keys() if held.get(name) != expected.get(name))
        if wrong:
            raise EngineError(
                f"engine {self.index}: {len(wrong)} of {len(expected)} parameters differ from the learner's: {wrong[:5]}"
            )

    def stop(self) -> None:
        """Ends the server and everything that it started."""
        if self.process is None:
            return
        self.process.terminate()
        self.process.wait()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of it was left
        self.held.close()
        self.log.close()


# The server runs under a shell that leads its process group and ends the whole of it on SIGTERM. SGLang's children ask
# the kernel to die with their parent, but only once they are up: one that is still importing when the server is killed
# would stay behind and hold the GPU.
GUARD = ["sh", "-c", 'trap "kill -9 0" TERM; "$@" & wait $!', "sh"]


def threads(config: Config) -> int:
    """CPU threads of one learner rank or one engine server."""
    return config.layout.threads or max(1, os.cpu_count() // config.world_size)


def hold_port() -> socket.socket:
    """A socket that is bound to a free port and never listens. While it lives nobody who asks for any port gets this one,
    and a server that names the port may still listen on it: engines come up in minutes, and several at once."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def parent_death_signal(number: int) -> None:
    """The kernel sends `number` to this process when the parent dies, however it dies."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


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


def gather_payloads(mine: str, ranks: sync.Ranks) -> Optional[list[str]]:
    """One payload per tensor-parallel rank, on the rank that hosts the server."""
    size = dist.get_world_size(ranks.tp)
    if size == 1:
        return [mine]
    gathered = [None] * size if ranks.role.tp == 0 else None
    dist.gather_object(mine, gathered, dst=dist.get_global_rank(ranks.tp, 0), group=ranks.tp)
    return gathered


def tp_barrier(ranks: sync.Ranks) -> None:
    if dist.get_world_size(ranks.tp) > 1:
        dist.barrier(ranks.tp)


# ----------------------------------------------------------------------------------------------------------- one response


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


def parse_response(answer: dict, sampling: Sampling) -> Response:
    """What /generate says of one response, checked. Raises EngineError where its parts do not fit together."""
    meta = answer["meta_info"]
    ids = np.array(answer["output_ids"], dtype=np.int32)
    finish = meta["finish_reason"]["type"]
    if finish not in ("stop", "length") or not 0 < len(ids) <= sampling.max_tokens:
        raise EngineError(f"response of {len(ids)} tokens (limit {sampling.max_tokens}) finished with {finish!r}")
    triples = meta["output_token_logprobs"]
    if [t[1] for t in triples] != answer["output_ids"]:
        raise EngineError(f"{len(triples)} logprobs do not belong to the {len(ids)} tokens of a response")
    logp = np.array([t[0] for t in triples], dtype=np.float32)
    kept_counts = kept_ids = None
    if sampling.mask_replay:
        kept = meta["output_token_sampling_mask"]
        logp = np.array(meta["output_token_sampling_logprobs"], dtype=np.float32)
        if not len(kept) == len(logp) == len(ids) or not all(i in k for i, k in zip(answer["output_ids"], kept)):
            raise EngineError("the sampler's kept ids do not contain the tokens that it sampled")
        kept_counts = np.array([len(k) for k in kept], dtype=np.uint16)
        kept_ids = np.array([i for k in kept for i in sorted(k)], dtype=np.int32)
    versions = np.full(len(ids), -1, dtype=np.int32)
    for span in meta["weight_versions"]:
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise EngineError(f"weight versions {meta['weight_versions']} do not cover the {len(ids)} tokens of a response")
    experts = None
    if sampling.routing:
        experts = parse_experts(meta, meta["prompt_tokens"] + len(ids) - 1, sampling.routing)
    return Response(
        ids, logp, versions, finish, meta["prompt_tokens"], meta["cached_tokens"], kept_counts, kept_ids, experts
    )


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


def to_rollout(prompt: list[int], response: Response, text: str, task: float, failure: Optional[str]) -> sync.Rollout:
    """Prompt ids (mask 0) followed by the sampled ids (mask 1)."""
    p, r = len(prompt), len(response.ids)

    def after_prompt(values, fill):
        return np.concatenate([np.full(p, fill, values.dtype), values])

    return sync.Rollout(
        tokens=np.concatenate([np.array(prompt, dtype=np.int32), response.ids]),
        mask=after_prompt(np.ones(r, dtype=np.uint8), 0),
        behaviour_logp=after_prompt(response.logp, 0.0),
        versions=after_prompt(response.versions, -1),
        text=text,
        finish=response.finish,
        task=task,
        failure=failure,
        kept_counts=None if response.kept_counts is None else after_prompt(response.kept_counts, 0),
        kept_ids=response.kept_ids,
        experts=response.experts,
    )


# ---------------------------------------------------------------------------------------------------------- gate, rewards


def merge_tasks(row: data.Row, rollouts: list[sync.Rollout]) -> list[float]:
    """The task scores of a group, which are also set, from the scores of the row's graders."""
    scores = [[r.parts[f"grader/{reference.grader}"] for reference in row.references] for r in rollouts]
    tasks = merge(row.merge, scores, [r.weight for r in row.references], [r.veto for r in row.references])
    for rollout, task in zip(rollouts, tasks, strict=True):
        rollout.task = task
    return tasks


def passes(task: float) -> bool:
    """A response passes if its raw task score is positive (the merges in rewards.py say what that means)."""
    return task > 0


def gate(tasks: list[float], low: float, high: float) -> bool:
    """Whether the pass rate of a group is worth learning from. Raw task scores, never shaped rewards."""
    return low <= np.mean([passes(t) for t in tasks]) <= high


def has_variance(tasks: list[float]) -> bool:
    """Without it every advantage is zero. A tolerance, because scores may be fractions."""
    return max(tasks) - min(tasks) > 1e-6


# --------------------------------------------------------------------------------------------------------- the engine rank


@dataclass
class Prompts:
    """What turns a ticket into token ids and sampled ids into text."""

    train: data.Mixture
    held_out: list[data.Row]
    tokenizer: PreTrainedTokenizerBase
    template: str
    model_path: str
    vocab_size: int  # of the model: at least as large as the tokenizer's
    stop_ids: list[int]
    skipped: int  # prompts of local data that were left out because they are longer than `room`
    room: int  # tokens of the longest prompt that leaves room for a response
    judge: Judge  # what grader `judge` asks
    routing: Optional[Routing] = None  # of the model, where it is replayed

    def ids(self, row: data.Row) -> list[int]:
        return data.render(row.prompt, self.tokenizer, self.template)

    def decode(self, ids: np.ndarray) -> str:
        """The text that is graded: without special tokens; ids that the tokenizer does not know give nothing."""
        return self.tokenizer.decode(ids[ids < len(self.tokenizer)].tolist(), skip_special_tokens=True)


def open_prompts(config: Config) -> Prompts:
    """Tokenizer, training prompts and held-out prompts of a run. Raises ConfigError before anything expensive starts."""
    path = config.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model_config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        what = "has no usable config.json and tokenizer" if os.path.isdir(path) else "is no directory and no hub model"
        raise ConfigError(f"model.path: {path} {what} ({str(error).splitlines()[0][:200]})") from error
    if not tokenizer.encode("0", add_special_tokens=False):  # transformers makes an empty one up where there is none
        raise ConfigError(f"model.path: {path} has no tokenizer, or one that does not know the digit 0")
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = model_config.eos_token_id  # a model directory need not have a generation_config.json
    if eos is None:
        raise ConfigError(f"model.path: {path} names no eos_token_id: responses would never end")
    limit = config.model.context_length or model_config.max_position_embeddings
    room = min(limit, config.train.max_tokens_per_microbatch) - config.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in the context of {limit} and "
            f"train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch}"
        )

    def fits(row: data.Row) -> bool:
        return len(data.render(row.prompt, tokenizer, config.model.template)) <= room

    train = data.open_sources(config.data.train, config.run.seed, "train", fits)
    evaluation = data.open_sources(config.data.eval, config.run.seed, "eval", fits)
    held_out = evaluation.eval_rows(config.eval.prompts)
    return Prompts(
        train,
        held_out,
        tokenizer,
        config.model.template,
        path,
        vocab_size=model_config.vocab_size,
        stop_ids=[eos] if isinstance(eos, int) else list(eos),
        skipped=train.skipped + evaluation.skipped,
        room=room,
        judge=Judge(config.judge),
        routing=routing_of(model_config, path) if config.rollout.routing_replay else None,
    )


class EngineRank:
    """The loop of a rank that hosts a server: pull, generate, grade, ship; load weights; evaluate; stop."""

    def __init__(self, config: Config, ranks: sync.Ranks, prompts: Prompts):
        self.config, self.ranks, self.prompts = config, ranks, prompts
        self.engine = ranks.role.engine
        rollout = config.rollout
        log_path = os.path.abspath(os.path.join(config.run.dir, "logs", f"engine_{self.engine}.log"))
        self.server = Server(config, prompts.model_path, self.engine, prompts.stop_ids, log_path)
        self.state = sync.RunState(ranks.store, config.staleness.max, config.groups_per_update)
        self.samplings = [  # one per stage of the length curriculum
            Sampling(
                rollout.temperature, stage.max_tokens, rollout.top_p, rollout.top_k, rollout.mask_replay, prompts.routing
            )
            for stage in config.stages
        ]
        # Always the longest limit: held-out numbers of one run are comparable, and no rise of theirs is a raised limit.
        self.eval_sampling = Sampling(config.eval.temperature, rollout.max_tokens)
        self.requests = asyncio.Semaphore(max(1, rollout.max_concurrent // rollout.responses_per_request))
        self.running = 0  # requests inside the server
        self.totals = sync.EngineStats(self.engine, 0.0, 0.0, 0, 0, 0, 0.0)

    async def run(self) -> None:
        """From the start of the server to the end of the run."""
        try:
            await self.server.start(base_gpu=self.ranks.device.index or 0)
            await self.work()
        finally:
            await self.server.http.close()

    async def work(self) -> None:
        self.state.open()
        self.outbox = sync.Outbox(self.ranks.store)
        self.outbox.send(self.totals)  # before the run can take a step: so every step knows which engines live
        self.state.ready()
        plan = self.state.plan()
        limits = self.config.rollout
        self.graders = GraderPool(limits.grader_workers, limits.grader_timeout, self.prompts.judge)
        self.ready_at = self.looked_at = time.monotonic()
        tasks: set[asyncio.Task] = set()
        eval_done = -1
        patience, loop = self.config.faults.stall_after, asyncio.get_running_loop()
        watchdog = faults.Watchdog(patience, self.config.run.dir, self.ranks.record, self.describe, loop)
        try:
            while not (seen := self.state.read()).stop:
                watchdog.saw(seen.progress)
                self.server.check_alive()
                if stop_signals and not seen.stop_asked:
                    self.state.ask_stop(f"{stop_signals[0]} to rank {self.ranks.role.rank}")
                if seen.version > self.server.version:
                    self.totals.pause = await self.server.load_weights(seen.version, plan, self.ranks)
                if seen.eval_id > eval_done and self.server.version >= 0:
                    eval_done = seen.eval_id
                    tasks.add(asyncio.create_task(self.run_eval(eval_done)))
                while not seen.stop_asked and not self.requests.locked():
                    ticket = self.state.claim(self.ranks.role.rank, self.server.version)
                    if ticket is None:
                        break
                    tasks.add(asyncio.create_task(self.run_group(ticket, seen.stage)))
                    await asyncio.sleep(0)  # let it take its requests, so that `locked` tells the truth
                self.report()
                for task in [t for t in tasks if t.done()]:
                    tasks.remove(task)
                    task.result()  # a failed group or evaluation ends the run with its reason
                await asyncio.sleep(POLL)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.graders.close()

    def describe(self) -> dict:
        """What the watchdog writes of this rank. Another thread asks, at any moment."""
        server = self.server
        code = server.process.poll()
        return {
            "doing": f"{self.running} request(s) run under version {server.version}",
            "server": server.last_words("lives" if code is None else f"ended with exit code {code}"),
        }

    def report(self) -> None:
        """Running totals for the learner's log, about once a second."""
        now = time.monotonic()
        if self.running:
            self.totals.busy += now - self.looked_at
        self.looked_at = now
        if now - self.ready_at - self.totals.wall > 0.5:
            self.totals.wall = now - self.ready_at
            self.outbox.send(self.totals)

    async def respond(self, prompt: list[int], n: int, sampling: Sampling) -> list[Response]:
        """`n` responses, as requests that wait for room in the engine."""

        async def request(k):
            async with self.requests:
                self.running += 1
                try:
                    return await self.server.generate(prompt, k, sampling)
                finally:
                    self.running -= 1

        size = self.config.rollout.responses_per_request
        sizes = [min(size, n - i) for i in range(0, n, size)]
        responses = [r for some in await asyncio.gather(*(request(k) for k in sizes)) for r in some]
        self.totals.tokens += sum(len(r.ids) for r in responses)
        self.totals.prompt_tokens += sum(r.prompt_tokens for r in responses)
        self.totals.cached_tokens += sum(r.cached_tokens for r in responses)
        return responses

    async def rollouts(self, row: data.Row, prompt: list[int], n: int, sampling: Sampling) -> list[sync.Rollout]:
        """`n` graded rollouts of one prompt, not yet merged and shaped."""

        async def graded(response):
            text = self.prompts.decode(response.ids)
            scores, failure = await self.graders.score_all(row, text)
            rollout = to_rollout(prompt, response, text, math.nan, failure)  # merge_tasks sets the task score
            rollout.parts = {f"grader/{name}": score for name, score in scores.items()}
            return rollout

        return await asyncio.gather(*(graded(r) for r in await self.respond(prompt, n, sampling)))

    async def run_group(self, ticket: int, stage: int) -> None:
        """The life of one prompt: early responses, gate, full group, gate, penalties, off to the learner; all of it
        under the limits of one stage of the length curriculum."""
        config = self.config.rollout
        row = self.prompts.train.row(ticket)
        prompt = self.prompts.ids(row)
        sampling = self.samplings[stage]
        dropped = None
        rollouts = []
        if config.early_size:
            rollouts += await self.rollouts(row, prompt, config.early_size, sampling)
            if not gate(merge_tasks(row, rollouts), *config.early_range):
                dropped = "early_gate"
        if not dropped:
            rollouts += await self.rollouts(row, prompt, config.group_size - len(rollouts), sampling)
            tasks = merge_tasks(row, rollouts)
            if not has_variance(tasks):
                dropped = "zero_variance"
            elif not gate(tasks, *config.keep_range):
                dropped = "keep_gate"
        # in a thread: it reads every word of long texts
        await asyncio.to_thread(self.shape_rewards, row, rollouts, self.config.stages[stage])
        for rollout in rollouts:
            rollout.check(self.prompts.vocab_size, self.prompts.routing)
        if dropped:
            self.state.give_back()
        self.outbox.send(
            sync.Group(ticket, self.engine, row.prompt_id, row.source, row.prompt, rollouts, dropped, stage)
        )

    def shape_rewards(self, row: data.Row, rollouts: list[sync.Rollout], stage: Stage) -> None:
        """The reward of each rollout from its parts (rewards.shape); the parts are kept for the log."""
        weights = self.config.reward
        pass_rate = float(np.mean([passes(r.task) for r in rollouts]))
        for r in rollouts:
            length = int(r.mask.sum())
            words = foreign_words(r.text, data.plain_text(row.prompt))
            limits = dict(foreign_words=words, length=length, max_length=stage.max_tokens)
            r.reward = shape(
                r.task, **limits, pass_rate=pass_rate, w_lang=weights.w_lang, alpha=weights.alpha, w_len=stage.w_len
            )
            r.parts |= {
                "foreign_words": float(words),
                "lang": language_part(words, weights.alpha),
                "len": length_part(pass_rate, length, stage.max_tokens),
            }

    async def run_eval(self, eval_id: int) -> None:
        """This engine's share of the held-out prompts, k samples each. The learner publishes nothing meanwhile."""
        share = self.prompts.held_out[self.engine :: self.config.layout.engines]

        async def one(row):
            rollouts = await self.rollouts(row, self.prompts.ids(row), self.config.eval.k, self.eval_sampling)
            versions = {v for r in rollouts for v in r.versions[r.mask == 1]}
            if versions != {self.server.version}:
                raise EngineError(f"an evaluation of version {self.server.version} ran under versions {versions}")
            # Each as a group of its own: a merge over the group would compare samples that nobody compares.
            return float(np.mean([passes(task) for r in rollouts for task in merge_tasks(row, [r])]))

        passed = await asyncio.gather(*(one(row) for row in share))
        sources = [row.source for row in share]
        self.outbox.send(sync.EvalPart(eval_id, self.engine, self.server.version, sources, passed))


def serve(config: Config, ranks: sync.Ranks, prompts: Prompts) -> None:
    """Runs an engine rank to the end of the run; its server never outlives this call."""
    if ranks.role.tp > 0:
        return lend_device(config, ranks)
    rank = EngineRank(config, ranks, prompts)
    try:
        asyncio.run(rank.run())
    finally:
        rank.server.stop()


def lend_device(config: Config, ranks: sync.Ranks) -> None:
    """A further tensor-parallel rank of an engine: its GPU serves, and it receives weights for it."""
    state = sync.RunState(ranks.store, config.staleness.max, config.groups_per_update)
    state.open()
    plan = state.plan()
    version = -1
    watchdog = faults.Watchdog(
        config.faults.stall_after, config.run.dir, ranks.record, lambda: {"doing": f"holding version {version}"}
    )
    while not (seen := state.read()).stop:
        watchdog.saw(seen.progress)
        if seen.version > version:
            buffers = sync.bucket_buffers(plan, ranks)
            for i, bucket in enumerate(plan):
                flat = buffers[i % 2][: sync.bucket_nbytes(bucket)]
                sync.receive_bucket(flat, seen.version, ranks)
                if i:
                    tp_barrier(ranks)
                gather_payloads(serialize(flat, bucket), ranks)
            tp_barrier(ranks)
            version = seen.version
        time.sleep(POLL)
