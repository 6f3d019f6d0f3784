"""A collapse, and the way out of it: a run goes on at ten times its learning rate, then `make reset` at the usual one.

    python benchmarks/reset.py [--seeds 0 1 2] [--healthy 30] [--collapse 12] [--steps 30]

Real runs with a real engine, one after another, in runs/collapse_SEED and runs/collapse_SEED-reset; what is finished is not
run again. Of each seed: the held-out pass rate of the base, the best before the collapse, the last; the alarm; the student;
and where RL goes from there.
"""

import argparse
import json
import os
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EVAL = "eval.k=4"


def lines(run_dir: str, name: str) -> list[dict]:
    path = os.path.join(ROOT, run_dir, name)
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f]


def last_eval(run_dir: str) -> int:
    return max((e["step"] for e in lines(run_dir, "eval.jsonl")), default=-1)


def make(target: str, **variables: str) -> None:
    done = subprocess.run(["make", target, *(f"{name}={value}" for name, value in variables.items())], cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"make {target} ended with {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--healthy", type=int, default=30, help="steps at the usual learning rate")
    parser.add_argument("--collapse", type=int, default=12, help="steps at ten times it")
    parser.add_argument("--steps", type=int, default=30, help="after the reset")
    args = parser.parse_args()
    table = []
    for seed in args.seeds:
        run, end = f"runs/collapse_{seed}", args.healthy + args.collapse
        usual = f"run.dir={run} run.seed={seed} {EVAL} run.keep_checkpoints=10"
        if last_eval(run) < args.healthy:
            make("train", ARGS=f"{usual} train.steps={args.healthy} eval.every=10 run.checkpoint_every=10")
        if last_eval(run) < end:
            make("train", ARGS=f"{usual} train.steps={end} eval.every=4 run.checkpoint_every=10 train.lr=3e-3")
        if last_eval(f"{run}-reset") < args.steps:
            make("reset", RUN=run, ARGS=f"train.lr=3e-4 train.steps={args.steps} eval.every=10 {EVAL}")
        before, after = lines(run, "eval.jsonl"), lines(f"{run}-reset", "eval.jsonl")
        best = max(before, key=lambda e: e["pass_at_1"])
        alarms = lines(run, "alarms.jsonl")
        table.append(
            [
                str(seed), f"{before[0]['pass_at_1']:.3f}", f"{best['pass_at_1']:.3f} (step {best['step']})",
                f"{before[-1]['pass_at_1']:.3f} (step {before[-1]['step']})",
                alarms[0]["line"].split("; ")[0] + "; " + alarms[0]["line"].split("; ")[1] if alarms else "none",
                f"{after[0]['pass_at_1']:.3f}", f"{after[-1]['pass_at_1']:.3f} (step {after[-1]['step']})",
            ]
        )  # fmt: skip
    print("| seed | base | best | last | first alarm | student | RL from the student |")
    print("| --- " * 7 + "|")
    for row in table:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
