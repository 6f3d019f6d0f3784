"""Several engines started at once, again and again: does one ever fail, or take another's port?

    python benchmarks/starts.py [--engines 4] [--repeats 20] [--model models/tiny]

Each engine is a server.Server, as a rank of a run starts it. A start counts once the server has answered
/health_generate and has generated a token; all of them must, on ports that differ. Exit code 1 where one did not.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # not this file's directory

import pretrain
from configs import schema
from server import Draft, EngineError, Sampling, Server


async def start(server: Server) -> tuple[str, float]:
    """Why a server does not serve, or nothing; and the seconds until that was known."""
    began = time.monotonic()
    try:
        await server.start()
        await server.generate([0], [Draft()], Sampling(temperature=1.0, max_tokens=1))
    except EngineError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


async def start_together(config: schema.Config, folder: str, repeat: int) -> list[str]:
    """What went wrong in one round."""
    servers = [
        Server(config, config.model.path, i, [], os.path.join(folder, f"engine_{i}.log"))
        for i in range(config.layout.engines)
    ]
    try:
        results = await asyncio.gather(*(start(server) for server in servers))
    finally:
        for server in servers:
            if server.http is not None:
                await server.http.close()
            await asyncio.to_thread(server.stop)
    problems = [why for why, _ in results if why]
    ports = [server.url.rpartition(":")[2] for server in servers]
    if len(set(ports)) < len(ports):
        problems.append(f"ports {ports}")
    seconds = ", ".join(f"{s:.0f}" for _, s in results)
    print(f"round {repeat}: {len(problems)} problem(s); up after {seconds} s; ports {', '.join(ports)}", flush=True)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--model", default=pretrain.PATH)
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.model == pretrain.PATH:
        pretrain.ensure()
    overrides = [f"model.path={args.model}", f"layout.engines={args.engines}", "layout.threads=1"]
    config = schema.load(None, [*overrides, "engine.args.max_total_tokens=8192"])
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(1, args.repeats + 1):
            problems += asyncio.run(start_together(config, folder, repeat))
    print(f"{args.engines * args.repeats} starts, {args.engines} at once: {len(problems)} problem(s)")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
