"""Collapse alarms: which signals of a run are watched, when one is an alarm, and what moved first.

A run that collapses mostly does so in an order (the mismatch grows, then the gradient, then responses loop or never
end, then the entropy is gone), and the pass rate tells it last. So an alarm names, next to the signal that passed its
threshold, every watched signal that has left its normal range, in the order in which they left.

Everything is a function of the lines of metrics.jsonl: a resumed run watches on as if it had never been interrupted.
"""

import statistics
from dataclasses import dataclass
from typing import Optional

import numpy as np

from configs import schema

WINDOW = 20  # steps whose median and spread are a signal's normal range
SETTLED = 5  # values that make a first range
LOOP_TOKENS, LOOP_REPEATS = 16, 4


@dataclass(frozen=True)
class Signal:
    key: str  # its threshold in the config's section `alarms`
    metric: str
    side: int  # where the trouble lies: +1 above the threshold, -1 below it


SIGNALS = [
    Signal("entropy_low", "train/entropy", -1),
    Signal("entropy_high", "train/entropy", +1),
    Signal("mismatch_kl", "train/mismatch_kl", +1),
    Signal("grad_norm", "train/grad_norm", +1),
    Signal("ess", "train/ess", -1),
    Signal("repetition", "rollout/repetition", +1),
    Signal("truncated_frac", "rollout/truncated_frac", +1),
]


@dataclass(frozen=True)
class Alarm:
    """A signal that has been beyond its threshold for at least `alarms.patience` steps."""

    step: int
    signal: Signal
    value: float
    threshold: float
    steps: int  # for how many it has been beyond
    moved: list[tuple[str, int]]  # (metric, step at which it left its normal range for good), first things first

    def line(self, before: int, metric: str) -> str:
        """What the user reads. `before` is the step of the last checkpoint from before `metric` moved; -1: none."""
        side = "above" if self.signal.side > 0 else "below"
        moves = ", then ".join(f"{metric} (step {step})" for metric, step in self.moved)
        kept = (
            f"checkpoints/step_{before} is the last from before {metric} moved" if before >= 0
            else "no checkpoint from before is kept (run.keep_checkpoints, run.checkpoint_every)"
        )  # fmt: skip
        return (
            f"alarm at step {self.step}: {self.signal.metric} {self.value:.4g} {side} "
            f"alarms.{self.signal.key}={self.threshold:g} for {self.steps} steps; moved first: {moves}; {kept}"
        )


class Watch:
    """The watched metrics of a run so far."""

    def __init__(self, config: schema.Alarms, earlier: list[dict]):
        """`earlier`: the lines of metrics.jsonl that a resumed run goes on from."""
        self.config = config
        self.signals = [s for s in SIGNALS if getattr(config, s.key) > 0]
        self.steps: list[int] = []
        self.values: dict[str, list[float]] = {s.metric: [] for s in self.signals}
        for line in earlier:
            if self.values.keys() <= line.keys():  # a run that began before there was such a metric lacks it
                self.add(line)

    def add(self, metrics: dict) -> None:
        self.steps.append(metrics["step"])
        for metric, values in self.values.items():
            values.append(metrics[metric])

    def see(self, metrics: dict) -> list[Alarm]:
        """The alarms of a new step. A signal alarms once per excursion; with alarms.action=stop at every step of it, so
        that a run which is started again in that state does not go on in silence."""
        self.add(metrics)
        config, alarms = self.config, []
        for signal in self.signals:
            n = self.steps_beyond(signal)
            if n == config.patience or n > config.patience and config.action == "stop":
                value, threshold = metrics[signal.metric], getattr(config, signal.key)
                alarms.append(Alarm(metrics["step"], signal, value, threshold, n, self.moved()))
        return alarms

    def steps_beyond(self, signal: Signal) -> int:
        """How many of the last steps in a row, those of the warm-up left out, lie beyond the signal's threshold."""
        threshold, n = getattr(self.config, signal.key), 0
        for step, value in zip(reversed(self.steps), reversed(self.values[signal.metric])):
            if step <= self.config.after or not beyond(value, threshold, signal.side):
                break
            n += 1
        return n

    def moved(self) -> list[tuple[str, int]]:
        """Every watched metric that is out of its normal range, with the step at which it left, in that order."""
        left: dict[str, int] = {}
        for signal in self.signals:
            i = departure(self.values[signal.metric], getattr(self.config, signal.key), signal.side)
            if i is not None:
                left[signal.metric] = self.steps[i]
        return sorted(left.items(), key=lambda item: item[1])


def beyond(value: float, threshold: float, side: int) -> bool:
    """Whether a value lies on the bad side of a threshold; NaN does."""
    return not side * (value - threshold) <= 0


def departure(values: list[float], threshold: float, side: int) -> Optional[int]:
    """The index from which on `values` have been out of their normal range, to the last one; None where they are in it.

    The range ends, on the bad side only, at the median of the last WINDOW values that were in it plus 5 standard
    deviations (by their median absolute deviation), but never less than a tenth of the way to the threshold, which is
    where a signal that was flat, or zero, has begun to move, nor further than the threshold. A signal that has been out
    for WINDOW steps and is not beyond its threshold has found a new normal: learning moves signals too.
    """
    normal: list[float] = []
    left = None
    for i, value in enumerate(values):
        if len(normal) < SETTLED:
            end = threshold
        else:
            median = statistics.median(normal)
            spread = 5 * 1.4826 * statistics.median(abs(v - median) for v in normal)
            end = median + side * max(spread, 0.1 * abs(threshold - median))
            end = min(end, threshold) if side > 0 else max(end, threshold)
        if not beyond(value, end, side):
            left = None
            normal = [*normal, value][-WINDOW:]
        elif left is None:
            left = i
        elif i - left >= WINDOW and not any(beyond(v, threshold, side) for v in values[i + 1 - WINDOW : i + 1]):
            left, normal = None, values[i + 1 - WINDOW : i + 1]
    return left


def ends_in_loop(ids: np.ndarray) -> bool:
    """Whether a response [R] ends in a loop: for some period p, its last max(16, 4 p) tokens have period p, so a block
    of p tokens stands there at least four times in a row. Exact, in linear time.

    With H(i) = sum_{j<i} x_j B^j (mod 2^64), ids[a:b] equals ids[a-p:b-p] only if H(b) - H(a) = B^p (H(b-p) - H(a-p)).
    All periods are tried in one go; what the hash lets through, hardly ever much, is compared token by token.
    """
    n = len(ids)
    periods = np.arange(1, n // LOOP_REPEATS + 1)
    if n < LOOP_TOKENS:
        return False
    power = np.full(n + 1, 0x9E3779B97F4A7C15, dtype=np.uint64)  # odd: multiplication by it loses nothing
    power[0] = 1
    power = np.cumprod(power)  # wraps around, as it should
    hashes = np.zeros(n + 1, dtype=np.uint64)
    hashes[1:] = np.cumsum(ids.astype(np.uint64) * power[:-1])
    begin = n - np.maximum(LOOP_TOKENS, LOOP_REPEATS * periods)
    earlier, later = hashes[n - periods] - hashes[begin], hashes[n] - hashes[begin + periods]
    candidates = np.flatnonzero(later == earlier * power[periods])
    return any((ids[begin[c] : n - periods[c]] == ids[begin[c] + periods[c] :]).all() for c in candidates)
