"""What it costs to stream responses, so that a dying engine loses little of them.

    python benchmarks/stream.py [--interval 32] [--rounds 5] [--sequences 128] [--tokens 16 100]

One real server and one client; the same requests in turns, each answered in one piece, then in pieces of --interval tokens
as a run asks for them. Tokens per second of both, and the median over the rounds of their ratio.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # not this file's directory

import numpy as np

import pretrain
from configs import schema
from server import Server

PER_REQUEST = 16  # sequences


async def ask(server: Server, prompt: list[int], tokens: int, stream: bool) -> int:
    """The tokens of one request's answers."""
    body = {
        "input_ids": [prompt] * PER_REQUEST, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True, "stream": stream,
    }  # fmt: skip
    if stream:
        return sum([len(answer["output_ids"]) async for answer in server.stream("/generate", body)])
    async with server.http.post(server.url + "/generate", json=body) as reply:
        return sum(len(answer["output_ids"]) for answer in json.loads(await reply.read()))


async def rate(server: Server, requests: int, tokens: int, stream: bool) -> float:
    began = time.monotonic()
    got = await asyncio.gather(*(ask(server, [5, 6, 7, 8 + i], tokens, stream) for i in range(requests)))
    assert sum(got) == requests * PER_REQUEST * tokens, got
    return sum(got) / (time.monotonic() - began)


async def measure(args: argparse.Namespace, folder: str) -> None:
    overrides = ["layout.threads=1", f"rollout.stream_interval={args.interval}"]
    server = Server(schema.load(None, overrides), pretrain.PATH, 0, [], os.path.join(folder, "engine.log"))
    try:
        await server.start()
        print("| tokens each | whole, tokens/s | streamed, tokens/s | ratio |\n| --- | --- | --- | --- |")
        for tokens in args.tokens:
            rates = [
                [await rate(server, args.sequences // PER_REQUEST, tokens, stream) for stream in (False, True)]
                for _ in range(args.rounds + 1)
            ]
            whole, streamed = np.array(rates[1:]).T  # the first round warms up
            print(f"| {tokens} | {np.median(whole):,.0f} | {np.median(streamed):,.0f} | {np.median(streamed / whole):.2f} |")
    finally:
        if server.http is not None:
            await server.http.close()
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=int, default=schema.Rollout.stream_interval, help="tokens of a piece")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=128, help="in flight at once")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 100])
    args = parser.parse_args()
    pretrain.ensure()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, folder))


if __name__ == "__main__":
    main()
