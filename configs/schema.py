"""The one place where a run is configured: every key, its type, its default and what it means.

`load(path, overrides)` reads a YAML file, applies `dotted.key=value` overrides, and returns a `Config` whose every value
has been checked. Whatever a user can get wrong here is a `ConfigError`: one line that names the key and what to do.
"""

import difflib
import json
import math
import os
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Optional

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

DEFAULT = "configs/tiny_cpu.yaml"


class ConfigError(Exception):
    """A mistake in the config, the data or the arguments. train.py prints it as one line and exits with code 2."""


@dataclass
class Run:
    name: str = "tiny"  # shown in wandb
    dir: str = "runs/${run.name}"  # everything that the run writes; starting again with the same directory resumes
    seed: int = 0  # sampling of prompts; the base model has its own seed
    resume: str = "auto"  # auto: resume if the directory holds a run | never: refuse to overwrite one
    checkpoint_every: int = 20  # gradient steps between checkpoints (the last step is always saved)
    keep_checkpoints: int = 2  # older ones are removed


@dataclass
class Model:
    path: str = "models/tiny"  # a HuggingFace model directory or hub name, with tokenizer
    template: str = "chat"  # chat: the tokenizer's chat template | raw: the prompt string as it is
    dtype: str = "float32"  # what the forward pass computes in and what the engine serves: float32 | bfloat16
    context_length: int = 0  # prompt + response tokens; 0: the model's own maximum
    attention: str = "sdpa"  # transformers' attn_implementation: sdpa | flash_attention_2 | flex_attention | ...
    activation_checkpointing: bool = False  # recompute each layer in the backward pass
    compile: bool = False  # torch.compile each layer


@dataclass
class Layout:
    trainers: int = 1  # ranks 0..trainers-1 learn (FSDP2)
    engines: int = 1  # SGLang engines
    engine_tp: int = 1  # tensor-parallel size of one engine = ranks that it owns
    share_device: bool = False  # learner and engine ranks on the same GPU: weights then go through gloo
    threads: int = 0  # CPU threads of each learner rank and each engine server; 0: cores / ranks


@dataclass
class SourceGrader:
    name: str = ""  # a name in rewards.GRADERS
    answer: Optional[str] = None  # column with what this grader compares with; default: the source's `answer`
    value: Any = None  # instead of a column: the same for every row, such as the pattern of grader format
    weight: float = 1.0  # with merge: sum
    veto: bool = False  # takes no part in the merge, but a response to which it gives less than 0.5 scores 0


@dataclass
class Source:
    name: str = ""  # label in metrics and in the rollout store; default: what it loads
    kind: str = "generator"  # generator | reasoning_gym | file | hub
    generator: str = "arithmetic"  # kind generator: arithmetic | countdown
    task: str = ""  # kind reasoning_gym: the task's name
    args: dict[str, Any] = field(default_factory=dict)  # options of the generator or task
    path: str = ""  # kind file: .jsonl or .parquet; kind hub: the data set's name, e.g. openai/gsm8k
    subset: Optional[str] = None  # kind hub: its configuration, e.g. main
    split: str = "train"  # kind hub: its split
    prompt: str = "question"  # column with the prompt: a string or a list of chat messages
    answer: str = "answer"  # column with the reference answer
    instruction: str = "{prompt}"  # wraps a string prompt
    system: Optional[str] = None  # system message (template chat)
    grader: Optional[str] = None  # a name in rewards.GRADERS; default: the generator's own
    graders: list[SourceGrader] = field(default_factory=list)  # instead of `grader`: several; the most important first
    merge: str = "sum"  # how they make the task score: sum (weighted mean) | product | all | lexicographic (rewards.py)
    weight: float = 1.0  # share of the prompts


@dataclass
class Data:
    train: list[Source] = field(default_factory=lambda: [Source()])
    eval: list[Source] = field(default_factory=lambda: [Source()])  # generators draw from their held-out problems


@dataclass
class Stage:
    """A stage of the length curriculum: the limits of the groups that begin in it."""

    step: int = 0  # gradient steps taken when it begins, unless rollout.grow_when_truncated begins it sooner
    max_tokens: int = 0  # longest response
    w_len: Optional[float] = None  # weight of the length penalty; default: reward.w_len


@dataclass
class Rollout:
    group_size: int = 16  # G, responses per prompt
    max_tokens: int = 32  # longest response, in training and evaluation; with stages that of the longest stage
    stages: list[Stage] = field(default_factory=list)  # the length curriculum; empty: off
    grow_when_truncated: float = 0.0  # share of truncated responses, over 10 steps, that begins the next stage; 0: off
    temperature: float = 1.0
    top_p: float = 1.0  # below 1 needs mask_replay
    top_k: int = 0  # 0: off; mask replay needs 2..4096 (the engine returns the ids that it kept)
    mask_replay: bool = False  # the learner normalises over exactly the ids that the sampler kept
    routing_replay: bool = False  # MoE: the learner routes each token through the experts that the engine chose
    max_concurrent: int = 128  # responses that one engine generates at a time
    responses_per_request: int = 1  # 1: room is free as soon as a response ends (long ones) | group_size: less HTTP (short)
    stream_interval: int = 32  # tokens after which an engine tells what it has: that much is lost at most when it dies
    early_size: int = 0  # G_early, the two-stage gate; 0: off
    early_range: list[float] = field(default_factory=lambda: [0.05, 0.8])  # pass rate of the early responses to go on
    keep_range: list[float] = field(default_factory=lambda: [0.0, 1.0])  # pass rate of the full group to be learned from
    max_rejected: int = 2000  # groups rejected in a row before the run stops: nothing left to learn, or nothing solved
    grader_workers: int = 1  # processes of each grader that runs in isolation
    grader_timeout: float = 20.0  # seconds for one grade


@dataclass
class Reward:
    w_lang: float = 0.0  # weight of the language part (report: 0.5)
    alpha: float = 0.005  # its cost per foreign word
    w_len: float = 0.0  # weight of the length penalty (report: 0.25)


RUBRIC = """Is the response to this question correct? The reference answer is right; the response may be written in
another form. 10: the final answer is correct. 0: it is wrong, missing, or there are several.

Question:
{question}

Reference answer:
{answer}

Response:
{response}"""


@dataclass
class Judge:
    """The model behind grader `judge` (judge.py)."""

    url: str = ""  # an OpenAI-compatible server, e.g. http://localhost:30000; asked at /v1/chat/completions
    model: str = "default"  # its name there
    rubric: str = RUBRIC  # what it is asked: {response} is needed, {question} and {answer} may be used
    max_tokens: int = 512  # longest reply; one that is cut off gives no score
    temperature: float = 0.0
    timeout: float = 60.0  # seconds for one try
    retries: int = 2  # tries after the first, before a response gets a logged 0.0
    max_concurrent: int = 16  # requests at a time, of each engine rank
    key_env: str = ""  # environment variable that holds the API key; empty: none is sent
    extra: dict[str, Any] = field(default_factory=dict)  # goes into the request unchanged, e.g. {regex: 'Score: \\d'}


@dataclass
class Train:
    steps: int = 100  # gradient steps
    groups_per_step: int = 16  # prompts per gradient step
    steps_per_update: int = 1  # gradient steps per published version
    lr: float = 1e-6
    beta1: float = 0.95
    beta2: float = 0.95
    adam_eps: float = 1e-15
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest gradient norm
    objective: str = "rocket"  # an entry of objective.py: rocket, fixed_clip, no_outer_clip (the recipe without a part) |
    # ppo, grpo, dr_grpo, dapo, gspo, cispo, tis, icepop (peers' variants: their own constants, not the keys below)
    eps: float = 0.6  # trust region: ratios 1-eps .. 1/(1-eps)+k
    k_max: float = 2.5  # the entropy controller's k runs from 0 to k_max
    delta: float = 0.25  # its step
    target_entropy: float = 0.3  # nats per token
    r_min: float = 0.0  # outer clip
    r_max: float = 50.0
    max_tokens_per_microbatch: int = 4096  # tokens of one packed row
    logprob_chunk: int = 1024  # tokens whose logits exist at a time


@dataclass
class Staleness:
    max: int = 2  # versions; 0 is strictly on-policy


@dataclass
class Sync:
    bucket_mb: int = 64  # size of a broadcast bucket; a larger parameter gets a bucket of its own
    verify: bool = False  # after every publication compare every engine parameter bitwise


@dataclass
class Eval:
    every: int = 10  # gradient steps; 0: only before the first and after the last
    prompts: int = 128  # held-out prompts
    k: int = 1  # samples per prompt
    temperature: float = 1.0  # whatever rollout.top_p and top_k are, evaluation samples from the whole softmax


@dataclass
class Alarms:
    """Thresholds of alarms.py; 0 turns one off."""

    entropy_low: float = 0.01  # train/entropy below it: the policy says one thing only
    entropy_high: float = 4.0  # train/entropy above it: noise
    mismatch_kl: float = 0.03  # train/mismatch_kl above it: learner and engines are no longer near the same policy
    grad_norm: float = 10.0  # train/grad_norm (before clipping) above it
    ess: float = 0.5  # train/ess, the effective share of the batch, below it
    repetition: float = 0.25  # rollout/repetition, the share of responses that end in a loop, above it
    truncated_frac: float = 0.5  # rollout/truncated_frac above it
    after: int = 10  # gradient steps before the first that counts
    patience: int = 3  # steps in a row beyond a threshold that make an alarm
    action: str = "warn"  # warn: say it | stop: save, and exit with code 1


@dataclass
class Engine:
    args: dict[str, Any] = field(default_factory=dict)  # go to sglang.launch_server unchanged (underscores become dashes)


@dataclass
class Faults:
    join_timeout: float = 300.0  # seconds for all ranks to find each other
    start_timeout: float = 600.0  # seconds for an engine to come up
    request_timeout: float = 1800.0  # seconds that a generation request may go without a token
    request_retries: int = 5  # failures of one request in a row, without a further token, until the run is given up
    sync_timeout: float = 600.0  # seconds for one weight publication
    stop_timeout: float = 25.0  # seconds from a signal to the end of the process
    stall_after: float = 3600.0  # seconds without a gradient step, an evaluation or a checkpoint until the run is given up
    probe_every: float = 10.0  # seconds without a sign of life from an engine until it is asked for one token
    probe_timeout: float = 120.0  # seconds that an engine may take over it; set it above the longest prefill
    backoff: float = 1.0  # seconds until an engine that failed is started again; doubled each time, up to 60
    restarts_per_hour: int = 10  # of one engine: at one more its rank gives it up
    engine_memory_gb: float = 0.0  # resident memory of one engine's processes from which it is started again; 0: any
    min_engines: int = 1  # with fewer that are not given up the job ends
    max_restarts: int = 3  # of the whole job, by torchrun, when a rank has failed (`python train.py` passes it on)


@dataclass
class Wandb:
    project: str = "model-rocket"
    mode: str = "auto"  # auto: online when logged in, else offline | online | offline | disabled


@dataclass
class Config:
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    layout: Layout = field(default_factory=Layout)
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    judge: Judge = field(default_factory=Judge)
    train: Train = field(default_factory=Train)
    staleness: Staleness = field(default_factory=Staleness)
    sync: Sync = field(default_factory=Sync)
    eval: Eval = field(default_factory=Eval)
    alarms: Alarms = field(default_factory=Alarms)
    engine: Engine = field(default_factory=Engine)
    faults: Faults = field(default_factory=Faults)
    wandb: Wandb = field(default_factory=Wandb)
    dry_run: bool = False  # validate, print the resolved config, the rank table and the memory estimate, exit 0

    @property
    def stages(self) -> list[Stage]:
        """The length curriculum with every value filled in; without one, a single stage."""
        stages = self.rollout.stages or [Stage(0, self.rollout.max_tokens)]
        return [replace(s, w_len=self.reward.w_len if s.w_len is None else s.w_len) for s in stages]

    @property
    def groups_per_update(self) -> int:
        return self.train.groups_per_step * self.train.steps_per_update

    @property
    def world_size(self) -> int:
        return self.layout.trainers + self.layout.engines * self.layout.engine_tp


# key -> (what it must satisfy, in words; the test)
_POSITIVE = ("must be at least 1", lambda v: v >= 1)
_NOT_NEGATIVE = ("must not be negative", lambda v: v >= 0)
_ABOVE_ZERO = ("must be above 0", lambda v: v > 0)


def _one_of(*names):
    return f"must be one of {', '.join(names)}", lambda v: v in names


def _between(low, high):
    return f"must be between {low} and {high}", lambda v: low <= v <= high


RULES = {
    "run.resume": _one_of("auto", "never"),
    "run.checkpoint_every": _POSITIVE,
    "run.keep_checkpoints": _POSITIVE,
    "model.template": _one_of("chat", "raw"),
    "model.dtype": _one_of("float32", "bfloat16"),
    "model.context_length": _NOT_NEGATIVE,
    "layout.trainers": _POSITIVE,
    "layout.engines": _POSITIVE,
    "layout.engine_tp": _POSITIVE,
    "layout.threads": _NOT_NEGATIVE,
    "rollout.group_size": ("must be at least 2: an advantage is relative to the group", lambda v: v >= 2),
    "rollout.max_tokens": _POSITIVE,
    "rollout.grow_when_truncated": _between(0, 1),
    "rollout.temperature": ("must be above 0: a greedy sampler has no logprobs to learn from", lambda v: v > 0),
    "rollout.top_p": ("must be above 0 and at most 1", lambda v: 0 < v <= 1),
    "rollout.top_k": _between(0, 4096),
    "rollout.max_concurrent": _POSITIVE,
    "rollout.responses_per_request": _POSITIVE,
    "rollout.stream_interval": _POSITIVE,
    "rollout.early_size": _NOT_NEGATIVE,
    "rollout.max_rejected": _POSITIVE,
    "rollout.grader_workers": _POSITIVE,
    "rollout.grader_timeout": _ABOVE_ZERO,
    "reward.w_lang": _NOT_NEGATIVE,
    "reward.alpha": _NOT_NEGATIVE,
    "reward.w_len": _NOT_NEGATIVE,
    "judge.rubric": ("must contain {response}", lambda v: "{response}" in v),
    "judge.max_tokens": _POSITIVE,
    "judge.temperature": _NOT_NEGATIVE,
    "judge.timeout": _ABOVE_ZERO,
    "judge.retries": _between(0, 10),
    "judge.max_concurrent": _POSITIVE,
    "train.steps": _NOT_NEGATIVE,
    "train.groups_per_step": _POSITIVE,
    "train.steps_per_update": _POSITIVE,
    "train.lr": _ABOVE_ZERO,
    "train.beta1": ("must be at least 0 and below 1", lambda v: 0 <= v < 1),
    "train.beta2": ("must be at least 0 and below 1", lambda v: 0 <= v < 1),
    "train.adam_eps": _ABOVE_ZERO,
    "train.weight_decay": _NOT_NEGATIVE,
    "train.clip_grad": _ABOVE_ZERO,
    "train.eps": ("must be above 0 and below 1", lambda v: 0 < v < 1),
    "train.k_max": _NOT_NEGATIVE,
    "train.delta": _NOT_NEGATIVE,
    "train.target_entropy": _NOT_NEGATIVE,
    "train.r_min": _NOT_NEGATIVE,
    "train.r_max": ("must be above 1", lambda v: v > 1),
    "train.max_tokens_per_microbatch": _POSITIVE,
    "train.logprob_chunk": _POSITIVE,
    "staleness.max": _NOT_NEGATIVE,
    "sync.bucket_mb": _POSITIVE,
    "eval.every": _NOT_NEGATIVE,
    "eval.prompts": _POSITIVE,
    "eval.k": _POSITIVE,
    "eval.temperature": _ABOVE_ZERO,
    "alarms.entropy_low": _NOT_NEGATIVE,
    "alarms.entropy_high": _NOT_NEGATIVE,
    "alarms.mismatch_kl": _NOT_NEGATIVE,
    "alarms.grad_norm": _NOT_NEGATIVE,
    "alarms.ess": _between(0, 1),
    "alarms.repetition": _between(0, 1),
    "alarms.truncated_frac": _between(0, 1),
    "alarms.after": _NOT_NEGATIVE,
    "alarms.patience": _POSITIVE,
    "alarms.action": _one_of("warn", "stop"),
    "faults.join_timeout": _ABOVE_ZERO,
    "faults.start_timeout": _ABOVE_ZERO,
    "faults.request_timeout": _ABOVE_ZERO,
    "faults.request_retries": _NOT_NEGATIVE,
    "faults.sync_timeout": _ABOVE_ZERO,
    "faults.stop_timeout": _ABOVE_ZERO,
    "faults.stall_after": _ABOVE_ZERO,
    "faults.probe_every": _ABOVE_ZERO,
    "faults.probe_timeout": _ABOVE_ZERO,
    "faults.backoff": _ABOVE_ZERO,
    "faults.restarts_per_hour": _NOT_NEGATIVE,
    "faults.engine_memory_gb": _NOT_NEGATIVE,
    "faults.min_engines": _POSITIVE,
    "faults.max_restarts": _NOT_NEGATIVE,
    "wandb.mode": _one_of("auto", "online", "offline", "disabled"),
}


def load(path: Optional[str], overrides: list[str]) -> Config:
    """The checked config of a YAML file (default: configs/tiny_cpu.yaml) with `dotted.key=value` overrides on top.

    Raises ConfigError: file missing or not YAML, unknown key (with the nearest valid one), wrong type, value out of
    range, or keys that contradict each other.
    """
    path = path or os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), DEFAULT)
    if not os.path.isfile(path):
        raise ConfigError(f"config file not found: {path}")
    for item in overrides:
        if item.find("=") < 1:
            raise ConfigError(f"argument {item!r} is neither a .yaml file nor key=value")
    try:
        layers = [OmegaConf.load(path), *(OmegaConf.from_dotlist(["=" + item.partition("=")[2]]) for item in overrides)]
    except Exception as error:  # PyYAML and OmegaConf raise many unrelated types for text that does not parse
        raise ConfigError(f"{path} or an override is not valid YAML: {_one_line(error)}") from error
    content, *values = (OmegaConf.to_container(layer, resolve=False) for layer in layers)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold sections of keys, not {content!r:.60}")
    assignments = list(content.items()) + [(item.partition("=")[0], v[""]) for item, v in zip(overrides, values)]
    merged = OmegaConf.structured(Config)
    for key, value in assignments:
        try:
            OmegaConf.update(merged, str(key), value)
        except (ConfigKeyError, ConfigAttributeError) as error:
            raise ConfigError(_unknown_key(error, key)) from error
        except (OmegaConfBaseException, TypeError) as error:
            named = getattr(error, "full_key", None) or ""
            if not named.startswith(str(key)):  # OmegaConf checks the entries of a list before it knows where they belong
                named = f"{key}[...].{named}" if named else str(key)
            raise ConfigError(f"{named}: {_one_line(error)}") from error
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError(f"{error.full_key}: {_one_line(error)}") from error
    check(config)
    return config


def check(config: Config) -> None:
    """Raises ConfigError if a value is out of range or two keys contradict each other."""
    for key, (rule, holds) in RULES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if isinstance(value, float) and not math.isfinite(value) or not holds(value):
            raise ConfigError(f"{key}: {rule}, not {_short(value)}")
    rollout, train = config.rollout, config.train
    for name in ("early_range", "keep_range"):
        low_high = getattr(rollout, name)
        if len(low_high) != 2 or not 0 <= low_high[0] <= low_high[1] <= 1:
            raise ConfigError(f"rollout.{name}: must be [low, high] with 0 <= low <= high <= 1, not {low_high}")
    if (rollout.top_p < 1 or rollout.top_k > 0) and not rollout.mask_replay:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: the learner would normalise over tokens that "
            "the sampler excluded; set rollout.mask_replay=true and a top_k of 2..4096, or top_p=1 and top_k=0"
        )
    if rollout.mask_replay and not 2 <= rollout.top_k <= 4096:
        raise ConfigError(f"rollout.top_k: mask_replay needs 2..4096, not {rollout.top_k}")
    if rollout.early_size >= rollout.group_size:
        raise ConfigError(f"rollout.early_size: must be below rollout.group_size={rollout.group_size}")
    if rollout.max_concurrent < rollout.group_size:
        raise ConfigError(f"rollout.max_concurrent: must hold one group of {rollout.group_size}")
    check_stages(rollout)
    if train.r_min >= 1 - train.eps:
        raise ConfigError(f"train.r_min: must be below 1 - train.eps = {1 - train.eps:g}, not {train.r_min:g}")
    if train.r_max < 1 / (1 - train.eps) + train.k_max:
        widest = 1 / (1 - train.eps) + train.k_max
        raise ConfigError(f"train.r_max: must not be below 1/(1 - train.eps) + train.k_max = {widest:g}, not {train.r_max:g}")
    if 0 < config.alarms.entropy_high <= config.alarms.entropy_low:
        raise ConfigError(f"alarms.entropy_high: must be above alarms.entropy_low={config.alarms.entropy_low:g}, or 0")
    if not config.data.train or not config.data.eval:
        raise ConfigError("data.train and data.eval: each needs at least one source")
    for split in ("train", "eval"):
        for i, source in enumerate(getattr(config.data, split)):
            if source.kind not in ("generator", "reasoning_gym", "file", "hub"):
                raise ConfigError(f"data.{split}[{i}].kind: must be generator, reasoning_gym, file or hub")
            if not 0 < source.weight <= 1e6:
                raise ConfigError(f"data.{split}[{i}].weight: must be above 0 and at most 1e6, not {source.weight}")
            if "{prompt}" not in source.instruction:
                raise ConfigError(f"data.{split}[{i}].instruction: must contain {{prompt}}")
            check_graders(source, f"data.{split}[{i}]")
            names = {source.grader, *(grader.name for grader in source.graders)}
            if "judge" in names and not config.judge.url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"judge.url: data.{split}[{i}] has grader judge, which needs the http(s):// address of an "
                    f"OpenAI-compatible server, not {config.judge.url!r}"
                )


def check_graders(source: Source, key: str) -> None:
    """Raises ConfigError where `graders` and `merge` of a source make no sense together."""
    names = [grader.name for grader in source.graders]
    if source.merge not in ("sum", "product", "all", "lexicographic"):
        raise ConfigError(f"{key}.merge: must be sum, product, all or lexicographic, not {source.merge!r}")
    if source.grader and names:
        raise ConfigError(f"{key}: has both grader and graders; name all in graders")
    if source.graders and all(grader.veto for grader in source.graders):
        raise ConfigError(f"{key}.graders: all are vetoes, so nothing gives a score")
    for i, grader in enumerate(source.graders):
        if names.index(grader.name) < i:
            raise ConfigError(f"{key}.graders[{i}]: {grader.name} is named twice")
        if not (grader.weight > 0 and math.isfinite(grader.weight)):
            raise ConfigError(f"{key}.graders[{i}].weight: must be above 0, not {grader.weight}")
        if grader.weight != 1 and (source.merge != "sum" or grader.veto):
            raise ConfigError(f"{key}.graders[{i}].weight: acts only with merge: sum and without veto")
        if grader.answer is not None and grader.value is not None:
            raise ConfigError(f"{key}.graders[{i}]: has both answer (a column) and value; choose one")


def check_stages(rollout: Rollout) -> None:
    """Raises ConfigError if the length curriculum contradicts itself."""
    stages = rollout.stages
    if not stages:
        if rollout.grow_when_truncated:
            raise ConfigError("rollout.grow_when_truncated: needs rollout.stages to grow through")
        return
    for i, stage in enumerate(stages):
        name = f"rollout.stages[{i}]"
        if stage.max_tokens < 1:
            raise ConfigError(f"{name}.max_tokens: must be at least 1, not {stage.max_tokens}")
        if stage.w_len is not None and not 0 <= stage.w_len < math.inf:
            raise ConfigError(f"{name}.w_len: must not be negative, not {stage.w_len}")
        if i == 0 and stage.step != 0:
            raise ConfigError(f"{name}.step: the first stage begins at step 0, not {stage.step}")
        if i > 0 and stage.step <= stages[i - 1].step:
            raise ConfigError(f"{name}.step: must be above that of the stage before, {stages[i - 1].step}")
    longest = max(stage.max_tokens for stage in stages)
    if rollout.max_tokens != longest:
        raise ConfigError(
            f"rollout.max_tokens: must be {longest}, that of the longest of rollout.stages, not {rollout.max_tokens}: "
            "prompts must leave room for it from the start"
        )


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def to_json(config: Config) -> str:
    return json.dumps(OmegaConf.to_container(OmegaConf.structured(config), resolve=True))


def flatten(config: Config) -> dict[str, Any]:
    """{"section.key": value}, with the sources of a list one by one: {"data.train[0].kind": "file"}"""
    sections = json.loads(to_json(config))
    for split, sources in sections.pop("data").items():
        sections |= {f"data.{split}[{i}]": source for i, source in enumerate(sources)}
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }


def keys(cls=Config, prefix="") -> list[str]:
    """Every dotted key of the schema."""
    names = []
    for f in fields(cls):
        names.append(prefix + f.name)
        if is_dataclass(f.type):
            names += keys(f.type, prefix + f.name + ".")
    return names


def _short(value: Any) -> str:
    """A value within an error of one line."""
    text = str(value)
    return text if len(text) < 80 and "\n" not in text else repr(text)[:80] + "..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n    full_key")[0].split())


def _unknown_key(error: ConfigKeyError | ConfigAttributeError, assigned: str) -> str:
    key, valid = error.full_key, keys()
    if error.object_type in (Source, SourceGrader, Stage):
        if not key.startswith(assigned):  # OmegaConf checks the entries of a list before it knows where they belong
            key = f"{assigned}[...].{key}"
        valid = [f"{key.rpartition('.')[0]}.{f.name}" for f in fields(error.object_type)]
    # the same name in another section is a likelier mistake than a similar name in this one
    moved = [k for k in valid if k.rpartition(".")[2] == key.rpartition(".")[2]]
    nearest = moved or difflib.get_close_matches(key, valid, n=1, cutoff=0.7)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown config key {key}{hint}"
