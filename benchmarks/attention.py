"""Tokens per second of an engine without a GPU: attention of sglang_cpu.py against SGLang's own torch_native loops.

    python benchmarks/attention.py [--model models/tiny] [--rounds 5] [--concurrent 128]

Starts one server of each kind with the same options, and gives both the same requests in turns, so that a machine that
is busy with something else slows both alike. Then gives both the same token sequences and compares their logprobs:
sampled tokens (decode), whole prompts (extend) and prompts whose first half is in the prefix cache. All prompts are
problems that the tiny policy knows: on text that it never saw, its logits are so large that float32 alone is off by
2e-5, whichever attention computes them. Needs 7 GB of memory.

`tokens/s` is what a client sees. `CPU us/token` is what all processes of the server used.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pretrain
from data import arithmetic_problem, render
from rollout import hold_port

STOCK, BATCHED = "torch_native", "sglang_cpu"
OPTIONS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --max-total-tokens 65536 "
    "--mem-fraction-static 0.1 --disable-overlap-schedule --skip-tokenizer-init --skip-server-warmup --sleep-on-idle "
    "--log-level warning --host 127.0.0.1"
).split()


class Server:
    def __init__(self, kind: str, model: str, log_dir: str):
        self.held = hold_port()
        port = self.held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = Path(log_dir) / f"{kind}.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port), *OPTIONS],
            env=os.environ | {"OMP_NUM_THREADS": "1", "MODEL_ROCKET_STOCK_ATTENTION": str(int(kind == STOCK))},
            stdout=self.log_path.open("wb"),
            stderr=subprocess.STDOUT,
            cwd=log_dir,  # the names of this repository's modules must not shadow SGLang's
            start_new_session=True,
        )

    async def ready(self, http: aiohttp.ClientSession) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"server ended with {self.process.returncode}:\n{self.log_path.read_text()[-2000:]}")
            try:
                async with http.get(self.url + "/health_generate") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # not listening yet
            await asyncio.sleep(0.5)
        sys.exit(f"server was not up after 5 minutes:\n{self.log_path.read_text()[-2000:]}")

    def cpu_seconds(self) -> float:
        main = psutil.Process(self.process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in [main, *main.children(recursive=True)])

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


async def generate(http, server, ids, options=None, **sampling) -> dict | list[dict]:
    """`ids`: one sequence of token ids, or several, which then make one request."""
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **(options or {})}
    async with http.post(server.url + "/generate", json=body) as reply:
        reply.raise_for_status()
        return await reply.json()


async def throughput(http, server, prompts, group, new_tokens, concurrent) -> tuple[float, float]:
    """Tokens per second and CPU microseconds per token while `concurrent` sequences are in flight."""
    slots = asyncio.Semaphore(concurrent // group)

    async def one(prompt):
        async with slots:
            ids = prompt if group == 1 else [prompt] * group
            await generate(http, server, ids, max_new_tokens=new_tokens, temperature=1.0, ignore_eos=True)

    cpu, start = server.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    seconds, cpu = time.perf_counter() - start, server.cpu_seconds() - cpu
    tokens = len(prompts) * group * new_tokens
    return tokens / seconds, 1e6 * cpu / tokens


async def speed(http, servers, prompts, rounds, concurrent) -> None:
    print(f"{concurrent} sequences in flight, medians of {rounds} rounds")
    print(f"{'per request':>12} {'tokens':>8} {'server':>14} {'tokens/s':>10} {'CPU us/token':>14}")
    for group, new_tokens, waves in ((1, 16, 4), (16, 16, 4), (1, 100, 2), (16, 100, 2)):
        measured = {kind: [] for kind in servers}
        for turn in range(rounds + 1):
            for kind in list(servers)[:: 1 if turn % 2 else -1]:
                batch = random.choices(prompts, k=waves * concurrent // group)
                result = await throughput(http, servers[kind], batch, group, new_tokens, concurrent)
                if turn > 0:  # the first warms up
                    measured[kind].append(result)
        rows = {kind: map(statistics.median, zip(*results)) for kind, results in measured.items()}
        turns = [(ours[0] / stock[0], stock[1] / ours[1]) for stock, ours in zip(measured[STOCK], measured[BATCHED])]
        rows["ratio"] = map(statistics.median, zip(*turns))
        for kind, (rate, cpu) in rows.items():
            digits = 2 if kind == "ratio" else 0
            print(f"{group:>12} {new_tokens:>8} {kind:>14} {rate:>10,.{digits}f} {cpu:>14.{digits}f}", flush=True)


async def differences(http, servers, prompts) -> dict[str, float]:
    """Largest absolute difference of logprobs between the two servers, over the same token ids."""

    async def both(ids, new_tokens, **options):
        replies = await asyncio.gather(
            *(generate(http, s, ids, options, max_new_tokens=new_tokens, temperature=0.0) for s in servers.values())
        )
        return [reply["meta_info"] for reply in replies]

    def gap(replies, key):
        """Up to the first token id that differs: greedy sampling may break a tie either way."""
        largest = 0.0
        for (p, i, _), (q, j, _) in zip(*(reply[key] for reply in replies)):
            if i != j:
                break
            if p is not None:  # the first token of a prompt has no logprob
                largest = max(largest, abs(p - q))
        return largest

    sampled = await asyncio.gather(*(both(ids, 100) for ids in prompts))
    whole = [ids + [i for _, i, _ in a["output_token_logprobs"]] for ids, (a, _) in zip(prompts, sampled)]
    uncached = await asyncio.gather(*(both(ids, 1, logprob_start_len=0) for ids in whole))
    cached = await asyncio.gather(*(both(ids, 1, logprob_start_len=len(ids) // 2) for ids in whole))
    hits = min(reply["cached_tokens"] for replies in cached for reply in replies)
    assert hits > 3, f"a prompt had only {hits} cached tokens: the comparison on a cached prefix compared nothing"
    return {
        "sampled": max(gap(replies, "output_token_logprobs") for replies in sampled),
        "prompt": max(gap(replies, "input_token_logprobs") for replies in uncached),
        "prompt, half of it cached": max(gap(replies, "input_token_logprobs") for replies in cached),
    }


async def main(model: str, rounds: int, concurrent: int) -> None:
    rng, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(model)
    questions = [arithmetic_problem(rng)[0] for _ in range(concurrent)]
    prompts = [render(q, tokenizer, "chat") for q in questions]
    with tempfile.TemporaryDirectory() as log_dir:
        servers = {kind: Server(kind, model, log_dir) for kind in (STOCK, BATCHED)}
        try:
            # The server closes connections that were idle for 5 s; one that is about to be closed must not be reused.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=connector) as http:
                for server in servers.values():
                    await server.ready(http)
                await speed(http, servers, prompts, rounds, concurrent)
                for what, largest in (await differences(http, servers, prompts)).items():
                    print(f"largest logprob difference, {what}: {largest:.1e}", flush=True)
        finally:
            for server in servers.values():
                server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a model directory; default: the tiny base policy, built if missing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=128)
    options = parser.parse_args()
    asyncio.run(main(os.path.abspath(options.model or pretrain.ensure()), options.rounds, options.concurrent))
