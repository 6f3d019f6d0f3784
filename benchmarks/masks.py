"""What mask replay costs: ids that the sampler keeps per token, and bytes per token that travel for them.

    python benchmarks/masks.py [--model models/smollm2-135m] [--tokens 64] [--top-p 0.9 0.97] [--top-k 64 4096]

A real SGLang server, temperature 1, groups of 8 responses (SGLang returns a mask for a top_k of up to 4096): half of the
prompts are the sums of configs/smollm2_cpu.yaml, half begin a text. Bytes are those of trajectory.encode(group) with the
masks minus those without, over the sampled tokens; "plain" is 2 bytes for a count and 4 for an id.
"""

import argparse
import asyncio
import os
import sys
import tempfile

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # not this file's directory: `sync` is not us

import msgspec
import numpy as np

import rollout
import trajectory
from configs import schema
from server import Draft, Response, Sampling, Server

TEXTS = [
    "The history of the bicycle begins", "Dear customer, we are sorry to", "Once upon a time, in a small village,",
    "The main cause of inflation is", "To make a good tomato soup, first", "In this paper we show that",
    "def fibonacci(n):\n", "The president said on Tuesday that", "Photosynthesis is the process by which",
    "My favourite place in the world is", "The train to Lisbon was late, and", "Question: why is the sky blue? Answer:",
    "import numpy as np\n\n", "The theorem follows from", "She opened the letter and", "Breaking news:",
    "The three most important rules of chess are", "Water boils at", "A short poem about the sea:\n",
    "The defendant argued that", "Ingredients: flour, sugar,", "In 1969, astronauts", "Let x be a real number. Then",
    "The best way to learn a language is",
]  # fmt: skip
GROUP = 8


async def respond(server: Server, prompt: list[int], sampling: Sampling) -> list[Response]:
    drafts = [Draft() for _ in range(GROUP)]
    await server.generate(prompt, drafts, sampling)
    return [draft.response() for draft in drafts]


async def sample(config: schema.Config, prompts: rollout.Prompts, rows: list[list[int]], settings: list):
    """[setting][prompt] -> the responses of a group."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(config, prompts.model_path, 0, prompts.stop_ids, os.path.join(folder, "engine.log"))
        try:
            await server.start()
            return [
                await asyncio.gather(*(respond(server, row, sampling) for row in rows)) for sampling in settings
            ]
        finally:
            await server.http.close()
            server.stop()


def group_of(prompt: list[int], responses: list[Response]) -> trajectory.Group:
    return trajectory.Group(0, 0, "", "", "", [rollout.to_rollout(prompt, r, "", 0.0, None) for r in responses])


def without_masks(group: trajectory.Group) -> trajectory.Group:
    rollouts = [msgspec.structs.replace(r, kept_counts=None, kept_ids=None) for r in group.rollouts]
    return msgspec.structs.replace(group, rollouts=rollouts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--top-p", type=float, nargs="+", default=[0.9, 0.97])
    parser.add_argument("--top-k", type=int, nargs="+", default=[64, 4096])
    args = parser.parse_args()
    overrides = [
        f"model.path={args.model}", f"rollout.max_tokens={args.tokens}", "rollout.mask_replay=true", "rollout.top_k=4096",
        "engine.args.weight_version=0",  # nobody publishes here
    ]  # fmt: skip
    config = schema.load("configs/smollm2_cpu.yaml", overrides)
    prompts = rollout.open_prompts(config)
    kinds = {
        "sums": [prompts.ids(prompts.train.row(ticket)) for ticket in range(len(TEXTS))],
        "texts": [prompts.tokenizer.encode(text) for text in TEXTS],
    }
    settings = [Sampling(1.0, args.tokens, p, k, True) for k in args.top_k for p in args.top_p]
    rows = [row for some in kinds.values() for row in some]
    sampled = asyncio.run(sample(config, prompts, rows, settings))

    print("| top_p | top_k | prompts | tokens | ids kept, mean | median | of the vocabulary | bytes per token, plain | as sent |")
    print("| --- " * 9 + "|")
    for sampling, responses in zip(settings, sampled):
        groups = [group_of(row, some) for row, some in zip(rows, responses)]
        n = len(TEXTS)
        for kind, mine in {"sums": groups[:n], "texts": groups[n:], "all": groups}.items():
            counts = np.concatenate([r.kept_counts[r.mask == 1] for g in mine for r in g.rollouts])
            sent = sum(len(trajectory.encode(g)) - len(trajectory.encode(without_masks(g))) for g in mine)
            print(
                f"| {sampling.top_p:g} | {sampling.top_k} | {kind} | {len(counts):,} | {counts.mean():.1f} | {np.median(counts):.0f} | "
                f"{counts.mean() / prompts.vocab_size:.3%} | {2 + 4 * counts.mean():.0f} | {sent / len(counts):.1f} |"
            )


if __name__ == "__main__":
    main()
