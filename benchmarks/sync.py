"""Seconds and memory of one weight publication, against a bare broadcast of the same bytes and one copy of them.

    python benchmarks/sync.py [--megabytes 500] [--bucket-mb 64] [--repeats 5]

A learner process and an engine rank with a real SGLang server on this machine, as in a run: sync.send_weights on one side,
engine.Engine.receive on the other. In turns with it, over the same process group: one broadcast of one tensor of as
many bytes, and one copy of it in memory. Memory is the peak of resident memory above what it was before (VmHWM).

The first publication makes the buffers and imports SGLang into the engine rank: it is shown, and left out of the medians.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import sys
import tempfile
import time

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # not this file's directory: `sync` is not us

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

import engine
import sync
import train
from configs import schema
from server import Server, threads


def make_model(path: str, megabytes: int) -> None:
    """A random float32 Qwen3 of about this size, one quarter of it tied embeddings."""
    layers = max(1, round((megabytes * 1e6 / 4 - 33.6e6) / 15.7e6))
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32768, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16,
            num_key_value_heads=8, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=1,
            dtype="float32",
        )
    )  # fmt: skip
    model.save_pretrained(path)


def join(config: schema.Config, rank: int, port: int) -> sync.Ranks:
    """Joins a group of two, as torchrun's ranks do."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return sync.join(config)


def memory(field: str, pid: int | str = "self") -> float:
    """VmRSS or VmHWM (its peak since `reset_peak`) of a process, in MB."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024 / 1e6


def reset_peak(pid: int | str = "self") -> float:
    with open(f"/proc/{pid}/clear_refs", "w") as f:
        f.write("5")
    return memory("VmRSS", pid)


def learner(config: schema.Config, port: int, repeats: int, pipe) -> None:
    torch.set_num_threads(threads(config))
    ranks = join(config, 0, port)
    policy = train.load_policy(config, ranks)
    parameters = sync.published_parameters(policy.lm)
    plan = sync.plan_buckets(sync.published_shapes(policy.lm), "float32", config.sync.bucket_mb << 20)
    pipe.send(plan)
    peaks = []
    for version in range(repeats):
        dist.barrier(ranks.weights)
        before = reset_peak()
        sync.send_weights(parameters, plan, ranks, version)
        peaks.append(memory("VmHWM") - before)
        flat = torch.ones(sum(sync.bucket_nbytes(bucket) for bucket in plan), dtype=torch.uint8)
        dist.barrier(ranks.weights)
        dist.broadcast(flat, 0, group=ranks.weights)
        del flat
    pipe.send(peaks)


def scheduler_of(server: Server) -> int:
    """The pid of the server's process that holds the model: the one that is called sglang::scheduler."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as f:
                if "sglang::scheduler" in f.read() and os.getpgid(int(pid)) == server.process.pid:
                    return int(pid)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended meanwhile
    raise LookupError("the server has no scheduler process")


async def engine_rank(config: schema.Config, port: int, repeats: int, pipe, folder: str) -> None:
    ranks = join(config, 1, port)
    os.makedirs(os.path.join(folder, "logs"))
    state = sync.RunState(ranks.store, config.staleness.max, config.groups_per_update)
    hosted = engine.Engine(config, ranks, state, config.model.path, [1])
    server = hosted.server
    try:
        await hosted.start()
        plan = pipe.recv()
        nbytes = sum(sync.bucket_nbytes(bucket) for bucket in plan)
        largest = max(sync.bucket_nbytes(bucket) for bucket in plan)
        print(f"{nbytes / 1e6:.0f} MB in {len(plan)} buckets, the largest of {largest / 1e6:.0f} MB")
        print("repeat  publication s  received s  pause s  broadcast s  copy s  ratio  engine rank +MB  server +MB")
        scheduler = scheduler_of(server)
        rows = []
        for version in range(repeats):
            dist.barrier(ranks.weights)
            before, server_before = reset_peak(), reset_peak(scheduler)
            start = time.monotonic()
            await hosted.receive(version, plan)
            received = time.monotonic() - start
            await hosted.loading
            publication = time.monotonic() - start
            peak, server_peak = memory("VmHWM") - before, memory("VmHWM", scheduler) - server_before

            flat, copy = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
            dist.barrier(ranks.weights)
            start = time.monotonic()
            dist.broadcast(flat, 0, group=ranks.weights)
            broadcast = time.monotonic() - start
            copy.copy_(flat)
            copied = time.monotonic() - start - broadcast
            del flat, copy
            rows.append((publication, received, hosted.pause, broadcast, copied, publication / (broadcast + copied), peak, server_peak))
            show(version, rows[-1])
        show("median", np.median(rows[1:], axis=0))
        print(
            f"most memory that a publication took: learner rank {max(pipe.recv()):.0f} MB, engine rank "
            f"{max(row[6] for row in rows):.0f} MB, server {max(row[7] for row in rows):.0f} MB of the engine rank's; two "
            f"buckets are {2 * largest / 1e6:.0f} MB"
        )
    finally:
        await server.http.close()
        server.stop()


def show(name, row) -> None:
    publication, received, pause, broadcast, copied, ratio, peak, server_peak = row
    print(
        f"{name:>6}  {publication:13.2f}  {received:10.2f}  {pause:7.2f}  {broadcast:11.2f}  {copied:6.2f}  {ratio:5.2f}  {peak:15.0f}"
        f"  {server_peak:10.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--bucket-mb", type=int, default=schema.Sync.bucket_mb)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "model")
        make_model(model, args.megabytes)
        overrides = [f"model.path={model}", f"run.dir={folder}", f"sync.bucket_mb={args.bucket_mb}", "layout.threads=1"]
        config = schema.load(None, overrides + ["engine.args.max_total_tokens=2048"])
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        peer = spawn.Process(target=learner, args=(config, port, args.repeats, theirs), daemon=True)
        peer.start()
        theirs.close()
        asyncio.run(engine_rank(config, port, args.repeats, pipe, folder))
        peer.join()


if __name__ == "__main__":
    main()
