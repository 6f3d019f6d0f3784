"""What the tests without an engine share: made-up rollouts, and real ranks as short-lived processes."""

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist

import sync
import trajectory
from configs import schema

# Children are forked from a process that did nothing but these imports: cheap, and safe where a fork of pytest is not.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["train", "wandb", "transformers.models.qwen3.modeling_qwen3"])


def config(model_dir: str, run_dir, *overrides: str, engines: int = 1) -> schema.Config:
    """A checked config; `engines=0` makes a job of learner ranks alone."""
    made = schema.load(
        None,
        [f"model.path={model_dir}", f"run.dir={run_dir}", "wandb.mode=disabled", "layout.threads=1", *overrides],
    )
    made.layout.engines = engines
    return made


def rollout(rng, prompt: int = 3, response: int = 5, *, vocab=100, version=0, reward=None, finish="stop", kept=0):
    """A well-formed rollout of random ids. `version` may be one per sampled token; with `kept`, up
    to that many kept ids of each."""
    length = prompt + response
    tokens = rng.integers(0, vocab, length).astype(np.int32)
    mask = np.r_[np.zeros(prompt), np.ones(response)].astype(np.uint8)
    logp = np.where(mask, -rng.exponential(2.0, length), 0).astype(np.float32)
    versions = np.full(length, -1, np.int32)
    versions[prompt:] = version
    reward = float(rng.integers(0, 2)) if reward is None else reward
    made = trajectory.Rollout(tokens, mask, logp, versions, "text", finish, reward, reward, {"lang": 1.0, "len": 0.0})
    if kept:  # 1, 2, .. `kept` ids, and again
        counts = 1 + np.arange(response) % kept
        made.kept_counts = np.r_[np.zeros(prompt), counts].astype(np.uint16)
        others = [rng.permutation(np.delete(np.arange(vocab), token)) for token in tokens[prompt:]]
        ids = [sorted([token, *other[: n - 1]]) for token, other, n in zip(tokens[prompt:], others, counts)]
        made.kept_ids = np.concatenate(ids).astype(np.int32)
    return made


def group(rng, ticket: int, size: int = 2, **options) -> trajectory.Group:
    rollouts = [rollout(rng, reward=float(i % 2), **options) for i in range(size)]
    return trajectory.Group(ticket, 0, f"p/{ticket}", "p", "question", rollouts)


def run_ranks(cfg: schema.Config, function, *args, timeout: float = 120) -> list:
    """function(cfg, ranks, *args) on every rank of a job that was joined as torchrun's ranks join; the results by rank.

    A rank that fails, dies or is still running after `timeout` seconds fails the test; no process is left behind.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent holds it
    pipes, children = {}, []
    for rank in range(cfg.world_size):
        pipe, theirs = processes.Pipe()
        child = processes.Process(target=_rank, args=(cfg, rank, store.port, theirs, function, args), daemon=True)
        child.start()
        theirs.close()
        pipes[pipe] = rank
        children.append(child)
    results = [None] * cfg.world_size
    deadline = time.monotonic() + timeout
    try:
        while pipes:
            ready = multiprocessing.connection.wait(pipes, max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(pipes.values())} were still running after {timeout} s"
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    failure, results[rank] = pipe.recv()
                except EOFError:
                    failure = "it ended without a word"
                assert failure is None, f"rank {rank}: {failure}"
    finally:
        for child in children:
            child.kill()
            child.join()
    return results


def _rank(cfg, rank, port, pipe, function, args):
    torch.set_num_threads(1)
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": cfg.world_size, "LOCAL_WORLD_SIZE": cfg.world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        pipe.send((None, function(cfg, sync.join(cfg), *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise


def weights(module) -> dict[str, np.ndarray]:
    """Whole copies of the parameters of a (sharded) module, as arrays (a collective call)."""
    return {name: sync.full_tensor(p).detach().clone().numpy() for name, p in module.named_parameters()}
