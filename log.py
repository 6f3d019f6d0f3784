"""What a run leaves behind, and what it shows while it goes.

    metrics.jsonl   one line per gradient step, metric names as in wandb
    eval.jsonl      one line per evaluation and source
    alarms.jsonl    one line per collapse alarm (alarms.py)
    rollouts/       every rollout, in the file of the step at which its fate was known
    curves.png      drawn by plot.py
    wandb/          online when logged in, offline otherwise; wandb_steps.json says how far it is

A resumed run goes on in the same files: what a run that died had logged beyond its checkpoint is removed first, so no
step is there twice and none is missing. What wandb has got cannot be taken back: there, a step that is done again keeps
the numbers of its first time.
"""

import json
import math
import netrc
import os
import sys
import time
import uuid
from collections import deque

import numpy as np
import torch

import alarms
import checkpoint
import plot
import rollout
import trajectory
from configs import schema
from configs.schema import Config


class Clock:
    """Seconds of each part of a step."""

    def __init__(self):
        self.steps: list[float] = []

    def start(self) -> None:
        self.began = self.last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self.last
        self.last = now

    def stop(self) -> float:
        self.steps.append(self.last - self.began)
        return self.steps[-1]

    def time_left(self, steps: int) -> float:
        """Seconds that `steps` more will take, at the median pace of the last 20."""
        return steps * float(np.median(self.steps[-20:]))



class RunLog:
    """What a run leaves behind: metrics.jsonl, eval.jsonl, rollouts/, curves.png, wandb, and a line per step."""

    def __init__(self, config: Config, step: int):
        """Goes on after `step`: whatever a run that died had logged beyond its checkpoint is removed first."""
        self.config = config
        self.dir = config.run.dir
        os.makedirs(os.path.join(self.dir, "rollouts"), exist_ok=True)
        self.watch = alarms.Watch(config.alarms, keep_until(os.path.join(self.dir, "metrics.jsonl"), step))
        keep_until(os.path.join(self.dir, "alarms.jsonl"), step)
        self.evaluated = {line["step"] for line in keep_until(os.path.join(self.dir, "eval.jsonl"), step)}
        for name in os.listdir(os.path.join(self.dir, "rollouts")):
            if int(name[len("step_") : -len(".jsonl")]) > step:
                os.remove(os.path.join(self.dir, "rollouts", name))
        # Sums over the engines at the start and after each of the last steps: they report about twice a second, so the
        # difference over a single short step would be noise.
        self.totals = deque([dict.fromkeys(("wall", "busy", "tokens", "prompt_tokens", "cached_tokens"), 0)], maxlen=6)
        self.wandb = start_wandb(config)
        self.in_wandb = {"step": -1, "eval": -1}  # the last of each kind that wandb has got, from whichever attempt
        if os.path.exists(os.path.join(self.dir, "wandb_steps.json")):
            with open(os.path.join(self.dir, "wandb_steps.json")) as f:
                self.in_wandb = json.load(f)

    def append(self, name: str, line: dict) -> None:
        with open(os.path.join(self.dir, name), "a") as f:
            f.write(json.dumps(line) + "\n")

    def to_wandb(self, kind: str, metrics: dict) -> None:
        """Logs the metrics of a step to wandb, unless it has got those of this `kind` (step | eval) and step before."""
        if metrics["step"] <= self.in_wandb[kind]:
            return
        self.wandb.log(metrics)
        self.in_wandb[kind] = metrics["step"]
        path = os.path.join(self.dir, "wandb_steps.json")
        with open(path + ".partial", "w") as f:
            json.dump(self.in_wandb, f)
        os.replace(path + ".partial", path)

    def rollouts(self, learned: list[trajectory.Group], returned: list[trajectory.Group], step: int) -> None:
        """One JSON object per rollout, in the file of the step at which its fate was known."""
        with open(os.path.join(self.dir, "rollouts", f"step_{step:06d}.jsonl"), "a") as f:
            for group in learned + returned:
                for r in group.rollouts:
                    line = {
                        "prompt_id": group.prompt_id, "source": group.source, "prompt": group.prompt,
                        "tokens": r.tokens.tolist(), "mask": r.mask.tolist(),
                        "behaviour_logp": [round(float(x), 6) for x in r.behaviour_logp],
                        "versions": r.versions.tolist(), "text": r.text, "task": r.task, "reward": r.reward,
                        "parts": r.parts, "finish": r.finish, "failure": r.failure, "ticket": group.ticket,
                        "learned_at": None if group.dropped else step, "dropped": group.dropped,
                        "max_tokens": self.config.stages[group.stage].max_tokens,
                    }  # fmt: skip
                    f.write(json.dumps(line) + "\n")

    def step(self, learner, metrics: dict, clock: Clock) -> list[str]:
        """Everything that is known of a gradient step: to disk, wandb and the screen. The lines of its alarms."""
        groups, returned = learner.groups, learner.buffer.returned
        self.rollouts(groups, returned, learner.step)
        seconds = clock.stop()
        metrics = {"step": learner.step, "version": learner.version} | metrics
        metrics |= rollout_metrics(groups, returned, learner.prompts.vocab_size)
        metrics |= self.engine_metrics(learner.engines)
        metrics |= {
            "staleness/dropped": sum(g.dropped == "stale" for g in returned),
            "time/step": seconds,
            "time/wait": clock.laps["wait"],
            "time/train": clock.laps["train"],
            "time/sync": clock.laps["sync"],
            "idle/trainer": clock.laps["wait"] / seconds,
        }
        if torch.cuda.is_available():
            watts = torch.cuda.power_draw() / 1000  # of this rank's device
            metrics["power/tokens_per_joule"] = metrics["train/tokens"] / (watts * seconds)
        learner.buffer.returned = []
        raised = self.watch.see(metrics)
        metrics["alarm"] = len(raised)
        self.append("metrics.jsonl", metrics)
        self.to_wandb("step", metrics)
        left = clock.time_left(self.config.train.steps - learner.step)
        print(
            f"step {learner.step:4d}/{self.config.train.steps}  v{learner.version:<4d}"
            f" pass {metrics['rollout/pass_rate']:.2f}  reward {metrics['rollout/reward']:+.2f}"
            f"  length {metrics['rollout/length']:6.1f}  stale {metrics['staleness/mean']:.1f}"
            f"  entropy {metrics['train/entropy']:.2f}  {metrics['rollout/tokens_per_s']:6.0f} tok/s"
            f"  {seconds:5.1f} s  left {left / 60:4.1f} min",
            flush=True,
        )
        return [self.alarm(alarm) for alarm in raised]

    def alarm(self, alarm: alarms.Alarm) -> str:
        """Says it everywhere, and marks the last checkpoint from before what moved first; where none is that old (a signal
        may have been out for ages), from before the signal of the alarm itself moved. Returns the line."""
        for metric, step in (alarm.moved[0], *(m for m in alarm.moved if m[0] == alarm.signal.metric)):
            before = checkpoint.last_before(self.dir, step)
            if before >= 0:
                break
        line = alarm.line(before, metric)
        entry = {
            "step": alarm.step, "metric": alarm.signal.metric, "value": alarm.value,
            "key": f"alarms.{alarm.signal.key}", "threshold": alarm.threshold, "steps": alarm.steps, "moved": alarm.moved,
            "checkpoint": before if before >= 0 else None, "line": line,
        }  # fmt: skip
        if before >= 0:
            checkpoint.mark(self.dir, before, entry)
        self.append("alarms.jsonl", entry)
        self.wandb.alert(title=f"alarm: {alarm.signal.metric}", text=line, level="WARN")
        print(line, file=sys.stderr, flush=True)
        return line

    def engine_metrics(self, engines: dict[int, tuple[trajectory.EngineStats, float]]) -> dict:
        """Rates over the last steps, from the engines' running totals."""
        names = ("wall", "busy", "tokens", "prompt_tokens", "cached_tokens")
        self.totals.append({name: sum(getattr(stats, name) for stats, _ in engines.values()) for name in names})
        change = {name: self.totals[-1][name] - self.totals[0][name] for name in names}
        heard = [stats for stats, came in engines.values() if time.monotonic() - came < 60]
        wall_each = change["wall"] / max(1, len(engines))
        return {
            "rollout/prefix_hit_rate": change["cached_tokens"] / max(1, change["prompt_tokens"]),
            "rollout/tokens_per_s": change["tokens"] / wall_each if wall_each else 0.0,
            "idle/engine": 1 - change["busy"] / change["wall"] if change["wall"] else 0.0,
            "time/sync_pause": max((stats.pause for stats, _ in engines.values()), default=0.0),
            "engine/alive": sum(stats.serving for stats in heard),
            "engine/restarts": sum(stats.restarts for stats, _ in engines.values()),
            "engine/retried": sum(stats.retried for stats, _ in engines.values()),
            "engine/memory_gb": max((stats.memory_gb for stats, _ in engines.values()), default=0.0),
        }

    def evaluation(self, step: int, parts: list[trajectory.EvalPart], k: int) -> None:
        """pass@1 of each source over its prompts, k samples each, with the standard error of the mean over prompts."""
        self.evaluated.add(step)
        sources = [s for part in parts for s in part.sources]
        passed = np.array([p for part in parts for p in part.passed])
        pass_at_1 = {}
        for source in sorted(set(sources)):
            mine = passed[[s == source for s in sources]]
            stderr = float(mine.std(ddof=1) / math.sqrt(len(mine))) if len(mine) > 1 else None
            line = {
                "step": step, "version": parts[0].version, "source": source, "pass_at_1": float(mine.mean()),
                "stderr": stderr, "k": k, "prompts": len(mine),
            }  # fmt: skip
            self.append("eval.jsonl", line)
            pass_at_1[f"eval/{source}"] = line["pass_at_1"]
            print(f"eval of step {step}: {source} pass@1 {shown(line)} ({len(mine)} held-out prompts x {k})", flush=True)
        self.to_wandb("eval", {"step": step} | pass_at_1)

    def close(self, finished: bool) -> None:
        picture = plot.curves(self.dir)
        self.wandb.finish()
        if finished:
            evals = plot.read(os.path.join(self.dir, "eval.jsonl"))
            for source in sorted({line["source"] for line in evals}):
                mine = sorted((e for e in evals if e["source"] == source), key=lambda e: e["step"])
                first, last = mine[0], mine[-1]
                start, end = (f"{shown(e)} (step {e['step']})" for e in (first, last))
                print(f"held-out pass rate, {source}: {start} -> {end}")
        step = checkpoint.latest(self.dir)
        print(
            f"{'finished' if finished else 'stopped'}; curves {picture}, metrics {self.dir}/metrics.jsonl, "
            f"checkpoint {self.dir}/checkpoints/step_{step} (policy for transformers and SGLang in its hf/)",
            flush=True,
        )


def rollout_metrics(learned: list[trajectory.Group], returned: list[trajectory.Group], vocab_size: int) -> dict:
    """Means over every rollout whose fate was decided in a step, so that gating does not flatter the pass rate."""
    groups = learned + returned
    rollouts = [r for group in groups for r in group.rollouts]

    def mean(values):
        return float(np.mean(list(values)))

    gated = [g for g in groups if g.dropped in ("early_gate", "keep_gate", "zero_variance")]
    gated_tokens = sum(int(r.mask.sum()) for g in gated for r in g.rollouts)
    metrics = {
        "rollout/pass_rate": mean(rollout.passes(r.task) for r in rollouts),
        "rollout/reward": mean(r.reward for r in rollouts),
        "rollout/reward_task": mean(r.task for r in rollouts),
        "rollout/reward_lang": mean(r.parts["lang"] for r in rollouts),
        "rollout/reward_len": mean(r.parts["len"] for r in rollouts),
        "rollout/length": mean(r.mask.sum() for r in rollouts),
        "rollout/truncated_frac": mean(r.finish == "length" for r in rollouts),
        "rollout/repetition": mean(loops(r) for r in rollouts),
        "rollout/grading_failed": sum(r.failure is not None for r in rollouts),
        "rollout/zero_std_frac": mean(g.dropped == "zero_variance" for g in groups),
        "rollout/gated_frac": len(gated) / len(groups),
        "rollout/gated_early_frac": mean(g.dropped == "early_gate" for g in groups),
        "rollout/gated_full_frac": mean(g.dropped == "keep_gate" for g in groups),
        "rollout/gated_tokens": gated_tokens,
        "rollout/gated_tokens_frac": gated_tokens / sum(int(r.mask.sum()) for r in rollouts),
    }
    if rollouts[0].kept_counts is not None:
        counts = np.concatenate([r.kept_counts[r.mask == 1] for r in rollouts])
        metrics["rollout/kept_ids"] = float(counts.mean())
        metrics["rollout/masked_frac"] = 1 - metrics["rollout/kept_ids"] / vocab_size
        metrics["rollout/mask_bytes"] = sum(group.mask_bytes for group in groups) / len(counts)
    for part in sorted({part for r in rollouts for part in r.parts if part.startswith("grader/")}):
        scores = mean(r.parts[part] for r in rollouts if part in r.parts)
        metrics[f"rollout/score/{part.removeprefix('grader/')}"] = scores
    sources = sorted({group.source for group in groups})
    if len(sources) > 1:
        for source in sources:
            its = [r for group in groups if group.source == source for r in group.rollouts]
            metrics[f"rollout/pass_rate/{source}"] = mean(rollout.passes(r.task) for r in its)
            metrics[f"rollout/length/{source}"] = mean(r.mask.sum() for r in its)
            metrics[f"rollout/prompts_frac/{source}"] = mean(group.source == source for group in groups)
    return metrics


def loops(r: trajectory.Rollout) -> bool:
    """Whether what was sampled ends in a loop, before the stop token if there is one."""
    sampled = r.tokens[r.mask == 1]
    return alarms.ends_in_loop(sampled[:-1] if r.finish == "stop" else sampled)


def shown(evaluation: dict) -> str:
    """Pass rate and standard error of a line of eval.jsonl; a single prompt has no standard error."""
    error = "" if evaluation["stderr"] is None else f" +- {evaluation['stderr']:.3f}"
    return f"{evaluation['pass_at_1']:.3f}{error}"


def keep_until(path: str, step: int) -> list[dict]:
    """Removes the lines of a log that lie beyond `step`, and returns the others."""
    lines = [line for line in plot.read(path) if line["step"] <= step]
    if os.path.exists(path):
        with open(path + ".partial", "w") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        os.replace(path + ".partial", path)
    return lines


def start_wandb(config: Config):
    """The run's wandb run, the same one after a resume; never asks a question."""
    import wandb  # takes seconds: only rank 0 pays them

    mode = config.wandb.mode
    if mode == "auto":
        mode = "online" if logged_in() else "offline"
    path = os.path.join(config.run.dir, "wandb_id")
    if not os.path.exists(path):
        run_id = uuid.uuid4().hex[:8]
        with open(path, "w") as f:
            f.write(run_id)
    with open(path) as f:
        run_id = f.read()
    run = wandb.init(
        project=config.wandb.project, name=config.run.name, id=run_id, resume="allow", mode=mode, dir=config.run.dir,
        config=json.loads(schema.to_json(config)), settings=wandb.Settings(console="off", silent=True),
    )  # fmt: skip
    # Our own step as the x-axis: wandb's counter would refuse the steps that a resumed run does again.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def logged_in() -> bool:
    """Whether this user has given wandb a key: asked without importing wandb's login, which might ask back."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = os.environ.get("NETRC", os.path.expanduser("~/.netrc"))
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].rstrip("/")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False  # no such file, or not one that wandb could read
