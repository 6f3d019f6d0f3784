"""Experiments on the recipe: one process each, no engine, staleness set exactly.

A real run bounds staleness; it does not set it. Here every batch is sampled by the weights of exactly `lag` publications
ago, by a sampler of this file, and learned from by the functions that a run uses (make_batches,
train.gradient_step, the gates, the graders, the prompts). So curves differ by the one thing that an experiment varies,
and a step takes a fraction of a second on one core.

    python benchmarks/lab.py                       # lists the experiments
    python benchmarks/lab.py staleness [--jobs 2]  # runs what is missing (runs/lab/), prints the table, draws the picture

To try an idea: write a function that returns arms (name -> Arm), add it to EXPERIMENTS.
"""

import argparse
import collections
import concurrent.futures
import copy
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # not this file's directory: `sync` is not benchmarks/sync.py

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import objective
import pretrain
import rewards
import rollout
import train
import trajectory
from batch import make_batches
from configs import schema
from server import Response, Sampling

SEEDS = (0, 1, 2)
FOLDER = os.path.join(ROOT, "runs", "lab")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One setting of an experiment; every seed of it is a run of its own."""

    overrides: tuple[str, ...] = ()  # of the config (configs/tiny_cpu.yaml)
    lag: int = 0  # publications between the weights that sample a batch and those that learn from it
    replay: str = "kept"  # what the learner gets of a truncated sampler: kept (its ids) | renormalised (its logprobs
    # alone) | raw (logprobs of the whole softmax, as an engine returns them by default)
    coin: bool = False  # rewards are a coin's: there is nothing to learn, and the entropy is free
    corrupt: int = 0  # at this step, one token's behaviour logprob is wrong by 20 nats
    until: float = 1.0  # the run ends when the held-out pass rate is this

    def config(self, seed: int) -> schema.Config:
        return schema.load(None, [f"run.seed={seed}", "layout.threads=1", *self.overrides])


# ------------------------------------------------------------------------------------------------------------ the sampler


@torch.no_grad()
def sample(lm, prompts: torch.Tensor, sampling: Sampling, stop: set[int], generator: torch.Generator):
    """One response to each row of `prompts` [B, P]: [(ids, logp, raw_logp, kept ids or None)].

    `logp` is of the distribution that was sampled from: over what top-k and then top-p keep (the smallest set whose
    probability reaches top_p), as SGLang's sampler does it. `raw_logp` is of the whole softmax.
    """
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    out = [([], [], [], []) for _ in prompts]
    alive = torch.arange(len(prompts))
    cache, inputs = DynamicCache(config=lm.config), prompts
    for _ in range(sampling.max_tokens):
        raw = (lm(input_ids=inputs, past_key_values=cache).logits[:, -1].float() / sampling.temperature).log_softmax(-1)
        logp, kept = raw, [None] * len(alive)
        if truncated:
            ranked, order = raw.sort(descending=True)
            drop = ranked.exp().cumsum(-1) - ranked.exp() > sampling.top_p
            if sampling.top_k:
                drop[:, sampling.top_k :] = True
            inside = torch.ones_like(drop).scatter(1, order, ~drop)
            logp = raw.masked_fill(~inside, -torch.inf).log_softmax(-1)
            kept = [row.nonzero()[:, 0].tolist() for row in inside]
        chosen = torch.multinomial(logp.exp(), 1, generator=generator)
        picked = (chosen[:, 0].tolist(), logp.gather(1, chosen)[:, 0].tolist(), raw.gather(1, chosen)[:, 0].tolist(), kept)
        for i, *values in zip(alive.tolist(), *picked, strict=True):
            for series, value in zip(out[i], values, strict=True):
                series.append(value)
        going = torch.tensor([token not in stop for token in picked[0]])
        if not going.any():
            break
        if not going.all():
            cache.batch_select_indices(going.nonzero()[:, 0])
        alive, inputs = alive[going], chosen[going]
    return out


# ---------------------------------------------------------------------------------------------------------------- the lab


class Lab:
    """A run in one process: sampler, gates, grader, learner."""

    def __init__(self, arm: Arm, seed: int):
        self.arm, self.config = arm, arm.config(seed)
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.prompts = rollout.open_prompts(self.config)
        lm = AutoModelForCausalLM.from_pretrained(self.config.model.path, dtype=torch.float32).train()
        self.policy = train.Policy(lm, self.config.rollout.temperature, self.config.train.logprob_chunk)
        self.sampler = copy.deepcopy(lm).eval()
        t = self.config.train
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=t.lr, betas=(t.beta1, t.beta2), eps=t.adam_eps, weight_decay=t.weight_decay,
            fused=True,
        )  # fmt: skip
        self.published = collections.deque(maxlen=arm.lag + 1)
        self.step, self.k, self.ticket, self.tokens = 0, 0.0, 0, 0
        self.publish()

    @property
    def version(self) -> int:
        return self.step // self.config.train.steps_per_update

    def publish(self) -> None:
        weights = {name: tensor.clone() for name, tensor in self.policy.lm.state_dict().items()}
        self.published.append((self.version, weights))

    def respond(self, rows: list, n: int, sampling: Sampling, version: int) -> list[list[trajectory.Rollout]]:
        """`n` graded rollouts of each row, from the sampler's present weights."""
        ids = [self.prompts.ids(row) for row in rows]
        lengths = {len(i) for i in ids}
        if len(lengths) > 1:
            raise ValueError(f"this sampler needs prompts of one length, got {sorted(lengths)}")
        stop = set(self.prompts.stop_ids)
        out = sample(self.sampler, torch.tensor(ids).repeat_interleave(n, 0), sampling, stop, self.generator)
        graded = []
        for i, (tokens, logp, raw, kept) in enumerate(out):
            row, finish = rows[i // n], "stop" if tokens[-1] in stop else "length"
            response = Response(
                np.array(tokens, np.int32), np.array(raw if self.arm.replay == "raw" else logp, np.float32),
                np.full(len(tokens), version, np.int32), finish, len(ids[0]), 0,
            )  # fmt: skip
            if kept[0] is not None and self.arm.replay == "kept":
                response.kept_counts = np.array([len(k) for k in kept], np.uint16)
                response.kept_ids = np.array([i for k in kept for i in k], np.int32)
            text = self.prompts.decode(response.ids)
            (reference,) = row.references
            task = rewards.find_grader(reference.grader).score(text, reference.answer)
            graded.append(rollout.to_rollout(ids[i // n], response, text, task, None))
            if self.arm.coin:
                graded[-1].task = float(torch.rand((), generator=self.generator) < 0.5)
            graded[-1].reward = graded[-1].task
        self.tokens += sum(len(o[0]) for o in out)
        return [graded[i : i + n] for i in range(0, len(graded), n)]

    def groups(self) -> list[trajectory.Group]:
        """The next batch, through the gates of rollout.EngineRank.run_group, and what they rejected on the way."""
        r = self.config.rollout
        version, weights = self.published[0]
        self.sampler.load_state_dict(weights)
        sampling = Sampling(r.temperature, r.max_tokens, r.top_p, r.top_k, r.mask_replay)
        kept, rejected = [], []
        while len(kept) < self.config.train.groups_per_step:
            if len(rejected) >= r.max_rejected:
                raise train.NothingToLearn(f"{len(rejected)} groups rejected for {len(kept)} kept")
            missing = self.config.train.groups_per_step - len(kept)
            rows = [self.prompts.train.row(self.ticket + i) for i in range(missing)]
            groups = [
                trajectory.Group(self.ticket + i, 0, row.prompt_id, row.source, row.prompt, []) for i, row in enumerate(rows)
            ]
            self.ticket += missing
            if r.early_size:
                for group, early in zip(groups, self.respond(rows, r.early_size, sampling, version), strict=True):
                    group.rollouts += early
                    if not rollout.gate([x.task for x in early], *r.early_range):
                        group.dropped = "early_gate"
            going = [i for i, group in enumerate(groups) if not group.dropped]
            if going:
                rest = self.respond([rows[i] for i in going], r.group_size - r.early_size, sampling, version)
                for i, more in zip(going, rest, strict=True):
                    groups[i].rollouts += more
                    tasks = [x.task for x in groups[i].rollouts]
                    if not rollout.has_variance(tasks):
                        groups[i].dropped = "zero_variance"
                    elif not rollout.gate(tasks, *r.keep_range):
                        groups[i].dropped = "keep_gate"
            kept += [group for group in groups if not group.dropped]
            rejected += [group for group in groups if group.dropped]
        self.rejected = rejected
        return kept

    def learn(self) -> dict:
        """One gradient step; its metrics."""
        t = self.config.train
        groups = self.groups()
        if self.step + 1 == self.arm.corrupt:
            # A token of a response with a negative advantage: there PPO's pessimistic clip does not bound the ratio.
            group = next(g for g in groups)
            worst = min(group.rollouts, key=lambda x: x.reward)
            worst.behaviour_logp[np.flatnonzero(worst.mask)[0]] -= 20
        (batch,) = make_batches(groups, 1, t.max_tokens_per_microbatch, self.version, t.objective)
        metrics = train.gradient_step(self.policy, self.optimizer, batch, self.k, self.config, lambda: False)
        self.step += 1
        if objective.is_controlled(t.objective):
            self.k = objective.next_clip_k(
                self.k, metrics["train/entropy"], target=t.target_entropy, delta=t.delta, k_max=t.k_max
            )
        if self.step % t.steps_per_update == 0:
            self.publish()
        everyone = [x for group in groups + self.rejected for x in group.rollouts]
        return {name.partition("/")[2]: value for name, value in metrics.items()} | {
            "step": self.step,
            "tokens_spent": self.tokens,
            "pass_rate": float(np.mean([rollout.passes(x.task) for x in everyone])),
            "length": float(np.mean([x.mask.sum() for x in everyone])),
            "gated": len(self.rejected) / (len(groups) + len(self.rejected)),
        }

    def evaluate(self) -> float:
        """pass@1 of the present policy on the held-out prompts, eval.k samples each at temperature 1."""
        self.sampler.load_state_dict(self.policy.lm.state_dict())
        before, e = self.tokens, self.config.eval
        sampling = Sampling(e.temperature, self.config.rollout.max_tokens)
        groups = self.respond(self.prompts.held_out, e.k, sampling, self.version)
        self.tokens = before
        return float(np.mean([rollout.passes(x.task) for group in groups for x in group]))


def run(arm: Arm, seed: int, path: str) -> None:
    """One run, a JSON line per step, whole or not there. A run that stops early says why in its last line."""
    lab = Lab(arm, seed)
    lines = [{"step": 0, "eval": lab.evaluate()}]
    while lab.step < lab.config.train.steps:
        try:
            lines.append(lab.learn())
        except (FloatingPointError, train.NothingToLearn) as error:
            lines.append({"step": lab.step, "stopped": str(error), "eval": lab.evaluate()})
            break
        if lab.step % lab.config.eval.every == 0 or lab.step == lab.config.train.steps:
            lines[-1]["eval"] = lab.evaluate()
            if lines[-1]["eval"] >= arm.until:
                break
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".partial", "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    os.replace(path + ".partial", path)


@functools.cache
def code() -> str:
    """A digest of the files that a run's curve depends on, apart from this one."""
    digest = hashlib.sha256()
    for name in ("objective.py", "train.py", "pretrain.py", "configs/tiny_cpu.yaml", "configs/schema.py"):
        with open(os.path.join(ROOT, name), "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()


def result(arm: Arm, seed: int) -> str:
    """Where the lines of a run are: named by everything that decides them, so a changed arm, or code, is run anew."""
    set_fields = {f.name: getattr(arm, f.name) for f in dataclasses.fields(arm) if getattr(arm, f.name) != f.default}
    key = json.dumps([set_fields, seed, code()], sort_keys=True)
    return os.path.join(FOLDER, hashlib.sha256(key.encode()).hexdigest()[:16] + ".jsonl")


def run_all(arms: dict[str, Arm], seeds: tuple[int, ...], jobs: int) -> dict[str, list[list[dict]]]:
    """The lines of every arm and seed; runs what is missing, `jobs` at a time."""
    missing = [(name, arm, seed) for seed in seeds for name, arm in arms.items() if not os.path.exists(result(arm, seed))]
    if missing:
        pretrain.ensure()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn) as pool:
        futures = {pool.submit(run, arm, seed, result(arm, seed)): (name, seed) for name, arm, seed in missing}
        for n, future in enumerate(concurrent.futures.as_completed(futures), 1):
            future.result()
            name, seed = futures[future]
            last = read(result(arms[name], seed))[-1]
            done = f"pass@1 {last['eval']:.3f} after step {last['step']}"
            print(f"{n}/{len(futures)} {name}, seed {seed}: {done}", flush=True)
    return {name: [read(result(arm, seed)) for seed in seeds] for name, arm in arms.items()}


def read(path: str) -> list[dict]:
    with open(path) as f:
        return [json.loads(line) for line in f]


# ------------------------------------------------------------------------------------------------------------ experiments

BASE = ("train.groups_per_step=8", "train.steps=100", "eval.every=10", "eval.k=4")


def staleness() -> dict[str, Arm]:
    """Final pass rate by staleness: PPO's clip without correction, and the recipe."""
    return {
        f"{name}, staleness {lag}": Arm((*BASE, f"train.objective={name}"), lag)
        for name in ("ppo", "rocket")
        for lag in (0, 1, 2, 4, 8, 16)
    }


def peers() -> dict[str, Arm]:
    """Every choice of train.objective at staleness 8."""
    return {name: Arm((*BASE, f"train.objective={name}"), 8) for name in (*objective.RECIPE, *objective.PEERS)}


def entropy() -> dict[str, Arm]:
    """The controller over 300 steps of 4 groups at staleness 8, on the task (target 0.3) and where entropy is free (target 0.55)."""
    long = ("train.groups_per_step=4", "train.steps=300", "eval.every=50")
    free = (*long, "train.eps=0.05", "train.lr=1e-3", "train.target_entropy=0.55")
    return {
        "task, controller": Arm((*long, "train.objective=rocket"), 8),
        "task, fixed clip": Arm((*long, "train.objective=fixed_clip"), 8),
        "coin, controller": Arm((*free, "train.objective=rocket"), 8, coin=True),
        "coin, fixed clip": Arm((*free, "train.objective=fixed_clip"), 8, coin=True),
    }


def corrupt() -> dict[str, Arm]:
    """At step 30 one behaviour logprob of the batch is 20 nats too low, on a token with a negative advantage."""
    base = (*BASE, "train.steps=60", "eval.every=5")
    unclipped = "train.clip_grad=1e30"  # the gradient's norm is left as it is, or the damage is one step of wrong direction
    return {
        "outer clip": Arm((*base, "train.objective=rocket"), corrupt=30),
        "no outer clip": Arm((*base, "train.objective=no_outer_clip"), corrupt=30),
        "outer clip, no norm clip": Arm((*base, "train.objective=rocket", unclipped), corrupt=30),
        "no outer clip, no norm clip": Arm((*base, "train.objective=no_outer_clip", unclipped), corrupt=30),
    }


def top_p() -> dict[str, Arm]:
    """Top-p 0.9 at staleness 2, and what the learner knows of it."""
    base = (*BASE, "train.objective=rocket", "train.steps=50")
    truncated = (*base, "rollout.top_p=0.9", "rollout.top_k=64", "rollout.mask_replay=true")
    return {
        "mask replay": Arm(truncated, lag=2),
        "no replay, renormalised logprobs": Arm(truncated, lag=2, replay="renormalised"),
        "no replay, raw logprobs": Arm(truncated, lag=2, replay="raw"),
        "top-p 1": Arm(base, lag=2),
    }


def gate() -> dict[str, Arm]:
    """Tokens spent to reach 0.95 held-out."""
    base = (*BASE, "train.objective=rocket", "train.steps=150", "eval.every=5")
    early = (*base, "rollout.early_size=4", "rollout.early_range=[0.05,0.8]")
    return {
        "no gate": Arm(base, until=0.95),
        "early gate": Arm(early, until=0.95),
        "both gates": Arm((*early, "rollout.keep_range=[0.1,0.8]"), until=0.95),
    }


EXPERIMENTS = {f.__name__: f for f in (staleness, peers, entropy, corrupt, top_p, gate)}


# ---------------------------------------------------------------------------------------------------------------- results


def spread(values: list[float], digits: int = 3) -> str:
    """Mean (least to greatest)."""
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def held(run: list[dict], target: float) -> float:
    """Share of the steps after the first 50 at which the entropy (mean of ten steps) is within 20 % of the target."""
    values = [line["entropy"] for line in run if "entropy" in line]
    means = np.convolve(values, np.ones(10) / 10, mode="valid")[41:]  # of the steps i-9 .. i, i > 50
    return float(np.mean(np.abs(means / target - 1) <= 0.2)) if len(means) else float("nan")


def row(arm: Arm, runs: list[list[dict]]) -> dict[str, str]:
    """What a table says of an arm: over the seeds."""
    evals = [[line for line in run if "eval" in line] for run in runs]
    steps = [[line for line in run if "entropy" in line] for run in runs]
    reached = [next((i for i, line in enumerate(run) if line.get("eval", 0) >= 0.95), None) for run in runs]
    tokens = [run[i]["tokens_spent"] for run, i in zip(runs, reached, strict=True) if i is not None]
    within = np.mean([held(run, arm.config(0).train.target_entropy) for run in runs])

    def by_seed(key):
        means = [np.mean([line[key] for line in s if line["step"] > 50]) for s in steps if s[-1]["step"] > 50]
        return ", ".join(f"{mean:.3f}" for mean in means) or "-"

    stopped = [run[-1]["step"] for run in runs if "stopped" in run[-1]]
    return {
        "final pass@1": spread([e[-1]["eval"] for e in evals]),
        "best": spread([max(line["eval"] for line in e) for e in evals]),
        "tokens to 0.95": f"{np.mean(tokens) / 1000:.0f} k, {len(tokens)} of {len(runs)}" if tokens else "-",
        "at steps": ", ".join(str(run[i]["step"]) for run, i in zip(runs, reached, strict=True) if i is not None) or "-",
        "largest gradient norm": f"{max(line['grad_norm'] for s in steps for line in s):.3g}",
        "entropy, last 10": spread([float(np.mean([line["entropy"] for line in s[-10:]])) for s in steps]),
        "entropy after step 50, by seed": by_seed("entropy"),
        "k after step 50, by seed": by_seed("clip_k"),
        "mismatch KL, mean": f"{np.mean([line['mismatch_kl'] for s in steps for line in s]):.2g}",
        "within 20 % of target": "-" if np.isnan(within) else f"{within:.0%}",
        "stopped at": ", ".join(map(str, stopped)) or "-",
    }


def table(arms: dict[str, Arm], results: dict[str, list[list[dict]]]) -> str:
    rows = {name: row(arms[name], runs) for name, runs in results.items()}
    columns = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | " + " | ".join(cells.values()) + " |" for name, cells in rows.items()])


def picture(results: dict[str, list[list[dict]]], path: str) -> None:
    """pass@1, entropy and gradient norm over steps; a colour per arm, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2))
    colours = pyplot.get_cmap("tab10" if len(results) <= 10 else "tab20").colors
    for (name, runs), colour in zip(results.items(), colours, strict=False):
        for axis, key in zip(axes, ("eval", "entropy", "grad_norm"), strict=True):
            for seed, run in enumerate(runs):
                points = [(line["step"], line[key]) for line in run if key in line]
                axis.plot(*zip(*points, strict=True), color=colour, alpha=0.8, lw=1.2, label=None if seed else name)
            axis.set(xlabel="gradient step", title={"eval": "held-out pass@1"}.get(key, key.replace("_", " ")))
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", choices=EXPERIMENTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, a core each")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    if args.experiment is None:
        for name, arms in EXPERIMENTS.items():
            print(f"{name:15s}{len(arms()):2d} arms  {arms.__doc__}")
        return
    arms = EXPERIMENTS[args.experiment]()
    results = run_all(arms, tuple(args.seeds), args.jobs)
    print(table(arms, results))
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"lab_{args.experiment}.png")
    picture(results, path)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
