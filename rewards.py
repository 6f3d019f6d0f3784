"""Graders, and how their parts make one reward.

A grader is a function (response text, reference answer) -> score in 0..1 with one entry in GRADERS. The text is
hostile: it comes from a policy that is paid for whatever scores. So no grader evaluates it as code, except `code`,
which runs it in a sandbox without network. Graders that could hang or grow on bad text (symbolic maths, regular
expressions, other people's scorers) run in worker processes with a deadline; the rest are linear in the text and run
where they are called.

To add a grader: write the function, add its entry to GRADERS, name it in the config (`data.train[0].grader`).

Left out on purpose: judge models and reward models, which need an engine of their own.
"""

import asyncio
import collections
import difflib
import functools
import importlib
import json
import logging
import math
import os
import queue
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import unicodedata
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any, Callable

import sandbox
from configs.schema import ConfigError

log = logging.getLogger("rewards")

TAIL = 20_000  # characters: a final answer is looked for in the end of a response, so that a long one costs no more
START_S = 120.0  # seconds for a worker to start and import what a grader needs; not part of a grade's deadline
WORKER_BYTES = 4 << 30  # address space of a worker


class GraderError(Exception):
    """A grader returned something that is no score: a bug in the grader, so the run stops."""


# ------------------------------------------------------------------------------------------------------- the one reward


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

    `foreign_words` is n, `length` and `max_length` are in tokens, `pass_rate` is the group's: hard problems may be
    long.
    """
    return task + w_lang * max(1 - alpha * foreign_words, 0.0) - w_len * pass_rate * length / max_length


UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR"}  # about two letters to a word
JAPANESE = {"CJK", "HIRAGANA", "KATAKANA"}
NOT_PROSE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\[a-zA-Z]+|https?://\S+", re.DOTALL)
WORD = re.compile(r"[^\W\d_]+")


@functools.lru_cache(maxsize=1 << 16)
def script(letter: str) -> str:
    """The writing system of a letter, as the first word of its Unicode name: LATIN, CYRILLIC, CJK, ..."""
    return re.split("[ -]", unicodedata.name(letter, "UNKNOWN"))[0]


def foreign_words(text: str, prompt: str) -> int:
    """Words of `text` in a script that `prompt` does not use (a prompt without letters counts as Latin).

    Code, maths, single letters (variables) and capitalised words (names) do not count.
    """
    own = {script(c) for c in prompt if c.isalpha()} or {"LATIN"}
    if own & {"HIRAGANA", "KATAKANA"}:
        own |= JAPANESE
    if text.isascii() and "LATIN" in own:
        return 0
    count = 0
    for word in WORD.findall(NOT_PROSE.sub(" ", text)):
        letters = collections.Counter(script(c) for c in word)
        for name, n in letters.items():
            if name in own or name in ("MATHEMATICAL", "UNKNOWN", "MODIFIER", "FEMININE", "MASCULINE"):
                continue
            if name in UNSPACED:
                count += (n + 1) // 2
            elif n > 1 and not word[0].isupper():
                count += 1
    return count


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
    """`score(response, answer)` -> 0..1; an exception counts as 0.0.

    `isolated`: runs in a worker process with a deadline; for what can hang, grow, or call other people's code.
    `imports`: what the worker loads before the deadline starts.
    `check(answer)`: raises ValueError, KeyError or TypeError on a reference answer that it could not grade against.
    `available()`: raises ConfigError where this machine cannot run it.
    """

    score: Callable[[str, Any], float]
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


# ----------------------------------------------------------------------------------------------------- worker processes


READY = b"ready"  # the worker has what the grader needs: its deadline starts


class WorkerLost(Exception):
    """The worker hung or died with this item; the text says which."""


def load(name: str) -> None:
    """Imports what a grader needs. Raises GraderError: that is no fault of the text, so nothing may be scored 0.0."""
    for module in GRADERS[name].imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise GraderError(f"grader {name}: cannot import {module}: {error}") from error


def work(channel: Connection, parent: int) -> None:
    """Main loop of a worker process. Ends, or raises EOFError or ConnectionError, when its parent is gone.

    A grade that hangs is killed by the parent; were the parent gone, the kernel's timer would kill it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run to handle
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    while True:
        while not channel.poll(5.0):
            if os.getppid() != parent:
                return
        job = json.loads(channel.recv_bytes())
        grader = GRADERS[job["grader"]]
        try:
            load(job["grader"])
            channel.send_bytes(READY)
            signal.setitimer(signal.ITIMER_REAL, job["timeout_s"] + 1)
            reply = {"score": checked(grader.score(job["text"], job["answer"]), job["grader"], job["row"])}
        except GraderError as error:
            reply = {"fatal": str(error)}
        except Exception as error:  # whatever a grader raises is that row's failure, never the run's
            reply = {"failure": f"{type(error).__name__}: {str(error)[:200]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send_bytes(json.dumps(reply).encode())


class Worker:
    """A process that grades one text at a time; started when first needed, and again after it was lost."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.closed = False
        self.lock = threading.Lock()  # between the thread that grades and the one that closes

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
            )
        self.channel = Connection(ours.detach())

    def receive(self, timeout_s: float, what: str) -> bytes:
        if not self.channel.poll(timeout_s):
            raise WorkerLost(f"{what} took more than {timeout_s:g} s")
        return self.channel.recv_bytes()

    def grade(self, grader: str, text: str, answer: Any, timeout_s: float, row_id: str) -> tuple[float, str | None]:
        """(score, why grading failed or None). Raises GraderError."""
        job = {"grader": grader, "text": text, "answer": answer, "timeout_s": timeout_s, "row": row_id}
        for last_try in (False, True):  # an idle worker may have been killed, by the kernel when memory ran out
            with self.lock:
                if self.closed:
                    return 0.0, "the graders were closed"
                if self.process is None:
                    self.start()
            try:
                self.channel.send_bytes(json.dumps(job).encode())
                first = self.receive(START_S, "starting")
                break
            except (WorkerLost, EOFError, OSError) as error:
                self.kill()
                if last_try and not self.closed:
                    raise GraderError(f"grader {grader}: its worker process does not start: {error!r}") from error
        else:
            return 0.0, "the graders were closed"
        try:
            reply = json.loads(self.receive(timeout_s, "grading") if first == READY else first)
        except (WorkerLost, EOFError, OSError) as error:
            self.kill()
            return 0.0, str(error) if isinstance(error, WorkerLost) else "the worker died"
        if "fatal" in reply:
            raise GraderError(reply["fatal"])
        return reply.get("score", 0.0), reply.get("failure")

    def kill(self) -> None:
        with self.lock:
            if self.process is not None:
                os.killpg(self.process.pid, signal.SIGKILL)  # not yet waited for, so the id is still its own
                self.process.wait()
                self.channel.close()
                self.process = None

    def close(self) -> None:
        """No grade starts after this, and one that is being made ends at once."""
        with self.lock:
            self.closed = True
            if self.process is not None:
                os.killpg(self.process.pid, signal.SIGKILL)


class GraderPool:
    """Grades without blocking the event loop; `workers` processes, each grade at most `timeout_s` seconds.

    `failures` counts, per grader, the texts that got 0.0 because grading them failed.
    """

    def __init__(self, workers: int, timeout_s: float):
        self.timeout_s = timeout_s
        self.workers = [Worker() for _ in range(workers)]
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        self.failures: collections.Counter[str] = collections.Counter()

    async def score(self, row: Any, text: str) -> tuple[float, str | None]:
        """(score in 0..1, why grading failed or None) of a response to `row`, a data.Row.

        Raises GraderError where the grader returned something that is no score.
        """
        grader = GRADERS[row.grader]
        if grader.isolated:
            loop = asyncio.get_running_loop()
            score, failure = await loop.run_in_executor(self.threads, self.score_in_worker, row, text)
        else:
            try:
                score, failure = checked(grader.score(text, row.answer), row.grader, row.prompt_id), None
            except GraderError:
                raise
            except Exception as error:  # as in a worker
                score, failure = 0.0, f"{type(error).__name__}: {str(error)[:200]}"
        if failure:
            self.failures[row.grader] += 1
            n = self.failures[row.grader]
            if n in (1, 10, 100, 1000):
                log.warning("grader %s failed (%d so far): row %s: %s", row.grader, n, row.prompt_id, failure)
        return score, failure

    def score_in_worker(self, row: Any, text: str) -> tuple[float, str | None]:
        worker = self.idle.get()
        try:
            return worker.grade(row.grader, text, row.answer, self.timeout_s, row.prompt_id)
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """Ends the workers, also those that are grading; no process is left."""
        for worker in self.workers:
            worker.close()
        self.threads.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.kill()


ALONE, ALONE_LOCK = Worker(), threading.Lock()  # for the calls below; starts no process until then


def grade_alone(grader: str, response: str, answer: Any, timeout_s: float) -> float:
    with ALONE_LOCK:
        return ALONE.grade(grader, response, answer, timeout_s, "(direct call)")[0]


def grade_math(response: str, answer: str, timeout_s: float = 5.0) -> float:
    """1.0 if the response's final answer equals the reference symbolically, 0.0 if not or if that takes too long.

    Never raises, on any thread: the work is done in a worker process that is killed at the deadline.
    """
    return grade_alone("math", response, answer, timeout_s)


def grade_format(response: str, pattern: str | dict, timeout_s: float = 5.0) -> float:
    """1.0 if the response matches a regular expression as a whole (see format_in_worker), or else 0.0."""
    return grade_alone("format", response, pattern, timeout_s)


if __name__ == "__main__":
    try:
        work(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, ConnectionError):
        pass  # the parent is gone
