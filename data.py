"""Prompts: which one a ticket stands for, and its token ids.

A run numbers its prompts: ticket t always means the same prompt, on every rank and after every resume, because
`Mixture.row(t)` is a pure function of the sources, the seed and t. So nothing about the position in the data has to be
saved but one number.

- Sources take turns by weight: every 1,000 tickets hold each source's exact share, evenly spread.
- A finite source (file, hub) gives each of its rows once per epoch, every epoch in a new order.
- A generator gives an endless stream. One fifth of its problems, by a hash of the question, is held out: training never
  draws them, evaluation draws nothing else.

To add a generator: write `name(rng, **options) -> (question, answer)` and add it to GENERATORS with its grader.
"""

import difflib
import functools
import inspect
import json
import os
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import ConfigError, Source, SourceGrader
from rewards import GRADERS, find_grader

Prompt = str | list[dict[str, str]]  # text, or chat messages {"role": ..., "content": ...}

BLOCK = 1000  # tickets in which every source has its exact share
MAX_DRAWS = 500  # tries for a problem of the right split that fits, before a generator is given up


@dataclass(frozen=True)
class Reference:
    """What one grader compares the responses to a prompt with."""

    grader: str  # a name in rewards.GRADERS
    answer: Any  # what that grader needs; JSON
    weight: float = 1.0
    veto: bool = False


@dataclass(frozen=True)
class Row:
    """One problem: a prompt, and what its responses are graded against."""

    prompt_id: str
    source: str
    prompt: Prompt
    references: tuple[Reference, ...]  # the most important first
    merge: str = "sum"  # how their scores make the task score (rewards.MERGES)


# ----------------------------------------------------------------------------------------------------------- generators


def arithmetic_problem(rng: random.Random, terms: int = 4) -> tuple[str, int]:
    """A sum of `terms` digits from 1 to 9, as ("7+5+9+3=", 24)."""
    numbers = [rng.randint(1, 9) for _ in range(terms)]
    return "+".join(map(str, numbers)) + "=", sum(numbers)


def countdown_problem(rng: random.Random, terms: int = 4, largest: int = 50) -> tuple[str, dict]:
    """A countdown game that has a solution: reach a target with every one of `terms` numbers from 1 to `largest`."""
    numbers = [rng.randint(1, largest) for _ in range(terms)]
    values = list(numbers)
    while len(values) > 1:  # join two values at random; every value on the way is a positive integer
        a, b = (values.pop(rng.randrange(len(values))) for _ in range(2))
        a, b = max(a, b), min(a, b)
        values.append(rng.choice([a + b, a * b] + [a - b] * (a > b) + [a // b] * (a % b == 0)))
    question = (
        f"Reach {values[0]} with the numbers {', '.join(map(str, numbers))}: write one expression that uses each of "
        "them exactly once, with + - * / and brackets."
    )
    return question, {"numbers": numbers, "target": values[0]}


GENERATORS = {"arithmetic": (arithmetic_problem, "number"), "countdown": (countdown_problem, "countdown")}


def is_held_out(question: str) -> bool:
    """Whether a generated problem is kept for evaluation: one fifth of all, by a hash of the question."""
    return zlib.crc32(question.encode()) % 5 == 0


# -------------------------------------------------------------------------------------------------------------- sources


class Generated:
    """An endless source. `make(rng)` gives {"question", "answer", ...}; its problems split into training and held out."""

    def __init__(
        self, label: str, name: str, make: Callable, row: Callable[..., Row], fits: Callable[[Row], bool], seed: int
    ):
        self.label, self.name, self.make, self.new_row, self.fits, self.seed = label, name, make, row, fits, seed
        self.skipped = 0
        self.draw(0, held_out=False)  # bad options show here

    def draw(self, visit: int, held_out: bool) -> Row:
        """The problem of one visit: the first of its stream that is in the right split and fits."""
        part = "eval" if held_out else "train"
        rng = random.Random(f"{self.seed} {self.name} {part} {visit}")
        too_long = 0
        for _ in range(MAX_DRAWS):
            problem = self.make(rng)
            if is_held_out(problem["question"]) != held_out:
                continue
            try:
                row = self.new_row(f"{part}/{visit}", problem)
            except ValueError as error:
                raise ConfigError(f"{self.label}: problem {problem['question'][:60]!r} {error}") from error
            if self.fits(row):
                self.skipped += too_long
                return row
            too_long += 1
        raise ConfigError(
            f"{self.label}: {too_long} of {MAX_DRAWS} problems drawn are longer than the context, the others "
            f"{'are for training' if held_out else 'are held out'}; choose easier options or a longer context"
        )

    def eval_rows(self, n: int) -> list[Row]:
        """Up to n different held-out problems; fewer where the generator has no more."""
        rows: dict[str, Row] = {}
        for visit in range(20 * n):
            if len(rows) == n:
                break
            row = self.draw(visit, held_out=True)
            rows.setdefault(plain_text(row.prompt), row)
        return list(rows.values())


class Finite:
    """A source with a fixed list of rows; those that do not fit the context are left out and counted."""

    def __init__(self, label: str, name: str, rows: list[Row], fits: Callable[[Row], bool], seed: int):
        self.rows = [row for row in rows if fits(row)]
        self.skipped = len(rows) - len(self.rows)
        self.name, self.seed = name, seed
        if not self.rows:
            raise ConfigError(f"{label}: all {len(rows)} prompts are longer than the context")
        self.order = functools.lru_cache(maxsize=2)(self.order)

    def order(self, epoch: int | str) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"{self.seed} {self.name} {epoch}").shuffle(order)
        return order

    def draw(self, visit: int, held_out: bool) -> Row:
        epoch, position = divmod(visit, len(self.rows))
        return self.rows[self.order(epoch)[position]]

    def eval_rows(self, n: int) -> list[Row]:
        return [self.rows[i] for i in self.order("eval")[:n]]


def shares(weights: Sequence[float], n: int) -> list[int]:
    """n split by weight, by largest remainder; nobody gets nothing while n suffices."""
    exact = [n * w / sum(weights) for w in weights]
    counts = [max(int(x), 1) if n >= len(weights) else int(x) for x in exact]
    by_lack = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    while (missing := n - sum(counts)) != 0:
        for i in by_lack[:missing] if missing > 0 else [max(range(len(counts)), key=counts.__getitem__)]:
            counts[i] += 1 if missing > 0 else -1
    return counts


class Mixture:
    """The prompts of a run. `skipped` counts the rows that were left out because their prompts are too long."""

    def __init__(self, sources: list[Generated | Finite], weights: list[float], seed: int, held_out: bool):
        self.sources, self.weights, self.seed, self.held_out = sources, weights, seed, held_out
        self.counts = shares(weights, BLOCK if len(sources) > 1 else 1)
        self.block = functools.lru_cache(maxsize=4)(self.block)

    @property
    def skipped(self) -> int:
        return sum(source.skipped for source in self.sources)

    def block(self, index: int) -> list[tuple[int, int]]:
        """Of each ticket of a block: its source, and how many tickets of this block the source had before."""
        rng = random.Random(f"{self.seed} block {index}")
        turns = [((k + rng.random()) / count, s, k) for s, count in enumerate(self.counts) for k in range(count)]
        return [(s, k) for _, s, k in sorted(turns)]

    def row(self, ticket: int) -> Row:
        """The prompt of a ticket (from 0); always the same one."""
        block, position = divmod(ticket, sum(self.counts))
        source, before = self.block(block)[position]
        return self.sources[source].draw(block * self.counts[source] + before, self.held_out)

    def eval_rows(self, n: int) -> list[Row]:
        """n rows for evaluation, spread over the sources by weight, always the same; fewer where one has no more."""
        return [
            row for source, k in zip(self.sources, shares(self.weights, n), strict=True) for row in source.eval_rows(k)
        ]


# ----------------------------------------------------------------------------------------------------- opening a source


def open_sources(
    sources: list[Source], seed: int, split: str, fits: Callable[[Row], bool] = lambda row: True
) -> Mixture:
    """The mixture of `data.train` (split "train") or `data.eval` (split "eval": generators give held-out problems).

    `fits(row)` says whether a prompt fits the context. Raises ConfigError for whatever is wrong with a source.
    """
    if not sources:
        raise ConfigError(f"data.{split}: names no source")
    names, opened = set(), []
    for i, source in enumerate(sources):
        name = source.name or default_name(source)
        label = f"data.{split}[{i}] ({name})"
        if name in names:
            raise ConfigError(f"{label}: two sources have this name; give one of them another (name: ...)")
        if not source.weight > 0:
            raise ConfigError(f"{label}: weight must be above 0, not {source.weight}")
        if "{prompt}" not in source.instruction:
            raise ConfigError(f"{label}: instruction must contain {{prompt}}")
        names.add(name)
        opened.append(open_source(source, label, name, fits, seed))
    return Mixture(opened, [source.weight for source in sources], seed, held_out=split == "eval")


def default_name(source: Source) -> str:
    if source.kind == "generator":
        return source.generator
    if source.kind == "reasoning_gym":
        return source.task
    return os.path.splitext(os.path.basename(source.path))[0]


def open_source(source: Source, label: str, name: str, fits: Callable[[Row], bool], seed: int) -> Generated | Finite:
    if source.kind == "generator":
        make, grader = open_generator(source, label)
    elif source.kind == "reasoning_gym":
        make, grader = open_reasoning_gym(source, label, seed)
    elif source.kind in ("file", "hub"):
        make, grader = None, None
    else:
        raise ConfigError(f"{label}: {unknown('kind', source.kind, ['generator', 'reasoning_gym', 'file', 'hub'])}")
    graders = source.graders or [SourceGrader(source.grader or grader)]
    for part in graders:
        if not part.name:
            raise ConfigError(f"{label}: set grader, which says how responses are graded")
        try:
            find_grader(part.name)
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from error

    def reference(grader: SourceGrader, record: dict) -> Reference:
        answer, column = grader.value, grader.answer or source.answer
        if answer is None:
            if source.kind == "reasoning_gym" and grader.name == "reasoning_gym" and grader.answer is None:
                column = "problem"
            answer = cell(record, column)
            if answer is None or answer == "":
                raise ValueError(f"has no answer (column {column!r})")
        try:
            GRADERS[grader.name].check(answer)
            json.dumps(answer)  # it goes to worker processes and judges
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"has an answer that grader {grader.name} cannot use: {error}") from error
        return Reference(grader.name, answer, grader.weight, grader.veto)

    def new_row(row_id: str, record: dict) -> Row:
        """Raises ValueError, saying what is wrong with the row."""
        prompt = build_prompt(cell(record, source.prompt), source)
        references = tuple(reference(grader, record) for grader in graders)
        return Row(f"{name}/{row_id}", name, prompt, references, source.merge)

    if make is not None:
        return Generated(label, name, make, new_row, fits, seed)
    where, records = read_hub(source, label) if source.kind == "hub" else read_file(source, label)
    if not records:
        raise ConfigError(f"{label}: {source.path} is empty")
    rows = []
    for n, record in records:
        try:
            rows.append(new_row(str(n), record))
        except ValueError as error:
            raise ConfigError(f"{label}: {source.path}: {where} {n} {error}") from error
    return Finite(label, name, rows, fits, seed)


def cell(record: dict, column: str) -> Any:
    """Raises ValueError where the record has no such column."""
    if column not in record:
        raise ValueError(f"has no column {column!r}; its columns: {', '.join(map(str, record))}")
    return record[column]


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"there is no {what} {name!r}; " + (
        f"did you mean {nearest[0]}?" if nearest else f"one of {', '.join(known)}"
    )


def open_generator(source: Source, label: str) -> tuple[Callable, str]:
    if source.generator not in GENERATORS:
        raise ConfigError(f"{label}: {unknown('generator', source.generator, list(GENERATORS))}")
    problem, grader = GENERATORS[source.generator]
    options = list(inspect.signature(problem).parameters)[1:]
    for key, value in source.args.items():
        if key not in options:
            raise ConfigError(f"{label}: {unknown('option', key, options)}")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{label}: args.{key} must be an integer above 0, not {value!r}")
    return lambda rng: dict(zip(("question", "answer"), problem(rng, **source.args), strict=True)), grader


HASH_SEEDED = ("isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note")
SMALLER = {"acre": 1000, "word_ladder": 10_000}  # tasks that make every item at the start


def open_reasoning_gym(source: Source, label: str, seed: int) -> tuple[Callable, str]:
    """A reasoning-gym task. Its own grader reads the column `problem`, others `answer`: the task's answer as text."""
    from reasoning_gym.factory import DATASETS, create_dataset  # a second to import, so only when asked for

    task = source.task
    if task not in DATASETS:
        raise ConfigError(f"{label}: {unknown('reasoning-gym task', task, sorted(DATASETS))}")
    if task == "game_of_life_halting":
        raise ConfigError(
            f"{label}: reasoning-gym's scorer of {task} gives full marks to any text; choose another task"
        )
    if task in HASH_SEEDED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"{label}: the problems of {task} depend on Python's hash seed, so ranks would disagree: start the run "
            "with PYTHONHASHSEED=0 in the environment"
        )
    args = {"size": SMALLER.get(task, 100_000), **source.args}
    try:
        dataset = create_dataset(task, seed=seed, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{label}: reasoning-gym refuses args {dict(source.args)}: {error}") from error

    def problem(rng: random.Random) -> dict[str, Any]:
        index = rng.randrange(len(dataset))
        item = dataset[index]
        crc = zlib.crc32(item["question"].encode())
        again = {"task": task, "seed": seed, "args": args, "index": index, "question_crc": crc}
        return {"question": item["question"], "answer": item["answer"], "problem": again}

    return problem, "reasoning_gym"


def read_file(source: Source, label: str) -> tuple[str, list[tuple[int, dict]]]:
    """("line" or "row", [(its number from 1, record)]) of a .jsonl, .json (one object per line) or .parquet file."""
    path = source.path
    if not os.path.isfile(path):
        raise ConfigError(f"{label}: there is no file {path!r}")
    if path.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        try:
            return "row", list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{label}: {path} is no readable Parquet file: {str(error).splitlines()[0]}") from error
    if not path.endswith((".jsonl", ".json")):
        raise ConfigError(f"{label}: {path} is neither .jsonl, .json nor .parquet")
    records = []
    try:
        with open(path, encoding="utf-8") as lines:
            for n, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
                records.append((n, record))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: {path} is not UTF-8 after line {len(records)}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{label}: {path}: line {n} is not a JSON object: {error}") from error
    return "line", records


def read_hub(source: Source, label: str) -> tuple[str, list[tuple[int, dict]]]:
    import datasets
    import httpx

    try:
        rows = datasets.load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{label}: cannot load the hub data set {source.path!r} (subset {source.subset}, split {source.split}): "
            f"{str(error).splitlines()[0][:200]}; without a network use a local file (kind: file)"
        ) from error
    return "row", list(enumerate(rows, 1))


# -------------------------------------------------------------------------------------------------------------- prompts


def build_prompt(prompt: Any, source: Source) -> Prompt:
    """A column's value as the prompt of a row. Raises ValueError where it is neither text nor chat messages."""
    if not prompt:
        raise ValueError(f"has no prompt (column {source.prompt!r})")
    if isinstance(prompt, str):
        prompt = source.instruction.replace("{prompt}", prompt)
        if source.system is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    ):
        raise ValueError(
            f"has a prompt (column {source.prompt!r}) that is neither text nor a list of messages with role and content"
        )
    messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
    if source.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": source.system})
    return messages


def plain_text(prompt: Prompt) -> str:
    """The words of a prompt, without roles."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def render(prompt: Prompt, tokenizer: Any, template: str) -> list[int]:
    """Token ids of a prompt, as the engine gets them; never cut.

    template "chat": those of `tokenizer.apply_chat_template` with the header of the model's turn (text is one user
    message). template "raw": those of the text itself, after a BOS where the tokenizer adds one and the text has none.
    Raises ConfigError where prompt and template do not go together.
    """
    if template == "chat":
        if tokenizer.chat_template is None:
            raise ConfigError("model.template: chat, but the tokenizer has no chat template; use raw")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    if not isinstance(prompt, str):
        raise ConfigError("model.template: raw takes text, but the data has chat messages (or `system`); use chat")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    bos = [tokenizer.bos_token_id]
    if tokenizer.encode("")[:1] == bos and ids[:1] != bos:
        ids = bos + ids
    return ids
