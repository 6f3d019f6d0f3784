"""Self-distillation reset: fine-tunes a clean base on rollouts that a run itself produced, so that RL can go on from there.

    python distill.py runs/tiny                                        # -> runs/tiny-reset/student
    python distill.py runs/math=0.5 runs/code=0.5 --out models/merged  # merges specialists, in these shares
    make reset RUN=runs/tiny                                           # the whole cycle: distil, restart RL

After a collapse the damage is older than it looks, so going on from an earlier checkpoint often does not help; the good
rollouts are still in the store. The same serves to move to another base model or prompt format (--base, --template) and
to drop hacking traces (`keep`, --filter). After the MAI-Thinking-1 report, section 3: several later checkpoints rather
than one, prompt diversity before traces per prompt, random choice; packed, cosine with 2 % warm-up, dropout 0.15.

`distil` reads as it goes: which publications -> which traces -> their tokens -> fine-tuning -> a model directory.

Left out on purpose: sharding. This is one process on one device, with 16 bytes a parameter and the activations of a row.
"""

import argparse
import contextlib
import glob
import hashlib
import importlib
import json
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple, Optional

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import data
import plot
import pretrain
import rollout
import train
import trajectory
from batch import make_row, pack
from configs import schema
from configs.schema import Config, ConfigError
from server import threads

RECORD = "distill.json"  # in the model directory: what it was made from
EVERY = 40  # steps between two lines of progress


Id = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


class Stored(msgspec.Struct):
    """What is read of a line of the rollout store (log.RunLog.rollouts)."""

    source: str
    prompt: data.Prompt
    tokens: list[Id]  # [T], as is the mask (1 where the policy sampled) and versions
    mask: list[Id]
    versions: list[Id]
    text: str  # of the response, without special tokens
    task: float
    finish: str
    failure: Optional[str]


def keep(r: Stored) -> bool:
    """The filter for hacking traces: False leaves a successful rollout out. Edit it, or name another with --filter.

    For example, to drop responses that state the answer and derive it afterwards:  return not r.text.startswith("=")
    """
    return True


# -------------------------------------------------------------------------------------------------------- which traces


def window(evals: list[dict], margin: float) -> tuple[int, int]:
    """The publications (first, last) whose rollouts are taught, from the lines of eval.jsonl.

    The last is that of the best evaluation (the latest of equals), so whatever came after, a collapse too, is out. The
    first is that of the earliest evaluation that is linked to the best one by evaluations within `margin` of it, and at
    least the one before it: several checkpoints rather than one. Sources count by their prompts.
    Raises ConfigError where there is no evaluation, or none better than the base's.
    """
    prompts, passed = Counter(), Counter()
    for line in evals:
        prompts[line["version"]] += line["prompts"]
        passed[line["version"]] += line["prompts"] * line["pass_at_1"]
    versions = sorted(prompts)
    if not versions:
        raise ConfigError(
            "no evaluation says when the run was at its best: name the publications, --versions FIRST:LAST"
        )
    rates = [passed[v] / prompts[v] for v in versions]
    best = max(range(len(versions)), key=lambda i: (rates[i], i))
    if rates[best] <= rates[0]:
        raise ConfigError(
            f"no evaluation is better than the first ({rates[0]:.3f}): nothing to distil, or name --versions FIRST:LAST"
        )
    first = best - 1
    while first > 0 and rates[first] >= rates[best] - margin and rates[first - 1] >= rates[best] - margin:
        first -= 1
    return versions[first], versions[best]


def verdict(r: Stored, versions: tuple[int, int], keep: Callable[[Stored], bool]) -> str:
    """Whether a rollout may be taught ("usable"), or why not."""
    if r.failure is not None or not rollout.passes(r.task):
        return "failed"
    if r.finish != "stop":
        return "unfinished"  # taught as if it ended there, it would be wrong
    sampled = [version for version, mask in zip(r.versions, r.mask) if mask]
    if min(sampled) < versions[0] or max(sampled) > versions[1]:
        return "of other publications"
    return "usable" if keep(r) else "filtered"


def choose(prompts: Sequence[str], copies: Sequence[int], n: int, per_prompt: int, seed: int) -> list[int]:
    """n random indices of distinct traces, given each one's prompt and how often it was sampled; fewer if there are no more.

    Evenly over the prompts, which take turns: no prompt gives a second trace before all have given one, and none gives
    more than `per_prompt`. Within a prompt the chance to be next is proportional to `copies`, as if all copies were
    shuffled and only the first of each kept: what the teacher does seldom, such as a lucky guess, stays seldom.
    """
    rng = random.Random(f"{seed} choose")
    by_prompt: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(i)
    turns = list(by_prompt.values())
    rng.shuffle(turns)
    for traces in turns:
        traces.sort(key=lambda i: rng.expovariate(copies[i]))  # the first of exponential clocks is i with chance ~ rate
    rounds = [[traces[k] for traces in turns if k < len(traces)] for k in range(per_prompt)]
    return [i for each in rounds for i in each][:n]


def counts_by_share(available: list[int], shares: list[float], most: int) -> list[int]:
    """Traces of each run: exactly by share, at most `most` in all, fewer where a run has not enough for its share."""
    n = min([most] + [math.floor(a * sum(shares) / s) for a, s in zip(available, shares)])
    return data.shares(shares, n)


def hold_out(prompts: Sequence[str], fraction: float, seed: int) -> set[str]:
    """The prompts whose traces are for validation: `fraction` of all, at random, and never all."""
    distinct = sorted(set(prompts))
    count = min(round(fraction * len(distinct)), len(distinct) - 1)
    return set(random.Random(f"{seed} hold out").sample(distinct, count))


# ----------------------------------------------------------------------------------------------------------- the store


class Place(NamedTuple):
    """Where a trace is in a store, and digests of its prompt and tokens. Stores take gigabytes: more is read when chosen."""

    path: str
    line: int
    offset: int  # bytes
    prompt: str
    tokens: str


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def decode(line: bytes, path: str, number: int) -> Stored:
    """Raises ConfigError, naming file and line, if it holds no well-formed rollout."""
    try:
        r = msgspec.json.decode(line, type=Stored)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: line {number} is no rollout: {error}") from error
    whole = len(r.tokens) == len(r.mask) == len(r.versions) and set(r.mask) == {0, 1} and r.mask[0] == 0
    if not whole or min(r.tokens) < 0:
        raise ConfigError(f"{path}: line {number} has tokens, mask and versions that do not fit together")
    return r


def candidates(
    run_dir: str, versions: tuple[int, int], keep: Callable[[Stored], bool], elsewhere: set[str]
) -> tuple[dict[Place, int], Counter]:
    """The rollouts of a run that may be taught: each list of tokens once, with the number of its copies; and how many
    rollouts had which verdict. Lists in `elsewhere`, of the runs before, are left out.

    A last line without its end, as a kill leaves it, is skipped and counted. Raises ConfigError for any other line that is
    broken, and where there is no store.
    """
    paths = sorted(glob.glob(os.path.join(glob.escape(run_dir), "rollouts", "*.jsonl")))
    if not paths:
        raise ConfigError(f"{run_dir} has no rollouts/*.jsonl: is it the directory of a run?")
    places, copies, verdicts = {}, Counter(), Counter()
    for path in paths:
        offset = 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    verdicts["cut short"] += 1
                    break
                r = decode(line, path, number)
                why = verdict(r, versions, keep)
                if why == "usable":
                    tokens = digest(np.array(r.tokens, dtype=np.int64).tobytes())
                    copies[tokens] += 1
                    if tokens in elsewhere:
                        why = "of another run too"
                    elif copies[tokens] == 1:
                        places[tokens] = Place(path, number, offset, digest(msgspec.json.encode(r.prompt)), tokens)
                verdicts[why] += 1
                offset += len(line)
    return {place: copies[tokens] for tokens, place in places.items()}, verdicts


def read(place: Place) -> Stored:
    with open(place.path, "rb") as f:
        f.seek(place.offset)
        return decode(f.readline(), place.path, place.line)


# ---------------------------------------------------------------------------------------------------------- the tokens


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no usable tokenizer ({str(error).splitlines()[0][:200]})") from error


def same_format(own, base, template: str, prompts: list[data.Prompt]) -> bool:
    """Whether the base's tokenizer has the run's vocabulary and renders prompts to the same ids."""
    return own.get_vocab() == base.get_vocab() and all(
        data.render(prompt, own, template) == data.render(prompt, base, template) for prompt in prompts
    )


def render_again(r: Stored, tokenizer: PreTrainedTokenizerBase, template: str, keep_ids: bool) -> Stored:
    """The trace with its prompt in another format. The response keeps its ids; without `keep_ids` (another vocabulary)
    its text is tokenised, and the end token follows. Raises ConfigError for a trace of several turns."""
    start = r.mask.index(1)
    if not all(r.mask[start:]):
        raise ConfigError("--template: a trace of several turns keeps the format that it was sampled in")
    prompt = data.render(r.prompt, tokenizer, template)
    response = r.tokens[start:]
    if not keep_ids:
        response = tokenizer.encode(r.text, add_special_tokens=False) + [tokenizer.eos_token_id]
    mask = [0] * len(prompt) + [1] * len(response)
    return msgspec.structs.replace(r, tokens=prompt + response, mask=mask, versions=[0] * len(mask))


def as_rollout(r: Stored) -> trajectory.Rollout:
    """As make_row takes it; no behaviour logprob is needed."""
    return trajectory.Rollout(
        np.array(r.tokens, np.int32), np.array(r.mask, np.uint8), np.zeros(len(r.tokens), np.float32),
        np.array(r.versions, np.int32), r.text, r.finish, r.task,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- fine-tuning


def default_lr(width: int) -> float:
    """A rule of thumb between 3e-3, which suits the tiny base (width 128), and the 1e-5 that is customary for models of a
    few billion parameters (8e-6 at width 2560). Not a multiple of the run's own rate, which may be why it collapsed."""
    return 50 / width**2


def schedule(step: int, steps: int, warmup: float) -> float:
    """The factor on the learning rate at `step` of 0..steps-1: linear over the first `warmup` of all steps (at least
    one), then a cosine towards 0 at `steps`."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2


@contextlib.contextmanager
def residual_dropout(lm: nn.Module, p: float) -> Iterator[None]:
    """Dropout on what each attention and each MLP adds to the residual stream, in training mode, inside the context.

    By hooks, since most models have no such setting. The model's own config stays as it is: a dropout rate written there
    would be alive in the RL run that starts from the student.
    """

    def drop(module, args, output):
        if isinstance(output, tuple):  # attention: (output, weights)
            return F.dropout(output[0], p, module.training), *output[1:]
        return F.dropout(output, p, module.training)

    branches = [branch for layer in lm.base_model.layers for branch in (layer.self_attn, layer.mlp)]
    hooks = [branch.register_forward_hook(drop) for branch in branches]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def mean_loss(
    policy: train.Policy, traces: list[trajectory.Rollout], capacity: int, dtype: torch.dtype, learn: bool
) -> float:
    """Nats per sampled token of all `traces` together, however they are cut into rows of `capacity` tokens; NaN for no
    traces. With `learn` in training mode and accumulating the gradient, else in evaluation mode."""
    device = next(policy.parameters()).device
    normalizer = sum(int(trace.mask.sum()) for trace in traces)
    policy.train(learn)
    total = 0.0 if traces else math.nan
    for packed in pack([len(trace.tokens) for trace in traces], capacity):
        row = make_row([traces[i] for i in packed], [0.0] * len(packed)).to(device)
        with torch.set_grad_enabled(learn), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = -policy(row).sum() / normalizer
        if learn:
            loss.backward()
        total += loss.item()
    return total


def finetune(
    policy: train.Policy, taught: list, held_out: list, options: argparse.Namespace, dtype: torch.dtype
) -> dict:
    """Trains in place; the losses before, after and during, in nats per token.

    Raises FloatingPointError for a gradient that is not finite.
    """
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay
    )
    steps, batch = options.steps, options.batch
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps, options.warmup))
    losses = {"train": [], "held_out": {0: mean_loss(policy, held_out, options.row_tokens, dtype, learn=False)}}
    print(
        f"distil: {steps} steps of {batch} traces ({steps * batch / len(taught):.1f} epochs), lr {options.lr:.2g}; "
        f"held-out loss of the base {losses['held_out'][0]:.4f}",
        flush=True,
    )
    start = time.monotonic()
    torch.manual_seed(options.seed)
    rng, order = random.Random(f"{options.seed} order"), []
    for step in range(1, steps + 1):
        while len(order) < batch:  # the next epoch
            order += rng.sample(taught, len(taught))
        losses["train"].append(mean_loss(policy, order[:batch], options.row_tokens, dtype, learn=True))
        del order[:batch]
        norm = float(nn.utils.clip_grad_norm_(policy.parameters(), 1.0))
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm {norm} at step {step}, loss {losses['train'][-1]}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        if step % EVERY == 0 or step == steps:
            losses["held_out"][step] = mean_loss(policy, held_out, options.row_tokens, dtype, learn=False)
            print(
                f"distil: step {step}/{steps}  loss {np.mean(losses['train'][-EVERY:]):.4f}"
                f"  held-out {losses['held_out'][step]:.4f}  {time.monotonic() - start:.0f} s",
                flush=True,
            )
    return losses


# --------------------------------------------------------------------------------------------------------------- distil


def clean_base(config: Config) -> str:
    """The model that a run started from; for a run that started from a student, the base of that student."""
    path, seen = config.model.path, set()
    while os.path.exists(record := os.path.join(path, RECORD)) and path not in seen:
        seen.add(path)
        with open(record) as f:
            path = json.load(f)["base"]
    if path in seen:
        raise ConfigError(f"{record} names itself as the base it was made from: name a clean one, --base PATH")
    return path


def find_traces(
    options: argparse.Namespace, configs: list[Config], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Stored], list[str], list[dict]]:
    """The chosen traces of all runs, in the format of the base's tokenizer; the digests of their prompts; and for the
    record what was chosen of each run."""
    elsewhere, places, records = set(), [], []
    for run_dir in options.runs:
        versions = options.versions or window(plot.read(os.path.join(run_dir, "eval.jsonl")), options.margin)
        found, verdicts = candidates(run_dir, versions, options.filter, elsewhere)
        # A run that was best right before it fell leaves few traces there: a student needs many prompts more than the
        # very last publications.
        while not options.versions and len({p.prompt for p in found}) < options.prompts and versions[0] > 0:
            versions = (max(0, versions[0] - (versions[1] - versions[0])), versions[1])
            found, verdicts = candidates(run_dir, versions, options.filter, elsewhere)
        if not found:
            raise ConfigError(
                f"{run_dir}: no rollout of publications {versions[0]}..{versions[1]} to teach: {dict(verdicts)}"
            )
        elsewhere |= {place.tokens for place in found}
        places.append(found)
        records.append(
            {"run": run_dir, "share": options.runs[run_dir], "versions": versions, "verdicts": dict(verdicts)}
        )
    most = [sum(min(n, options.per_prompt) for n in Counter(p.prompt for p in found).values()) for found in places]
    counts = counts_by_share(most, list(options.runs.values()), options.examples)
    traces, prompts = [], []
    for config, found, count, available, record in zip(configs, places, counts, most, records):
        distinct, copies = list(found), list(found.values())
        order = choose([p.prompt for p in distinct], copies, count, options.per_prompt, options.seed)
        chosen = [distinct[i] for i in order]
        record |= {"available": available, "traces": count, "prompts": len({p.prompt for p in chosen})}
        print(
            "distil: {run}: publications {versions[0]}..{versions[1]}; {traces} of {available} distinct traces (at most "
            "{per_prompt} a prompt) to {prompts} prompts; all rollouts: {verdicts}".format(
                per_prompt=options.per_prompt, **record
            ),
            flush=True,
        )
        these = [read(place) for place in chosen]
        own = load_tokenizer(config.model.path)
        if options.template:
            keep_ids = own.get_vocab() == tokenizer.get_vocab()
            these = [render_again(r, tokenizer, options.template, keep_ids) for r in these]
        elif not same_format(own, tokenizer, config.model.template, [r.prompt for r in these]):
            raise ConfigError(
                f"{options.base} has not the tokenizer or the prompt format of {record['run']} ({config.model.path}): "
                "--template chat (or raw) renders the traces again"
            )
        traces += these
        prompts += [p.prompt for p in chosen]
    if sum(counts) < options.examples:
        print(
            f"distil: {sum(counts)} traces in all, not --examples {options.examples}: there are no more in these shares; "
            "--versions reaches further back"
        )
    return traces, prompts, records


def distil(options: argparse.Namespace) -> None:
    """Raises ConfigError for whatever the user can get wrong."""
    if os.path.exists(options.out):
        raise ConfigError(f"{options.out} exists: remove it, or choose another --out")
    configs = [schema.load(os.path.join(run_dir, "config.yaml"), []) for run_dir in options.runs]
    config = configs[0]
    bases = {clean_base(c) for c in configs}
    if options.base is None and len(bases) > 1:
        raise ConfigError(f"the runs started from different models ({', '.join(sorted(bases))}): name one, --base PATH")
    if options.template is None and len({c.model.template for c in configs}) > 1:
        raise ConfigError("the runs have different values of model.template: choose one, --template chat (or raw)")
    options.base = options.base or bases.pop()
    options.row_tokens = options.row_tokens or config.train.max_tokens_per_microbatch
    if options.base == pretrain.PATH:
        pretrain.ensure()
    tokenizer = load_tokenizer(options.base)
    started = time.monotonic()
    traces, prompts, records = find_traces(options, configs, tokenizer)

    torch.set_num_threads(threads(config))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            options.base, dtype=torch.float32, attn_implementation=config.model.attention
        ).to(device)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{options.base} is no usable model ({str(error).splitlines()[0][:200]})") from error
    options.lr = options.lr or default_lr(lm.config.hidden_size)
    longest, largest = max(len(r.tokens) for r in traces), max(max(r.tokens) for r in traces)
    if longest > min(options.row_tokens, lm.config.max_position_embeddings) or largest >= lm.config.vocab_size:
        raise ConfigError(
            f"a trace has {longest} tokens, or token id {largest}: too many for --row-tokens {options.row_tokens}, or for "
            f"{options.base} (context {lm.config.max_position_embeddings}, vocabulary {lm.config.vocab_size})"
        )
    if config.model.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # At the temperature that the run samples with, the student is taught to sample what the run sampled.
    policy = train.Policy(lm, config.rollout.temperature, config.train.logprob_chunk)
    validation = hold_out(prompts, options.held_out, options.seed)
    taught = [as_rollout(r) for r, prompt in zip(traces, prompts) if prompt not in validation]
    held_out = [as_rollout(r) for r, prompt in zip(traces, prompts) if prompt in validation]
    with residual_dropout(lm, options.dropout):
        losses = finetune(policy, taught, held_out, options, getattr(torch, config.model.dtype))
    before, after = losses["held_out"][0], losses["held_out"][options.steps]
    if after >= before and len(held_out) < 20:
        print(f"distil: the held-out loss rose, but {len(held_out)} traces say little: look at the student's pass rate")
    elif after >= before:
        raise ConfigError(
            f"the held-out loss rose from {before:.4f} to {after:.4f}, so nothing is written: lower --lr {options.lr:.2g}, or "
            f"--steps {options.steps}"
        )

    record = {
        "base": options.base, "template": options.template or config.model.template, "runs": records,
        "traces": {"taught": len(taught), "held_out": len(held_out)},
        "options": {name: value for name, value in vars(options).items() if name not in ("runs", "filter")},
        "filter": f"{options.filter.__module__}:{options.filter.__name__}", "losses": losses,
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    write(options.out, lm, tokenizer, record)
    print(f"distil: {options.out} is ready, {record['seconds']:.0f} s; start from it with model.path={options.out}")


def write(out: str, lm: nn.Module, tokenizer: PreTrainedTokenizerBase, record: dict) -> None:
    """The student as a HuggingFace model directory, in float32; beside its place first, then renamed."""
    partial = out.rstrip("/") + ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
    lm.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    with open(os.path.join(partial, RECORD), "w") as f:
        json.dump(record, f, indent=1)
    os.rename(partial, out)


# ----------------------------------------------------------------------------------------------------------------- main


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(message)


def number(kind: type, holds: Callable, what: str) -> Callable:
    """An argparse type: `kind(text)` if it satisfies `holds`; `what` says so in words."""

    def parse(text: str):
        try:
            if holds(value := kind(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")

    return parse


COUNT = number(int, lambda v: v >= 1, "an integer of at least 1")
FRACTION = number(float, lambda v: 0 <= v < 1, "at least 0 and below 1")
ABOVE_ZERO = number(float, lambda v: 1e-9 <= v <= 1e9, "above 0 (1e-9 to 1e9)")


def publications(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"must be FIRST:LAST with FIRST <= LAST, not {text!r}")
    return int(first), int(last)


def function(text: str) -> Callable[[Stored], bool]:
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"no function {text!r}: {error}") from error


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; `runs` becomes {directory: share}. Raises ConfigError."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(prog="distill.py", description=__doc__.split("\n")[0], formatter_class=show_defaults)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN[=SHARE]", help="run directory, and its weight among the runs (default 1)")
    add("--out", help="directory of the student; default, for one run: RUN-reset/student")
    add("--base", help="model that is fine-tuned; default: what the run started from before any reset")
    add("--template", choices=["chat", "raw"], help="render the prompts again, in this format of the base's tokenizer")
    add("--versions", type=publications, metavar="FIRST:LAST", help="publications; default: up to the best evaluation")
    add("--margin", type=FRACTION, default=0.02, help="pass rate below the best one that still counts as its plateau")
    add("--prompts", type=COUNT, default=200, help="prompts with a trace that the default publications reach back for")
    add("--filter", type=function, default=keep, metavar="MODULE:FUNCTION", help="says of a Stored whether to keep it")
    add("--examples", type=COUNT, default=4096, help="traces in all, at most")
    add("--per-prompt", type=COUNT, default=1, help="traces of one prompt, at most; more bring in rarer ones")
    add("--held-out", type=FRACTION, default=0.05, help="fraction of the prompts that the validation loss is taken on")
    add("--steps", type=COUNT, default=120, help="gradient steps; a few epochs, more where there are few traces")
    add("--batch", type=COUNT, default=64, help="traces per step")
    add("--row-tokens", type=COUNT, help="tokens of a packed row; default: the run's train.max_tokens_per_microbatch")
    add("--lr", type=ABOVE_ZERO, help="peak learning rate of AdamW; default: 50 / width^2")
    add("--warmup", type=FRACTION, default=0.02, help="fraction of the steps; then a cosine to 0")
    add("--dropout", type=FRACTION, default=0.15, help="on the output of every attention and MLP")
    add("--weight-decay", type=FRACTION, default=0.001)
    add("--seed", type=int, default=0, help="of the choice, the order and the dropout")
    options = parser.parse_args(argv)
    runs = {}
    for text in options.runs:
        run_dir, _, share = (text, "", "1") if "=" not in text or os.path.isdir(text) else text.rpartition("=")
        run_dir = run_dir.rstrip("/")
        if run_dir in runs:
            raise ConfigError(f"{run_dir} is named twice")
        if not os.path.isdir(run_dir):
            raise ConfigError(f"{run_dir!r} is no run directory")
        try:
            runs[run_dir] = ABOVE_ZERO(share)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"the share of {run_dir} {error}") from error
    if options.out is None and len(runs) > 1:
        raise ConfigError("several runs: name the directory of the student, --out DIR")
    options.runs, options.out = runs, (options.out or f"{run_dir}-reset/student").rstrip("/")
    return options


def main(argv: list[str]) -> int:
    transformers.logging.disable_progress_bar()
    try:
        distil(parse(argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
