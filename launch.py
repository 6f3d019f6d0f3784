"""What surrounds a run: the checks before it, its directory, and the signals that end it.

In the order of train.main: `prepare` checks and makes all that the processes need, `lock_run_dir` keeps other runs out,
`begin` says what begins, `arm_signals` lets SIGTERM and SIGINT save and stop.
"""

import errno
import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from typing import TextIO

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import checkpoint
import faults
import objective
import pretrain
import rollout
import server
import sync
from configs import schema
from configs.schema import Config, ConfigError

# --------------------------------------------------------------------------------------------------------------- checks


def prepare(config: Config) -> rollout.Prompts:
    """Everything that can be checked, and made, before processes start. Raises ConfigError."""
    objective.check(config.train.objective)
    if config.model.path == pretrain.PATH:
        pretrain.ensure()
    prompts = rollout.open_prompts(config)
    sync.published_shapes(shapes_only(config))
    if int(os.environ.get("RANK", 0)) == 0:  # another rank may look after this one has begun to write there
        check_run_dir(config)
    return prompts


def shapes_only(config: Config) -> nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path))


def memory_estimate(config: Config) -> str:
    """Bytes by arithmetic, from the shapes alone."""
    lm = shapes_only(config)
    n = sum(p.numel() for p in lm.parameters())
    itemsize = getattr(torch, config.model.dtype).itemsize
    learner = 16 * n / config.layout.trainers
    logits = 4 * lm.config.vocab_size * min(config.train.logprob_chunk, config.train.max_tokens_per_microbatch)
    gib = 1 << 30
    return (
        f"memory: {n / 1e6:.1f} M parameters; each learner rank {learner / gib:.2f} GiB (float32 masters, gradients and "
        f"AdamW's moments) + {logits / gib:.2f} GiB for a chunk of logits + activations of "
        f"{config.train.max_tokens_per_microbatch} tokens; each engine {itemsize * n / config.layout.engine_tp / gib:.2f} "
        "GiB of weights per rank + KV cache (engine.args.mem_fraction_static, engine.args.max_total_tokens)"
    )


def print_ranks(config: Config) -> None:
    print("rank  role")
    for role in sync.roles(config):
        what = "learner (publishes, logs, saves)" if role.rank == 0 else "learner"
        if role.kind == "engine":
            what = f"engine {role.engine}" + ("" if role.tp == 0 else f", tensor-parallel part {role.tp}")
        print(f"{role.rank:4d}  {what}")
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------------- the run directory

# What may change when a run goes on in its directory.
FREE = {
    "run.name", "run.dir", "run.resume", "run.checkpoint_every", "run.keep_checkpoints", "layout", "sync", "eval", "engine",
    "faults", "wandb", "alarms", "model.attention", "model.activation_checkpointing", "model.compile", "train.steps",
    "train.lr", "train.logprob_chunk", "rollout.max_rejected", "rollout.max_concurrent", "rollout.responses_per_request",
    "rollout.stream_interval", "rollout.grader_workers", "rollout.grader_timeout", "judge.timeout", "judge.retries", "judge.max_concurrent",
    "judge.key_env", "judge.url",
}  # fmt: skip


def check_run_dir(config: Config) -> None:
    """Raises ConfigError if the directory holds a run and may not be continued under this config."""
    path = os.path.join(config.run.dir, "config.yaml")
    if not os.path.exists(path):
        return
    if config.run.resume == "never" and not faults.began(config.run.dir):
        raise ConfigError(f"run.dir: {config.run.dir} holds a run already and run.resume=never refuses to overwrite it")
    here, there = schema.flatten(config), schema.flatten(schema.load(path, []))
    for key in here | there:
        if here.get(key) != there.get(key) and not FREE & {key, key.partition(".")[0]}:
            raise ConfigError(
                f"run.dir: {config.run.dir} holds a run with {key}={there.get(key)!r:.80}, this one has {key}={here.get(key)!r:.80}; "
                f"choose another run.dir, or set the same value"
            )


def lock_run_dir(config: Config) -> TextIO:
    """What keeps other runs out of the directory while it is open; the kernel closes it with the process. Raises
    ConfigError."""
    try:
        os.makedirs(config.run.dir, exist_ok=True)
        lock = open(os.path.join(config.run.dir, ".lock"), "a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"run.dir: another run is at work in {config.run.dir}; choose another one, or end that run") from error
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {config.run.dir} ({error.strerror})") from error
    return lock


def write_config(config: Config) -> None:
    """Writes config.yaml of the run directory in one go: a kill leaves the old one or the new one."""
    path = os.path.join(config.run.dir, "config.yaml")
    with open(path + ".partial", "w") as f:
        f.write(schema.to_yaml(config))
    os.replace(path + ".partial", path)


def begin(config: Config, record: faults.Recorder, prompts: rollout.Prompts) -> None:
    """Rank 0: says what begins."""
    write_config(config)
    print_ranks(config)
    step = checkpoint.latest(config.run.dir)
    record.start(max(0, step))
    if why := os.environ.get("MODEL_ROCKET_AFTER"):
        print(f"the job is started again: {why}")
    if step >= 0:
        print(f"resuming {config.run.dir} after step {step} of {config.train.steps}")
    if prompts.skipped:
        print(f"{prompts.skipped} prompts of more than {prompts.room} tokens are skipped: with rollout.max_tokens they would "
              "not fit the context")


def disk_is_full(error: BaseException, folder: str) -> bool:
    """Whether a write failed for lack of space. Each of the libraries that write a checkpoint says it in its own way, and
    torch.save does not say it at all."""
    named = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
    return named or shutil.disk_usage(folder).free < 1 << 20


# -------------------------------------------------------------------------------------------------------------- signals


def arm_signals(config: Config) -> None:
    """SIGTERM and SIGINT ask the loops to save and stop; if they have not after faults.stop_timeout, the process ends all
    the same.

    A thread hears of them through a pipe. A handler in Python would have to wait for the main thread, which may be in C: in
    a broadcast with a rank that is dead.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)  # without a handler nothing would come through the pipe

    def listen():
        while (number := os.read(ours, 1)[0]) not in (signal.SIGTERM, signal.SIGINT):
            continue
        server.stop_signals.append(signal.Signals(number).name)
        time.sleep(config.faults.stop_timeout)
        print(f"not stopped {config.faults.stop_timeout:g} s after {server.stop_signals[0]}: giving up", file=sys.stderr)
        os._exit(1)  # the kernel then kills the engine server, whose parent this is

    threading.Thread(target=listen, name="signals", daemon=True).start()
