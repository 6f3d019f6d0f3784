"""The curves of a run: pass rate, response length, entropy and staleness over gradient steps.

    python plot.py RUN_DIR [RUN_DIR ...] [--out curves.png]

Several directories are drawn into the same axes, for seeds or for comparisons.
"""

import argparse
import json
import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PANELS = [
    ("pass rate", "rollout/pass_rate"),
    ("response length (tokens)", "rollout/length"),
    ("entropy (nats per token)", "train/entropy"),
    ("staleness (versions)", "staleness/mean"),
]


def read(path: str) -> list[dict]:
    """The lines of a .jsonl log, without a last one that a kill cut short; none where there is no file."""
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def curves(*run_dirs: str, out: str = "") -> str:
    """Draws the runs and returns the path of the picture (default: curves.png in the first run's directory)."""
    out = out or os.path.join(run_dirs[0], "curves.png")
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2), constrained_layout=True)
    for i, run_dir in enumerate(run_dirs):
        metrics, evals = read(os.path.join(run_dir, "metrics.jsonl")), read(os.path.join(run_dir, "eval.jsonl"))
        steps, name, colour = [m["step"] for m in metrics], os.path.basename(os.path.normpath(run_dir)), f"C{i}"
        for axis, (_, key) in zip(axes, PANELS):
            axis.plot(steps, [m[key] for m in metrics], color=colour, linewidth=1, label=name)
        for source in sorted({e["source"] for e in evals}):
            mine = sorted((e for e in evals if e["source"] == source), key=lambda e: e["step"])
            axes[0].errorbar(
                [e["step"] for e in mine], [e["pass_at_1"] for e in mine], [e["stderr"] or 0 for e in mine],
                fmt="o", markersize=3, capsize=2, color=colour, label=f"{name}: held-out {source}",
            )  # fmt: skip
    for axis, (title, _) in zip(axes, PANELS):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("gradient step")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(-0.02, 1.02)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=7)
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dirs", nargs="+")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    for run_dir in args.run_dirs:
        if not os.path.exists(os.path.join(run_dir, "metrics.jsonl")):
            parser.error(f"{run_dir} is no run directory: it has no metrics.jsonl")
    print(curves(*args.run_dirs, out=args.out))
