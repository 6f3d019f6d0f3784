"""What the ranks share: who does what, the run's state, and the way of weights to an engine.

Three parts, in this order:
  ranks      which rank learns, which hosts an engine, and their process groups
  run state  version, cursor and stop flag in the store of the process group; the staleness gate is here
  weights    buckets, their broadcast from rank 0, and the bitwise check of what an engine holds

Left out on purpose: any router or queue between prompts and engines. An engine rank takes the next prompt itself, when
it has room and the gate admits it. The way of a rollout to the learner is trajectory.py.
"""

import hashlib
import json
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Iterator, Optional

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

import faults
from configs.schema import Config, ConfigError

# ---------------------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Role:
    rank: int
    kind: str  # learner | engine
    engine: int = -1  # index of the engine
    tp: int = -1  # place within the engine; 0 hosts the server


def roles(config: Config) -> list[Role]:
    """The role of every rank: learners first, then each engine's tensor-parallel ranks in a row."""
    layout = config.layout
    table = [Role(rank, "learner") for rank in range(layout.trainers)]
    for i in range(layout.engines * layout.engine_tp):
        table.append(Role(layout.trainers + i, "engine", i // layout.engine_tp, i % layout.engine_tp))
    return table


@dataclass
class Ranks:
    """This process among the others."""

    role: Role
    device: torch.device  # of this rank
    wire: torch.device  # where weights travel: cuda (NCCL) or cpu (gloo)
    learners: dist.ProcessGroup
    weights: dist.ProcessGroup  # rank 0 and the ranks that host a server
    tp: Optional[dist.ProcessGroup]  # the ranks of this rank's engine, where it has several
    store: dist.Store
    record: faults.Recorder
    host: str  # where the other ranks reach this machine
    sync_timeout: float  # seconds for one broadcast in `weights`
    buffers: list[torch.Tensor] = field(default_factory=list)  # where buckets travel; see bucket_buffers

    @property
    def is_first(self) -> bool:
        return self.role.rank == 0


def check_world_size(config: Config, world_size: int) -> None:
    layout = config.layout
    if world_size != config.world_size:
        raise ConfigError(
            f"torchrun started {world_size} ranks, but layout.trainers={layout.trainers} + layout.engines={layout.engines}"
            f" x layout.engine_tp={layout.engine_tp} needs --nproc-per-node {config.world_size}"
        )


def join(config: Config) -> Ranks:
    """Joins the process group that torchrun prepared and makes the groups of the layout (a collective call).

    Raises TimeoutError where a rank does not come within faults.join_timeout. Groups that do not form within another
    faults.join_timeout, because a rank or the network fails under it, end the process.
    """
    limit = config.faults.join_timeout
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=limit)))
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TimeoutError(f"no store at {where} within faults.join_timeout={limit:g} s") from error
    # A learner may wait for a batch for as long as `stall_after` while its peers sit in a collective.
    patience = timedelta(seconds=config.faults.stall_after + config.faults.start_timeout)
    store.set_timeout(patience)
    store = dist.PrefixStore(f"attempt {faults.attempt()}", store)  # torchrun keeps its store when it restarts the ranks
    store.set(f"here {rank}", "")
    try:
        store.wait([f"here {r}" for r in range(world_size)], timedelta(seconds=limit))
    except dist.DistStoreError as error:
        missing = [r for r in range(world_size) if not store.check([f"here {r}"])]
        raise TimeoutError(f"no sign of rank(s) {missing} within faults.join_timeout={limit:g} s") from error
    too_late = f"error on rank {rank}: the process groups were not formed within faults.join_timeout={limit:g} s"
    with faults.deadline(limit, too_late):
        return form_groups(config, store, rank, world_size, patience)


def form_groups(config: Config, store: dist.Store, rank: int, world_size: int, patience: timedelta) -> Ranks:
    """The groups of the layout, each proved by a first collective (a collective call)."""
    local_rank = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        device = torch.device("cuda", 0 if config.layout.share_device else local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )
    table = roles(config)
    sync_timeout = timedelta(seconds=config.faults.sync_timeout)
    learners = dist.new_group([r.rank for r in table if r.kind == "learner"], timeout=patience)
    weights = dist.new_group([0] + [r.rank for r in table if r.tp == 0], timeout=sync_timeout)
    tp = None
    # Every rank takes part in making every group; an engine of one rank needs none.
    for engine in range(config.layout.engines) if config.layout.engine_tp > 1 else ():
        group = dist.new_group([r.rank for r in table if r.engine == engine], timeout=patience)
        if table[rank].engine == engine:
            tp = group
    over_nccl = has_gpu and not config.layout.share_device
    wire = device if over_nccl else torch.device("cpu")
    mine = table[rank]
    for group, where, is_member in ((learners, device, mine.kind == "learner"), (weights, wire, rank == 0 or mine.tp == 0)):
        if is_member:
            dist.all_reduce(torch.zeros(1, device=where), group=group)
    store = dist.PrefixStore("run", store)
    record = faults.Recorder(config.run.dir, rank)
    return Ranks(
        table[rank], device, wire, learners, weights, tp, store, record, own_address(), config.faults.sync_timeout
    )


def own_address() -> str:
    """Where the other ranks reach this machine: loopback where there is no other machine."""
    one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if one_machine else socket.gethostbyname(socket.gethostname())


# ------------------------------------------------------------------------------------------------------------ run state


@dataclass(frozen=True)
class Snapshot:
    """The run's state as one read of the store saw it."""

    version: int  # the last announced weight publication; -1 before the first
    started: int  # groups begun, those learned from before a resume included
    returned: int  # groups that were begun and will not be learned from (gated, or dropped as stale)
    stop: bool  # every rank leaves its loop
    stop_asked: str  # why some rank wants the run to save and stop; empty while none does
    eval_id: int  # the last evaluation asked for; -1 before the first
    stage: int  # of the length curriculum: new groups begin under its limits
    progress: int  # rises with every gradient step, evaluation and checkpoint; 0 before the first publication


class RunState:
    """Version, cursor and flags of the run, in the store that torchrun hosts. Any rank may call any method.

    Tickets number the prompts of a run: ticket t always means the same prompt (data.Mixture.row). A resumed run first
    hands out the tickets that its predecessor had begun and not finished (`redo`), then goes on with fresh ones.
    """

    KEYS = ["version", "started", "returned", "stop", "stop_asked", "eval_id", "stage", "progress"]

    def __init__(self, store: dist.Store, max_staleness: int, groups_per_update: int):
        self.store = store
        self.max_staleness = max_staleness
        self.groups_per_update = groups_per_update

    def create(self, *, counted: int, next_ticket: int, redo: list[int], plan: list, stage: int = 0) -> None:
        """Rank 0, once: `counted` groups are already learned from or buffered, `redo` come before fresh tickets."""
        self.store.set("plan", json.dumps(plan))
        start = {
            "version": -1, "started": f"{counted} 0", "returned": 0, "stop": "", "stop_asked": "", "eval_id": -1,
            "stage": stage, "progress": 0,
        }  # fmt: skip
        for key, value in start.items():
            self.store.set(key, str(value))
        # last, because `open` waits for it
        self.store.set("resume", json.dumps({"counted": counted, "next_ticket": next_ticket, "redo": redo}))

    def open(self) -> None:
        """Reads what `create` wrote; waits for it."""
        resume = json.loads(self.store.get("resume"))
        self.counted, self.next_ticket, self.redo = resume["counted"], resume["next_ticket"], resume["redo"]

    def plan(self) -> list[list["Slot"]]:
        return [[Slot(*slot) for slot in bucket] for bucket in json.loads(self.store.get("plan"))]

    def read(self) -> Snapshot:
        version, started, returned, stop, stop_asked, *numbers = self.store.multi_get(self.KEYS)
        started = int(started.split()[0])
        return Snapshot(int(version), started, int(returned), bool(stop), stop_asked.decode(), *map(int, numbers))

    def admits(self, seen: Snapshot, held: int) -> bool:
        """The staleness gate: a group may start only if the batch that it will be learned in is at most
        `max_staleness` versions ahead of `held`, the version of the weights that it starts under."""
        return held >= 0 and seen.started - seen.returned < (held + self.max_staleness + 1) * self.groups_per_update

    def claim(self, rank: int, held: int) -> Optional[int]:
        """The ticket of the next prompt, or None where the gate is shut for an engine with weights of version `held`,
        which may be behind the last announced one."""
        while self.admits(seen := self.read(), held):
            # The value names the claimant, so that two ranks that race for the same count cannot both believe they won.
            before = self.store.get("started")
            if int(before.split()[0]) != seen.started:
                continue
            mine = f"{seen.started + 1} {rank}".encode()
            if mine != before and self.store.compare_set("started", before.decode(), mine.decode()) == mine:
                return self.ticket(seen.started)
        return None

    def frontier(self, started: int) -> int:
        """The first ticket that no rank has begun."""
        return self.next_ticket + max(0, started - self.counted - len(self.redo))

    def ticket(self, count: int) -> int:
        """The ticket of the `count`-th group of the run (counting those learned from before a resume)."""
        i = count - self.counted
        return self.redo[i] if i < len(self.redo) else self.next_ticket + i - len(self.redo)

    def give_back(self, groups: int = 1) -> None:
        """`groups` begun groups will not be learned from: the gate admits as many in their place."""
        self.store.add("returned", groups)

    def announce(self, version: int) -> None:
        """Rank 0 is about to broadcast the weights of `version`; every engine rank joins in when it sees this."""
        self.store.set("version", str(version))

    def enter_stage(self, stage: int) -> None:
        """Rank 0: groups that begin from now on have the limits of this stage of the length curriculum."""
        self.store.set("stage", str(stage))

    def move(self, progress: int) -> None:
        """Rank 0: the run is this far; every rank's watchdog sees it."""
        self.store.set("progress", str(progress))

    def ask_eval(self, eval_id: int) -> None:
        self.store.set("eval_id", str(eval_id))

    def tell_engine(self, engine: int, record: "EngineRecord") -> None:
        """An engine rank: how its engine is."""
        self.store.set(f"engine/{engine}", msgspec.json.encode(record).decode())

    def engines(self, count: int) -> dict[int, "EngineRecord"]:
        """How the engines are, by index; those that have never come up are missing."""
        up = [i for i in range(count) if self.store.check([f"engine/{i}"])]
        return {i: msgspec.json.decode(self.store.get(f"engine/{i}"), type=EngineRecord) for i in up}

    def doubt(self, engine: int) -> int:
        """Any rank: a request to this engine failed. The number of this doubt; its rank says when it has answered it."""
        return self.store.add(f"doubts/{engine}", 1)

    def doubts(self, engine: int) -> int:
        return self.store.add(f"doubts/{engine}", 0)

    def ready(self) -> None:
        """An engine rank: the engine serves."""
        self.store.add("ready", 1)

    def engines_ready(self) -> int:
        return self.store.add("ready", 0)

    def ask_stop(self, why: str) -> None:
        """Any rank: the run should save and stop. Rank 0 decides when, so that no one leaves a broadcast half done."""
        self.store.set("stop_asked", why)

    def stop(self) -> None:
        """Rank 0: everything is saved, no broadcast follows."""
        self.store.set("stop", "1")


class EngineRecord(msgspec.Struct):
    """What every rank may know of an engine."""

    status: str  # see engine.py
    url: str
    version: int  # of the weights that it holds
    doubts: int  # so many failures, of all ranks' requests, has it answered with a probe since


# -------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket."""

    name: str
    shape: list[int]
    dtype: str  # of the engine, e.g. "float32"
    start: int  # byte
    nbytes: int


def plan_buckets(shapes: dict[str, tuple[int, ...]], dtype: str, bucket_bytes: int) -> list[list[Slot]]:
    """Cuts the parameters, in order, into buckets of at most `bucket_bytes`; a larger parameter is a bucket of its own.

    All parameters travel in the engine's dtype, so every slot is aligned to it.
    """
    itemsize = getattr(torch, dtype).itemsize
    buckets: list[list[Slot]] = []
    used = bucket_bytes + 1
    for name, shape in shapes.items():
        nbytes = int(np.prod(shape)) * itemsize
        if used + nbytes > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(Slot(name, list(shape), dtype, used, nbytes))
        used += nbytes
    return buckets


def bucket_nbytes(bucket: list[Slot]) -> int:
    return bucket[-1].start + bucket[-1].nbytes


def published_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that an engine loads; a tied output head is listed once (named_parameters skips it), under the name
    of the embedding."""
    return dict(model.named_parameters())


def as_in_checkpoint(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter by its names in the HF checkpoint, which are the ones that an engine loads: itself, except for the
    experts of a MoE layer. transformers holds those in two parameters, [experts, rows, columns], and a checkpoint in three
    matrices for each expert. Views, nothing is copied."""
    layer, _, kind = name.rpartition(".experts.")
    if kind not in ("gate_up_proj", "down_proj"):
        return {name: tensor}
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return {
        f"{layer}.experts.{i}.{part}.weight": matrix
        for i, expert in enumerate(tensor)
        for part, matrix in zip(parts, expert.chunk(len(parts)))
    }


def published_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """What an engine loads, in the order of `published_tensors`. Raises ConfigError where transformers would save the model
    under other names, as it does for MoE models of other families."""
    shapes = {}
    for name, parameter in published_parameters(model).items():
        held = torch.empty(parameter.shape, device="meta")
        ours = {n: tuple(t.shape) for n, t in as_in_checkpoint(name, held).items()}
        saved = {n: tuple(t.shape) for n, t in revert_weight_conversion(model, {name: held}).items()}
        if ours != saved:
            raise ConfigError(
                f"model.path: a {model.config.model_type} checkpoint holds {name} as {next(iter(saved))}, which "
                "sync.as_in_checkpoint does not know; choose another model"
            )
        shapes |= ours
    return shapes


def published_tensors(parameters: dict[str, torch.nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by their names in the HF checkpoint. Each parameter is gathered once, when the first of its tensors is
    asked for (a collective call over the learner ranks)."""
    for name, parameter in parameters.items():
        yield from as_in_checkpoint(name, full_tensor(parameter)).items()


def bucket_buffers(plan: list[list[Slot]], ranks: Ranks) -> list[torch.Tensor]:
    """Two buffers that buckets travel through. Made once and kept: on a CPU, fresh pages cost more than the broadcast.

    The learner fills one while the other travels. An engine rank receives into the first where weights travel between
    GPUs; the second is the one that its server maps: shared memory, or the GPU's through CUDA IPC.
    """
    if not ranks.buffers:
        largest = max(bucket_nbytes(bucket) for bucket in plan)
        torch.multiprocessing.set_sharing_strategy("file_system")  # the server is not our fork: it opens memory by name
        for _ in range(2):
            flat = torch.empty(largest, dtype=torch.uint8, device=ranks.wire)
            ranks.buffers.append(flat if flat.is_cuda or ranks.role.kind == "learner" else flat.share_memory_())
    return ranks.buffers


def receive_version(announced: int, ranks: Ranks) -> int:
    """An engine rank: the version of the publication whose buckets come next. It may be older than the one that is announced:
    a broadcast does not wait until the last rank has taken it, so that a late rank finds several on their way. Raises
    TimeoutError as `send_weights`."""
    version = torch.empty(1, dtype=torch.int64, device=ranks.wire)
    with travel(announced, ranks):
        dist.broadcast(version, src=0, group=ranks.weights)
    return int(version)


def receive_bucket(flat: torch.Tensor, version: int, ranks: Ranks) -> None:
    """An engine rank: receives the next bucket of a publication into `flat`, in the memory of its machine. Raises
    TimeoutError as `send_weights`."""
    arrival = ranks.buffers[0][: len(flat)] if ranks.wire.type == "cuda" else flat
    with travel(version, ranks):
        dist.broadcast(arrival, src=0, group=ranks.weights)
    if arrival is not flat:
        flat.copy_(arrival)


def staging(ranks: Ranks, bucket: list[Slot]) -> torch.Tensor:
    """An engine rank: where its server reads a bucket."""
    return ranks.buffers[1][: bucket_nbytes(bucket)]


@torch.no_grad()
def send_weights(
    parameters: dict[str, torch.nn.Parameter], plan: list[list[Slot]], ranks: Ranks, version: int
) -> None:
    """Broadcasts the version and the policy from rank 0 to the engine ranks; every learner rank takes part in the gathering.

    Two buckets exist at a time: while one travels, the next is gathered, cast and packed. Raises TimeoutError where a
    bucket does not reach every engine rank within faults.sync_timeout.
    """
    flat = bucket_buffers(plan, ranks) if ranks.is_first else []
    if ranks.is_first:
        with travel(version, ranks):
            dist.broadcast(torch.tensor([version], device=ranks.wire), src=0, group=ranks.weights)
    tensors = published_tensors(parameters)  # in the order of the plan
    travelling: list[Optional[dist.Work]] = [None, None]
    for i, bucket in enumerate(plan):
        if travelling[i % 2] is not None:
            with travel(version, ranks):
                travelling[i % 2].wait()
        for slot in bucket:
            name, full = next(tensors)
            if name != slot.name:
                raise ValueError(f"the plan has {slot.name} where the policy has {name}")
            if ranks.is_first:
                place = flat[i % 2][slot.start : slot.start + slot.nbytes]
                place.view(getattr(torch, slot.dtype)).copy_(full.reshape(-1))
        if ranks.is_first:
            view = flat[i % 2][: bucket_nbytes(bucket)]
            with travel(version, ranks):
                travelling[i % 2] = dist.broadcast(view, src=0, group=ranks.weights, async_op=True)
    for work in travelling:
        if work is not None:
            with travel(version, ranks):
                work.wait()


@contextmanager
def travel(version: int, ranks: Ranks) -> Iterator[None]:
    """A broadcast of weights under way: gloo and NCCL say in many words, and of many kinds, that it failed."""
    try:
        yield
    except RuntimeError as error:
        who = "not every engine rank has taken" if ranks.is_first else "the learner has not delivered"
        raise TimeoutError(
            f"{who} version {version} within faults.sync_timeout={ranks.sync_timeout:g} s, or a rank is gone "
            f"({' '.join(str(error).split()):.200})"
        ) from error


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded parameter (a collective call over the learner ranks)."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


def unpack(flat: torch.Tensor, bucket: list[Slot]) -> dict[str, torch.Tensor]:
    """Views of a received bucket, by name."""
    return {
        s.name: flat[s.start : s.start + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape) for s in bucket
    }


# How SGLang stores what a HF checkpoint keeps apart: one matrix for several, their rows one after another.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# All experts of a layer likewise, in two parameters.
FUSED_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
VOCAB_PADDING = 64  # SGLang pads the rows of an embedding to a multiple of this, with zeros


def engine_checksums(sent: dict[str, torch.Tensor], kv_heads: int, tp_rank: int = 0, tp_size: int = 1) -> dict[str, str]:
    """The checksum that SGLang's /weights_checker must report for each parameter of a tensor-parallel rank, computed from
    the parameters as the learner sent them (CPU tensors by HF name): the first 8 bytes of the SHA-256 of its bytes, in
    hex. `kv_heads`: of the model."""
    held: dict[str, list[torch.Tensor]] = {}
    for name in sorted(sent, key=_place_in_engine):
        held.setdefault(_place_in_engine(name)[0], []).append(shard(name, sent[name], kv_heads, tp_rank, tp_size))
    checksums = {}
    for name, parts in held.items():
        digest = hashlib.sha256()
        for part in parts:
            digest.update(memoryview(part.contiguous().reshape(-1).view(torch.uint8).numpy()))
        checksums[name] = digest.hexdigest()[:16]
    return checksums


def shard(name: str, tensor: torch.Tensor, kv_heads: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """What one of `tp_size` tensor-parallel ranks of SGLang holds of a tensor of the checkpoint: rows of what computes heads,
    hidden units or logits, columns of what adds them up, and all of the rest. Where there are more ranks than key and value
    heads, several share one."""
    module = name.split(".")[-2]
    if module in ("embed_tokens", "lm_head"):
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % VOCAB_PADDING))
    if module in ("k_proj", "v_proj") and tp_size > kv_heads:
        return tensor.chunk(kv_heads)[tp_rank * kv_heads // tp_size]
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return tensor.chunk(tp_size)[tp_rank]
    if module in ("o_proj", "down_proj") and tensor.dim() == 2:
        return tensor.chunk(tp_size, dim=1)[tp_rank]
    return tensor


def _place_in_engine(name: str) -> tuple[str, int, int]:
    """The engine's parameter that holds a tensor of the checkpoint, the tensor's expert, its part of that."""
    *path, module, kind = name.split(".")
    if path[-2:-1] == ["experts"]:  # model.layers.0.mlp.experts.7.down_proj.weight
        fused = next(f for f, parts in FUSED_EXPERTS.items() if module in parts)
        return ".".join([*path[:-1], fused]), int(path[-1]), FUSED_EXPERTS[fused].index(module)
    fused = next((f for f, parts in FUSED.items() if module in parts), None)
    if fused is None:
        return name, 0, 0
    return ".".join([*path, fused, kind]), 0, FUSED[fused].index(module)
