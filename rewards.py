"""Graders, and how their parts make one reward.

A grader is a function (response text, reference answer) -> score in 0..1 with one entry in GRADERS. The text is
hostile: it comes from a policy that is paid for whatever scores. So no grader evaluates it as code, except `code`,
which runs it in a sandbox without network. Graders that could hang or grow on bad text (symbolic maths, regular
expressions, other people's scorers) run in worker processes with a deadline (grading.py); the rest are linear in the
text and run where they are called. The judge is a model on another server (judge.py).

The scores of a row's graders become its task score by one of MERGES, and the task score becomes the reward by `shape`.

To add a grader: write the function, add its entry to GRADERS, name it in the config (`data.train[0].grader`).
"""

import difflib
import functools
import json
import logging
import math
import re
import secrets
import subprocess
import time
import zlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Callable

import sandbox
from configs.schema import ConfigError

TAIL = 20_000  # characters: a final answer is looked for in the end of a response, so that a long one costs no more


class GraderError(Exception):
    """A grader returned something that is no score: a bug in the grader, so the run stops."""


# ------------------------------------------------------------------------------------------------------- the one reward


def language_part(foreign_words: int, alpha: float) -> float:
    """R_lang = max(1 - alpha * n, 0)"""
    return max(1 - alpha * foreign_words, 0.0)


def length_part(pass_rate: float, length: int, max_length: int) -> float:
    """R_len = pass_rate * |y| / l_max"""
    return pass_rate * length / max_length


def shape(
    task: float,
    *,
    foreign_words: int,
    length: int,
    max_length: int,
    pass_rate: float,
    w_lang: float,
    alpha: float,
    w_len: float,
) -> float:
    """R = R_task + w_lang * max(1 - alpha * n, 0) - w_len * pass_rate * |y| / l_max  (MAI-Thinking-1 report, 3).

    `foreign_words` is n (language.py), `length` and `max_length` are in tokens, `pass_rate` is the group's: hard
    problems may be long.
    """
    return task + w_lang * language_part(foreign_words, alpha) - w_len * length_part(pass_rate, length, max_length)


# ------------------------------------------------------------------------------------- several graders, one task score

TIE = 1e-6  # scores closer than this are the same: they may be fractions
VETO_BELOW = 0.5


def merge_sum(scores: list[float], weights: list[float]) -> float:
    """sum_i w_i s_i / sum_i w_i, in 0..1. Passes (is above 0) if any grader gives anything."""
    return math.fsum(w * s for w, s in zip(weights, scores, strict=True)) / math.fsum(weights)


def merge_product(scores: list[float]) -> float:
    """prod_i s_i, in 0..1. Passes if every grader gives something."""
    return math.prod(scores)


def merge_all(scores: list[float]) -> float:
    """1.0 where every grader gives full marks (1), or else 0.0. Passes only then."""
    return float(min(scores) >= 1 - TIE)


def merge_lexicographic(scores: list[list[float]]) -> list[float]:
    """scores [G, n] of a whole group, the most important grader first -> [G]: those of the first grader on which the
    group does not tie; of the first grader where it ties on all of them, as a group of one does. A lower priority so
    acts only where the whole group ties on the higher ones (MAI-Thinking-1 report, 3.6).

    Passes if the grader that acts in this group gives anything.
    """
    columns = list(zip(*scores))
    return list(next((c for c in columns if max(c) - min(c) > TIE), columns[0]))


MERGES = ("sum", "product", "all", "lexicographic")


def merge(policy: str, scores: list[list[float]], weights: list[float], vetoes: list[bool]) -> list[float]:
    """The task scores [G] of a group, each in 0..1, from the scores [G, n] of its n graders. Pure.

    A grader that is a veto takes no other part: where it gives less than 0.5, every other score of that response is 0,
    and so is its task score under any policy: the minimum.
    """
    others = [i for i, veto in enumerate(vetoes) if not veto]
    vetoed = [any(row[i] < VETO_BELOW for i, veto in enumerate(vetoes) if veto) for row in scores]
    kept = [[0.0 if out else row[i] for i in others] for row, out in zip(scores, vetoed, strict=True)]
    if policy == "lexicographic":
        return merge_lexicographic(kept)
    if policy == "sum":
        return [merge_sum(row, [weights[i] for i in others]) for row in kept]
    return [{"product": merge_product, "all": merge_all}[policy](row) for row in kept]


# ----------------------------------------------------------------------------------------------- graders that only read


def grade_exact(response: str, answer: str) -> float:
    """The whole response is the answer, up to white space around it."""
    return float(response.strip() == str(answer).strip())


# Digits with or without thousands separators. A sign counts only where no operand precedes it: "7-5" ends with 5.
NUMBER = re.compile(r"(?:(?<![\w.)\]])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
PLAIN_NUMBER = re.compile(r"([-+]?(?:\d{1,100}(?:\.\d{1,100})?|\.\d{1,100}))(?:/(\d{1,100}))?", re.ASCII)


def parse_number(text: Any) -> Fraction:
    """An integer, decimal or fraction of at most 100 digits a part, as an exact number. Raises ValueError."""
    parts = PLAIN_NUMBER.fullmatch(str(text).strip().replace(",", "").replace("\u2212", "-"))
    if not parts or (parts[2] and not int(parts[2])):
        raise ValueError(f"{str(text)[:40]!r} is not a number")
    return Fraction(parts[1]) / int(parts[2] or 1)


def number_equals(found: list[str], i: int, answer: Fraction) -> float:
    """Whether the i-th of the numbers found is the answer; one of more than 100 digits is not."""
    try:
        return float(bool(found) and parse_number(found[i]) == answer)
    except ValueError:
        return 0.0


def grade_number(response: str, answer: Any) -> float:
    """The last integer or decimal in the response equals the answer exactly."""
    return number_equals(NUMBER.findall(response[-TAIL:]), -1, parse_number(answer))


def gsm8k_answer(answer: Any) -> Fraction:
    """The number after "####" of a GSM8K solution, or the answer itself where it is only a number."""
    return parse_number(str(answer).rpartition("####")[2])


def grade_gsm8k(response: str, answer: Any) -> float:
    """The number after the response's last "####", or else its last one, equals the one after the answer's "####"."""
    _, marker, final = response[-TAIL:].rpartition("####")
    return number_equals(NUMBER.findall(final), 0 if marker else -1, gsm8k_answer(answer))


CHOICE = re.compile(
    r"\\boxed\{\s*(?:\\text\{)?\(?([A-J])\b"
    r"|(?i:\banswer(?: choice| option)?\b[\s:*]*(?:is\b[\s:*]*)?)\(?([A-J])(?![\w'])"
)
ONLY_CHOICE = re.compile(r"\W*([A-J])\W*")


def grade_choice(response: str, answer: str) -> float:
    """Multiple choice, A to J: the last "answer is X" or boxed X, or a last line that is nothing but the letter."""
    response = response[-TAIL:].strip()
    found = [a or b for a, b in CHOICE.findall(response)]
    last_line = ONLY_CHOICE.fullmatch(response.rpartition("\n")[2])
    if last_line:
        found = [last_line[1]]
    return float(bool(found) and found[-1] == str(answer).strip())


EXPRESSION = re.compile(r"[(\d][\d+\-*/()\t ]*", re.ASCII)
TOKEN = re.compile(r"\d{1,12}(?!\d)|[-+*/()]", re.ASCII)
OPERATOR_SIGNS = str.maketrans("\u00d7\u00b7\u22c5\u00f7\u2212", "***/-")
MAX_EXPRESSION = 1000  # characters
MAX_DEPTH = 50  # nested brackets


def final_expression(response: str) -> str:
    """The last arithmetic expression of the last <answer>...</answer> or \\boxed{...}, or of the whole response."""
    text = response[-TAIL:]
    for opening, closing in (("<answer>", "</answer>"), ("\\boxed{", "}")):
        if opening in text:
            text = text.rpartition(opening)[2].partition(closing)[0]
            break
    text = text.translate(OPERATOR_SIGNS)
    for latex, plain in (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", "")):
        text = text.replace(latex, plain)
    found = [e for e in EXPRESSION.findall(text) if re.search(r"\d[\s)]*[-+*/][\s(]*\d", e, re.ASCII)]
    return found[-1].strip() if found else ""


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]]:
    """Exact value and the integers used, of an expression over + - * / and brackets (no signs, no powers, no calls).

    Raises ValueError for anything else and for what is too long or too deep, ZeroDivisionError for a division by 0.
    """
    if len(expression) > MAX_EXPRESSION or re.sub(r"\s", "", TOKEN.sub("", expression)):
        raise ValueError("not an expression")
    tokens = TOKEN.findall(expression)[::-1]
    used: list[int] = []

    def atom(depth):
        token = tokens.pop() if tokens else ""
        if token.isdigit():
            used.append(int(token))
            return Fraction(used[-1])
        if token != "(" or depth == MAX_DEPTH:
            raise ValueError("a number or a bracket was expected")
        value = total(depth + 1)
        if not tokens or tokens.pop() != ")":
            raise ValueError("a bracket is not closed")
        return value

    def product(depth):
        value = atom(depth)
        while tokens and tokens[-1] in "*/":
            value = value * atom(depth) if tokens.pop() == "*" else value / atom(depth)
        return value

    def total(depth):
        value = product(depth)
        while tokens and tokens[-1] in "+-":
            value = value + product(depth) if tokens.pop() == "+" else value - product(depth)
        return value

    value = total(0)
    if tokens:
        raise ValueError("text after the expression")
    return value, used


def grade_countdown(response: str, numbers: list[int], target: int) -> float:
    """The response's last expression has the value `target` and uses every one of `numbers` exactly once."""
    try:
        value, used = evaluate_expression(final_expression(response))
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and sorted(used) == sorted(numbers))


# ------------------------------------------------------------------------ graders that a bad text can hang: in a worker


def math_in_worker(response: str, answer: str) -> float:
    """Symbolic equality of the response's final answer with the reference, by math-verify (gold first)."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns about every call without its signal-based timeout
    answer = str(answer)
    gold = math_verify.parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify reads no answer in the reference {answer[:40]!r}")
    response = response[-TAIL:]
    response = response[max(response.rfind("\\boxed"), 0) :]  # of several boxes the last is the final answer
    found = math_verify.parse(response, parsing_timeout=None)
    return float(math_verify.verify(gold, found, timeout_seconds=None))


def format_in_worker(response: str, answer: str | dict) -> float:
    """The response matches a regular expression as a whole (`.` also matches newlines).

    `answer` is the pattern, or {"pattern": ..., "prefix": ...}, where the prefix is text that the chat template has
    already written for the model, such as an opening tag: the pattern then sees prefix + response.
    """
    answer = {"pattern": answer} if isinstance(answer, str) else answer
    return float(re.fullmatch(answer["pattern"], answer.get("prefix", "") + response.strip(), re.DOTALL) is not None)


# Scorers of reasoning-gym that evaluate the text (eval, sympy.parse_expr) -> what the text may consist of. Within these
# alphabets there is nothing to call and no attribute to reach.
_LISTS = r"""[\w\s,'"\[\]]*"""
_FORMULA = r"(?:[-+*/^() \d]|(?<=\d)\.|\b(?:[a-zA-Z]|sin|cos|tan|exp|log|sqrt|asin|acos|atan|sinh|cosh|tanh|pi)\b)*"
EVALUATED = {
    "string_insertion": _LISTS,
    "spiral_matrix": _LISTS,
    "binary_matrix": _LISTS,
    "n_queens": _LISTS,
    "countdown": _FORMULA,
    "puzzle24": _FORMULA,
    "polynomial_multiplication": _FORMULA,
    "simple_integration": _FORMULA,
    "intermediate_integration": _FORMULA,
}


@functools.lru_cache(maxsize=64)
def reasoning_gym_task(task: str, seed: int, args: str):
    """A reasoning-gym data set; `args` is JSON."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, **json.loads(args))


def reasoning_gym_in_worker(response: str, answer: dict) -> float:
    """1.0 where the task's own scorer gives full marks, or else 0.0: many scorers pay a little for any text at all.

    The text between the last <answer> tags is scored, or the whole response where there are none. `answer` says how to
    make the problem again (many hold objects that JSON does not keep): {"task", "seed", "args", "index",
    "question_crc"}.
    """
    task = answer["task"]
    dataset = reasoning_gym_task(task, answer["seed"], json.dumps(answer["args"], sort_keys=True))
    entry = dataset[answer["index"]]
    if zlib.crc32(entry["question"].encode()) != answer["question_crc"]:
        raise GraderError(f"reasoning-gym's {task} did not make the same problem twice: choose another task")
    text = response[-TAIL:]
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    text = text.strip()
    if task in EVALUATED and not re.fullmatch(EVALUATED[task], text, re.ASCII):
        return 0.0
    return float(dataset.score_answer(text, entry) >= 1.0 - 1e-9)


# ----------------------------------------------------------------------------------------------- code: run in a sandbox


def final_code(response: str) -> str:
    """The last fenced block (also one that was cut short), or else the whole response."""
    parts = response[-2 * sandbox.PROGRAM_BYTES :].split("```")
    if len(parts) == 1:
        return parts[0]
    block = parts[-2] if len(parts) % 2 else parts[-1]
    language, newline, code = block.partition("\n")
    return code if newline else language


def check_tests(tests: str | list) -> None:
    """Raises ValueError, KeyError or TypeError where `tests` is nothing that grade_code takes."""
    sources = tests if isinstance(tests, str) else all(isinstance(case, str) for case in tests)
    if not tests or not (sources or all(isinstance(c["stdin"], str) and isinstance(c["stdout"], str) for c in tests)):
        raise ValueError("tests must be Python source, a list of it, or a list of {stdin, stdout}, and not empty")


def grade_code(response: str, tests: str | list, timeout_s: float = 8.0, memory_mb: int = 512) -> float:
    """1.0 if the response's last code block passes every test within `timeout_s` for all of them, or else 0.0.

    `tests` is Python source that raises where the program is wrong (asserts, run in the program's namespace), a list of
    such sources, or a list of {"stdin": ..., "stdout": ...} cases, compared line by line without trailing white space.
    Needs bubblewrap (sandbox.check). Raises ValueError, KeyError or TypeError for tests of another form.
    """
    check_tests(tests)
    program = final_code(response)
    try:
        if "\0" in program or len(program.encode()) > sandbox.PROGRAM_BYTES:
            return 0.0
    except UnicodeEncodeError:  # half a surrogate pair
        return 0.0
    try:
        if isinstance(tests, str) or isinstance(tests[0], str):
            source, token = tests if isinstance(tests, str) else "\n".join(tests), secrets.token_hex(16)
            _, output = sandbox.run(program, "tests", json.dumps([source, token]), timeout_s, memory_mb << 20)
            return float(token in output.splitlines())
        deadline = time.monotonic() + timeout_s
        for case in tests:
            left = max(deadline - time.monotonic(), 0.01)
            status, output = sandbox.run(program, "stdin", case["stdin"], left, memory_mb << 20)
            if status != 0 or not same_lines(output, case["stdout"]):
                return 0.0
    except subprocess.TimeoutExpired:
        return 0.0
    return 1.0


def same_lines(a: str, b: str) -> bool:
    return [line.rstrip() for line in a.rstrip().splitlines()] == [line.rstrip() for line in b.rstrip().splitlines()]


# ------------------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Grader:
    """`score(response, answer)` -> 0..1; an exception counts as 0.0. None: a judge model scores it (judge.py).

    `isolated`: runs in a worker process with a deadline; for what can hang, grow, or call other people's code.
    `imports`: what the worker loads before the deadline starts.
    `check(answer)`: raises ValueError, KeyError or TypeError on a reference answer that it could not grade against.
    `available()`: raises ConfigError where this machine cannot run it.
    """

    score: Callable[[str, Any], float] | None
    isolated: bool = False
    imports: tuple[str, ...] = ()
    check: Callable[[Any], Any] = str
    available: Callable[[], None] = lambda: None


def check_countdown(answer: dict) -> None:
    if not all(type(n) is int for n in [answer["target"], *answer["numbers"]]):
        raise ValueError("numbers and target must be integers")


def check_choice(answer: str) -> None:
    if not ONLY_CHOICE.fullmatch(str(answer)):
        raise ValueError(f"{str(answer)[:40]!r} is not one letter, A to J")


def check_format(answer: str | dict) -> None:
    try:
        re.compile(answer if isinstance(answer, str) else answer["pattern"])
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error


GRADERS: dict[str, Grader] = {
    "exact": Grader(grade_exact),
    "number": Grader(grade_number, check=parse_number),
    "gsm8k": Grader(grade_gsm8k, check=gsm8k_answer),
    "choice": Grader(grade_choice, check=check_choice),
    "countdown": Grader(lambda text, answer: grade_countdown(text, **answer), check=check_countdown),
    "math": Grader(math_in_worker, isolated=True, imports=("math_verify",)),
    "format": Grader(format_in_worker, isolated=True, check=check_format),
    "code": Grader(grade_code, isolated=True, check=check_tests, available=sandbox.check),
    "reasoning_gym": Grader(reasoning_gym_in_worker, isolated=True, imports=("reasoning_gym",)),
    "judge": Grader(None),
}


def find_grader(name: str) -> Grader:
    """The entry of GRADERS, once it is known to work here. Raises ConfigError."""
    if name not in GRADERS:
        nearest = difflib.get_close_matches(name, GRADERS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"one of {', '.join(GRADERS)}"
        raise ConfigError(f"grader: there is no {name!r}; {hint}")
    try:
        GRADERS[name].available()
    except ConfigError as error:
        raise ConfigError(f"grader {name}: {error}") from error
    return GRADERS[name]


def checked(score: Any, name: str, row_id: str) -> float:
    """The score as a float. Raises GraderError where it is None, NaN or outside 0..1."""
    try:
        value = float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise GraderError(f"grader {name} returned {score!r} for row {row_id}: a score is a number in 0..1")
    return value


def grade_math(response: str, answer: str, timeout_s: float = 5.0) -> float:
    """1.0 if the response's final answer equals the reference symbolically, 0.0 if not or if that takes too long.

    Never raises, on any thread: the work is done in a worker process that is killed at the deadline.
    """
    from grading import grade_alone  # here, because it imports this module

    return grade_alone("math", response, answer, timeout_s)


def grade_format(response: str, pattern: str | dict, timeout_s: float = 5.0) -> float:
    """1.0 if the response matches a regular expression as a whole (see format_in_worker), or else 0.0."""
    from grading import grade_alone  # here, because it imports this module

    return grade_alone("format", response, pattern, timeout_s)
