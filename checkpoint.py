"""Saving and resuming a run: policy, optimiser, controller, generators, cursor, and all work not yet learned from.

    checkpoints/step_N/
        learner/       policy and optimiser, sharded (torch.distributed.checkpoint: loads under another number of ranks)
        rng_R.pt       the generators of learner rank R
        progress.json  step, entropy controller, stage of the curriculum, and the account of tickets
        groups.msgpack finished groups that wait to be learned from
        hf/            the policy as the engines serve it: loads in transformers and SGLang
        before_alarm.json  what a collapse alarm said: only in the last checkpoint from before it; the first and the last
                       of the checkpoints that hold one are never removed

A checkpoint is written under another name and renamed when it is whole, so that a kill at any moment leaves the
previous one usable. Rollouts that were under way are not saved: their tickets are, and a resumed run does them again.
"""

import copy
import glob
import json
import os
import re
import shutil
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedTokenizerBase

import sync
import trajectory
from configs.schema import Config

SHARD_BYTES = 4 << 30  # of the hf/ export
MARK = "before_alarm.json"  # the first and the last checkpoint that hold it are never removed


@dataclass
class Progress:
    """Where a run stands between two gradient steps."""

    step: int = 0
    clip_k: float = 0.0
    stage: int = 0  # of the length curriculum
    truncated: list[float] = field(default_factory=list)  # their share at the last steps of this stage
    low: int = 0  # every ticket below it is learned from or returned
    done: list[int] = field(default_factory=list)  # so are these, at or above it
    next_ticket: int = 0  # the first that no rank has begun
    waiting: list[trajectory.Group] = field(default_factory=list)  # finished, not learned from

    @property
    def redo(self) -> list[int]:
        """Tickets that were begun and neither finished nor returned: their prompts are done again."""
        settled = set(self.done) | {group.ticket for group in self.waiting}
        return [ticket for ticket in range(self.low, self.next_ticket) if ticket not in settled]


def latest(run_dir: str) -> int:
    """The step of the newest whole checkpoint; -1 where there is none."""
    return max(steps(run_dir), default=-1)


def steps(run_dir: str) -> list[int]:
    folder = os.path.join(run_dir, "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))


def last_before(run_dir: str, step: int) -> int:
    """The step of the newest whole checkpoint from before gradient step `step`; -1 where there is none."""
    return max((s for s in steps(run_dir) if s < step), default=-1)


def mark(run_dir: str, step: int, alarm: dict) -> None:
    """Keeps checkpoints/step_N, as the one from before `alarm` (of many marked ones `save` leaves the first and the last);
    the first alarm that names it is written there."""
    path = os.path.join(run_dir, "checkpoints", f"step_{step}", MARK)
    if not os.path.exists(path):
        write(path + ".partial", json.dumps(alarm).encode())
        os.replace(path + ".partial", path)


def save(
    config: Config,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase,
    ranks: sync.Ranks,
) -> None:
    """Writes checkpoints/step_N (a collective call over the learner ranks; `progress` counts on rank 0)."""
    folder = os.path.join(config.run.dir, "checkpoints")
    final = os.path.join(folder, f"step_{progress.step}")
    partial = final + ".partial"
    if ranks.is_first:
        for left_by_a_kill in glob.glob(os.path.join(glob.escape(folder), "step_*.partial")):
            shutil.rmtree(left_by_a_kill)
        os.makedirs(partial)
    dist.barrier(ranks.learners)
    model, optim = get_state_dict(policy, optimizer)
    dcp.save(
        {"model": model, "optimizer": optim},
        checkpoint_id=os.path.join(partial, "learner"),
        process_group=ranks.learners,
    )
    torch.save(generators(ranks), os.path.join(partial, f"rng_{ranks.role.rank}.pt"))
    export_hf(os.path.join(partial, "hf"), policy.lm, config.model.dtype, tokenizer, ranks)
    if ranks.is_first:
        account = {name: value for name, value in vars(progress).items() if name != "waiting"}
        write(os.path.join(partial, "progress.json"), json.dumps(account).encode())
        write(os.path.join(partial, "groups.msgpack"), trajectory.encode(progress.waiting))
    dist.barrier(ranks.learners)
    if ranks.is_first:
        os.sync()
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        whole = steps(config.run.dir)
        marked = [step for step in whole if os.path.exists(os.path.join(folder, f"step_{step}", MARK))]
        for step in whole[: -config.run.keep_checkpoints]:
            if step not in (*marked[:1], *marked[-1:]):  # of many alarms, those from before the first and the last
                shutil.rmtree(os.path.join(folder, f"step_{step}"))
    dist.barrier(ranks.learners)


def load(run_dir: str, policy: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: sync.Ranks) -> Progress:
    """Restores the newest whole checkpoint of a run directory into policy and optimiser; a fresh Progress if none."""
    step = latest(run_dir)
    if step < 0:
        return Progress()
    folder = os.path.join(run_dir, "checkpoints", f"step_{step}")
    model, optim = get_state_dict(policy, optimizer)
    dcp.load(
        {"model": model, "optimizer": optim},
        checkpoint_id=os.path.join(folder, "learner"),
        process_group=ranks.learners,
    )
    set_state_dict(policy, optimizer, model_state_dict=model, optim_state_dict=optim)
    if step == 0:  # get_state_dict fills in a fresh optimiser's state by a step of zeros: it must not count as one
        optimizer.state.clear()
    own = os.path.join(folder, f"rng_{ranks.role.rank}.pt")
    if os.path.exists(own):  # a rank that the saved run did not have starts with fresh generators
        restore_generators(torch.load(own), ranks)
    with open(os.path.join(folder, "progress.json")) as f:
        account = json.load(f)
    with open(os.path.join(folder, "groups.msgpack"), "rb") as f:
        waiting = trajectory.decode_groups(f.read())
    return Progress(**account, waiting=waiting)


def generators(ranks: sync.Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def restore_generators(state: dict[str, torch.Tensor], ranks: sync.Ranks) -> None:
    torch.set_rng_state(state["cpu"])
    if ranks.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], ranks.device)


@torch.no_grad()
def export_hf(
    path: str, lm: torch.nn.Module, dtype: str, tokenizer: PreTrainedTokenizerBase, ranks: sync.Ranks
) -> None:
    """Writes the policy as a HuggingFace model directory, under the names and in the dtype that the engines get."""
    if ranks.is_first:
        os.makedirs(path)
    index, shard, size, files = {}, {}, 0, 0

    def flush():
        nonlocal shard, size, files
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(shard, os.path.join(path, name), metadata={"format": "pt"})
        index.update({parameter: name for parameter in shard})
        shard, size = {}, 0

    tensors = sync.published_tensors(sync.published_parameters(lm))  # every learner rank takes part
    for name, full in tensors:
        if ranks.is_first:
            shard[name] = full.to(getattr(torch, dtype)).cpu().contiguous()
            size += shard[name].nbytes
            if size >= SHARD_BYTES:
                flush()
    if not ranks.is_first:
        return
    if shard:
        flush()
    total = sum(os.path.getsize(os.path.join(path, name)) for name in set(index.values()))
    write(
        os.path.join(path, "model.safetensors.index.json"),
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}).encode(),
    )
    described = copy.deepcopy(lm.config)
    described.dtype = getattr(torch, dtype)  # the learner's own masters are float32
    described.save_pretrained(path)
    if lm.can_generate():
        lm.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def write(path: str, content: bytes) -> None:
    with open(path, "wb") as f:
        f.write(content)
