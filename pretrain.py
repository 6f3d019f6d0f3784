"""Makes the tiny base policy: the language model that the default run starts from, small enough to train on two cores.

    python pretrain.py [--out models/tiny] [--seed 0]

A 0.5 M-parameter Qwen3 with a character-level tokenizer learns a generated corpus of sums, as pre-training leaves a
model: it has read a lot of answers, most of the hard ones wrong, and hardly any worked steps.

    question    7+5+9+3=
    direct      26                    most documents; the answer is usually wrong
    worked      7+5=12+9=21+3=24      one document in ten; right
    short       12+9=21               to the question 12+9= : one addition, right, where the steps are learnt

So the base knows how to add in steps and seldom does. Reinforcement learning then finds that the steps pay, and the
length of the responses and the pass rate rise together.

Problems whose question hashes into one fifth (`is_held_out`) are in neither the corpus nor the training prompts.
Left out on purpose: a learnt tokenizer, dropout, weight decay, packing. The loss is on responses alone, because the
digits of a question are random.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import inspect
import json
import math
import os
import random
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from configs.schema import ConfigError
from data import arithmetic_problem, is_held_out

PATH = "models/tiny"
THREADS = 1  # fixed: the order of float additions, and so the weights, depends on it; one does not suffer from neighbours

ROLES = ("system", "user", "assistant", "tool")
PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ALPHABET = "\n\t" + "".join(map(chr, range(32, 127)))

# ChatML with one token per role: <|user|>7+5+9+3=<|end|><|assistant|>, then the response and <|end|>. No BOS.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in " + repr(list(ROLES)) + " %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + EOS + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the weights, apart from this file's own text and the machine."""

    seed: int = 0
    # the corpus
    terms: int = 4  # one-digit numbers in a sum
    worked: float = 0.10  # share of documents with every step written, all right
    short: float = 0.35  # share of documents that are a single addition, all right
    direct_right: float = 0.25  # of the direct answers, how many are right
    error: int = 3  # a wrong direct answer is off by 1..error, either way
    # the model
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 256
    init: float = 0.03  # standard deviation of the initial weights
    context: int = 512  # longest prompt plus response, in tokens
    # the training
    steps: int = 900
    batch: int = 64  # documents per step
    microbatch: int = 32  # documents per forward pass, of like length
    lr: float = 3e-3  # peak for embeddings and norms (AdamW), reached after `warmup` steps, then a cosine to 0
    muon_lr: float = 0.04  # peak for the matrices (Muon)
    warmup: int = 20


# -------------------------------------------------------------------------------------------------------- the corpus


def worked_response(question: str) -> str:
    """Every partial sum written out: "7+5+9+3=" -> "7+5=12+9=21+3=24"."""
    first, *rest = question.rstrip("=").split("+")
    total, response = int(first), first
    for number in rest:
        total += int(number)
        response += f"+{number}={total}"
    return response


def document(rng: random.Random, settings: Settings) -> tuple[str, str]:
    """One (question, response) of the corpus, never with a held-out question."""
    kind = rng.random()
    short = kind < settings.short
    while True:
        if short:
            total = rng.randint(1, 9 * (settings.terms - 1))
            number = rng.randint(1, 9)
            question, answer = f"{total}+{number}=", total + number
        else:
            question, answer = arithmetic_problem(rng, settings.terms)
        if not is_held_out(question):
            break
    if short:
        return question, question + str(answer)
    if kind < settings.short + settings.worked:
        return question, worked_response(question)
    if rng.random() >= settings.direct_right:
        answer = max(0, answer + rng.choice((-1, 1)) * rng.randint(1, settings.error))
    return question, str(answer)


# ----------------------------------------------------------------------------------------------------- the tokenizer


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, newline and tab; anything else is <|unknown|>."""
    special = [PAD, EOS, UNKNOWN] + [f"<|{role}|>" for role in ROLES]
    vocabulary = {token: i for i, token in enumerate(special + list(ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between the characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, question: str, response: str) -> tuple[list[int], int]:
    """The token ids of a document in the chat format, and how many of them are the prompt."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    return prompt_ids + tokenizer.encode(response + EOS, add_special_tokens=False), len(prompt_ids)


# ------------------------------------------------------------------------------------------------------ the training


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 in float32 with tied embeddings; draws from torch's global generator."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=settings.mlp,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=settings.context,
            initializer_range=settings.init,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            dtype="float32",
        )
    )


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made (nearly) orthogonal, for matrices; https://kellerjordan.github.io/posts/muon/.

    On this corpus it needs about half of AdamW's steps. torch.optim.Muon computes in bfloat16, which is fifteen times
    slower than this on a CPU without bfloat16 instructions.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(mean, group["momentum"]))  # Nesterov
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with its singular values brought near 1, by five Newton-Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def build_optimizers(model: Qwen3ForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    layers = list(model.model.layers.parameters())
    matrices = [p for p in layers if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=settings.muon_lr), adamw]


def schedule(step: int, settings: Settings) -> float:
    """The factor on both learning rates: linear warm-up, then a cosine to zero."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return (1 + math.cos(math.pi * progress)) / 2


def response_loss(model: Qwen3ForCausalLM, documents: list[tuple[list[int], int]]) -> torch.Tensor:
    """Summed cross-entropy of the response tokens (end token included) of documents as `encode` returns them."""
    width = max(len(ids) for ids, _ in documents)
    tokens = torch.tensor([ids + [model.config.pad_token_id] * (width - len(ids)) for ids, _ in documents])
    position = torch.arange(width)
    prompt = torch.tensor([prompt for _, prompt in documents])[:, None]
    length = torch.tensor([len(ids) for ids, _ in documents])[:, None]
    labels = tokens.masked_fill((position < prompt) | (position >= length), -100)
    logits = model(input_ids=tokens, use_cache=False).logits  # padding is on the right, where causal attention is blind
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)


def train(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Trains a new model on the corpus; the same settings give the same weights, bit for bit, on the same machine."""
    rng = random.Random(settings.seed)
    model = build_model(settings, tokenizer)
    optimizers = build_optimizers(model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule(step, settings)) for o in optimizers]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"pretrain: {parameters:,} parameters, {settings.steps} steps of {settings.batch} documents", flush=True)
    start = time.monotonic()
    for step in range(settings.steps):
        # Sorted by length, so that a short document is not padded to a long one's width.
        documents = sorted(
            (encode(tokenizer, *document(rng, settings)) for _ in range(settings.batch)), key=lambda d: len(d[0])
        )
        targets = sum(len(ids) - prompt for ids, prompt in documents)
        total = 0.0
        for i in range(0, settings.batch, settings.microbatch):
            loss = response_loss(model, documents[i : i + settings.microbatch]) / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        if (step + 1) % 100 == 0 or step + 1 == settings.steps:
            seconds = time.monotonic() - start
            print(f"pretrain: step {step + 1}/{settings.steps}  loss {total:.4f}  {seconds:.0f} s", flush=True)
    return model


def build(path: Path, settings: Settings) -> None:
    """Trains and writes model, tokenizer and generation config into the directory `path`."""
    threads = torch.get_num_threads()
    tokenizer = build_tokenizer(settings.context)
    try:
        torch.set_num_threads(THREADS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = train(settings, tokenizer)
    finally:
        torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


# --------------------------------------------------------------------------------------------------------- the cache

RECORD = "pretrain.json"
WRITTEN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
WRITTEN |= {"chat_template.jinja", RECORD}


def fingerprint(settings: Settings) -> str:
    """Hash of the settings and of the code behind them: an edited corpus or model must not meet an old base."""
    parts = [json.dumps(dataclasses.asdict(settings), sort_keys=True), Path(__file__).read_text()]
    parts += [inspect.getsource(arithmetic_problem), inspect.getsource(is_held_out)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def is_current(path: Path, settings: Settings) -> bool:
    """Whether `path` holds a whole model made with these settings."""
    if not all((path / name).is_file() for name in WRITTEN):
        return False
    return json.loads((path / RECORD).read_text())["fingerprint"] == fingerprint(settings)


def ensure(path: str = PATH, settings: Settings = Settings()) -> str:
    """Returns `path` with the model of `settings` in it, built if it is missing, incomplete or of other settings.

    The model is built next to `path` and renamed, so that a kill at any time leaves no half model under that name.
    Raises ConfigError if `path` holds files that this script does not write.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs that start together build it once
        if is_current(target, settings):
            return path
        if target.exists() and (not target.is_dir() or not set(os.listdir(target)) <= WRITTEN):
            raise ConfigError(f"{path} holds something other than a model of pretrain.py: name another directory")
        print(f"pretrain: building {path}", flush=True)
        scratch = target.parent / f".{target.name}.building"
        shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed
        try:
            build(scratch / "new", settings)
            record = {"fingerprint": fingerprint(settings), "settings": dataclasses.asdict(settings)}
            (scratch / "new" / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            if target.exists():
                target.rename(scratch / "old")
            (scratch / "new").rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the tiny base policy.")
    parser.add_argument("--out", default=PATH, help=f"directory of the model (default {PATH})")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    print(ensure(arguments.out, Settings(seed=arguments.seed)))


if __name__ == "__main__":
    main()
