"""Graders: golden pairs, hostile text, and the pool that keeps one bad text from hurting the others."""

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grading
import rewards
import sandbox
from configs.schema import ConfigError
from data import Reference
from data import Row as DataRow
from grading import GraderPool
from rewards import GRADERS, GraderError, grade_code, grade_countdown, grade_math, shape

REPO = Path(rewards.__file__).parent
HAS_SANDBOX = shutil.which("bwrap") is not None
needs_sandbox = pytest.mark.skipif(not HAS_SANDBOX, reason="bubblewrap is not installed")


def Row(grader: str, answer: Any) -> DataRow:
    return DataRow("test/1", "test", "Add them.", (Reference(grader, answer),))


def gym_row(task, index=0):
    """A reasoning-gym row and its right answer, made here, in another process than the worker's."""
    import reasoning_gym

    item = reasoning_gym.create_dataset(task, seed=1, size=100)[index]
    crc = zlib.crc32(item["question"].encode())
    return Row(
        "reasoning_gym", {"task": task, "seed": 1, "args": {"size": 100}, "index": index, "question_crc": crc}
    ), item


def grade_all(pool, rows_and_texts):
    async def main():
        return await asyncio.gather(*(pool.score(row, row.references[0], text) for row, text in rows_and_texts))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def pool():
    pool = GraderPool(workers=2, timeout_s=20.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gym():
    return gym_row("spell_backward")[0]


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """rewards.py as a user's fork: `forked(source)` adds source below GRADERS and gives its grading.py."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))  # the workers of the copy find sandbox.py and configs/

    def fork(source):
        (tmp_path / "rewards.py").write_text((REPO / "rewards.py").read_text() + "\n" + textwrap.dedent(source))
        shutil.copy(REPO / "grading.py", tmp_path)
        for name in ("rewards", "grading"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return module

    return fork


# --------------------------------------------------------------------------------------------------------- golden pairs

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 1,000+24 clips altogether.\n#### 1,024"

GOLDEN = [
    # grader, answer, right responses, wrong responses
    ("exact", "abc", ["abc", " abc\n"], ["", "abcd", "ABC"]),
    (
        "number",
        24,
        ["24", "7+5=12+9=21+3=24", "so 24.", "It is 24.0!", "0024", "**24**", "=24", "is 1,000 or 24<|im_end|>"],
        ["", "no", "-24", "2.4", "24 or 25", "1,024", "24" + "x" * 30000 + "7", "9" * 100 + "24"],
    ),
    ("number", "-1,234.50", ["-1234.5", "\u22121,234.50", "it is -1234.5."], ["1234.5", "7-1234.5", "-1234"]),
    ("number", "1/2", ["0.5", "1/2 = 0.5"], ["2", "0.50001"]),
    (
        "gsm8k",
        GSM8K,
        ["#### 1024", "so\n#### 1,024 clips of 7", "about 1024"],
        ["", "1023", "1024 #### 7", "1024 ####"],
    ),
    ("gsm8k", "#### 42", ["42"], ["4 2"]),
    (
        "choice",
        "B",
        ["B", "(B)", "The answer is B.", "A is wrong. Answer: (B)", "\\boxed{B}", "hm\nB."],
        ["", "A", "b", "Because"],
    ),
    ("choice", "A", ["The answer is A"], ["A dog ran", "answer: B\nI saw A dog"]),
    (
        "countdown",
        {"numbers": [1, 2, 3], "target": 9},
        [
            "(1+2)*3",
            "So (1 + 2) * 3 = 9.",
            "<answer>3*(2+1)</answer>",
            "\\boxed{(1+2) \\times 3}",
            "3 \u00d7 (1 + 2)",
            "1+1 no\n(1+2)*3",
        ],
        [
            "",
            "9",
            "3*3",
            "1+2+3",
            "(1+2)*3+1-1",
            "(1+2)*3)",
            "(1+2)**3",
            "(1+2)(3)",
            "-(1+2)*-3",
            "<answer>9</answer> (1+2)*3",
        ],
    ),
    ("countdown", {"numbers": [3, 3, 8, 8], "target": 24}, ["8/(3-8/3)"], ["8/(3-3)", "8/3-8/3"]),
    (
        "math",
        "\\frac{1}{2}",
        ["\\boxed{0.5}", "The answer is $\\frac{2}{4}$.", "so it is 1/2"],
        ["", "2", "\\boxed{1/2} or \\boxed{3}"],
    ),
    ("math", "x^2+2x+1", ["$$\\boxed{(x+1)^2}$$"], ["$(x+1)^3$"]),
    (
        "math",
        "42",
        ["\\boxed{41}, no, \\boxed{42}", "\\boxed{42}<|im_end|> and junk"],
        ["\\boxed{42}, no, \\boxed{41}"],
    ),
    ("math", "(1, 3)", ["the interval $(1,3)$"], ["$(1,4)$"]),
    (
        "format",
        r"<think>.*</think>\s*\d+",
        ["<think>a\nb</think> 4", "<think></think>4\n"],
        ["", "4", "<think>x</think>", "a</think>4"],
    ),
    # the template has already opened the tag, so the response starts inside it
    ("format", {"pattern": r"<think>.*</think>\s*\d+", "prefix": "<think>"}, ["a</think>4"], ["<think>a", "4"]),
]
GOLDEN_CODE = [
    (
        "assert add(1, 2) == 3\nassert add(-1, 1) == 0",
        [
            "```python\ndef add(a, b):\n    return a + b\n```",
            "def add(a, b): return a + b",
            "```\nx=1\n```\nno:\n```py\nadd = lambda a, b: a + b\n```",
        ],
        [
            "",
            "```python\ndef add(a, b): return a - b\n```",
            "```python\nimport sys; sys.exit(0)\n```",
            "```\nimport os; os._exit(0)\n```",
            "```\ndef add(a, b): raise SystemExit(0)\n```",
            "```\ndef add(",
            "```\nimport json\nprint(json.loads(input())[1])\n```",
        ],
    ),
    (["assert x == 1", "assert y == 2"], ["```\nx, y = 1, 2\n```"], ["x, y = 1, 3", "x, y = 2, 2"]),
    (
        [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "5", "stdout": "10"}],
        [
            "```python\nprint(2 * int(input()))\n```",
            "```\nimport sys\nprint(2 * int(sys.stdin.read()), ' \\n')\n```",
            "```\nif __name__ == '__main__':\n    print(2 * int(open(0).read()))\n```",
        ],
        ["```\nprint(4)\n```", "", "```\nprint(2 * int(input()))\nraise ValueError\n```"],
    ),
]


def golden(table):
    return [
        (Row(g, a), text, score)
        for g, a, right, wrong in table
        for score, texts in ((1.0, right), (0.0, wrong))
        for text in texts
    ]


def test_golden_pairs(pool):
    cases = golden(GOLDEN)
    for (row, text, expected), (score, failure) in zip(
        cases, grade_all(pool, [case[:2] for case in cases]), strict=True
    ):
        assert (score, failure) == (expected, None), (row, text[:100])


@needs_sandbox
def test_golden_code(pool):
    cases = golden([("code", *entry) for entry in GOLDEN_CODE])
    for (row, text, expected), result in zip(cases, grade_all(pool, [case[:2] for case in cases]), strict=True):
        assert result == (expected, None), (row, text)


def test_contract_calls_grade_directly_and_from_any_thread():
    assert rewards.grade_number("so 7", 7) == 1.0
    assert grade_countdown("(1+2)*3", [3, 2, 1], 9) == 1.0
    assert rewards.grade_format("ab", "a.") == 1.0
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(grade_math("\\boxed{\\frac{1}{2}}", "0.5"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1.0] * 4


def test_pool_from_loops_in_threads(pool):
    results = []
    work = [(Row("math", "42"), "\\boxed{42}"), (Row("number", 1), "2")]
    threads = [threading.Thread(target=lambda: results.append(grade_all(pool, work))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(1.0, None), (0.0, None)]] * 3


def test_every_grader_has_a_golden_pair_here():
    assert set(GRADERS) == {entry[0] for entry in GOLDEN} | {"code", "reasoning_gym", "judge"}  # judge: test_judge.py


numbers = st.integers(min_value=0, max_value=99)
trees = st.recursive(numbers, lambda t: st.tuples(t, st.sampled_from("+-*/"), t), max_leaves=8)


def evaluate_tree(tree):
    """(value or None, text, leaves): the oracle of the expression parser, which never sees the text."""
    if isinstance(tree, int):
        return Fraction(tree), str(tree), [tree]
    (a, left, used), (b, right, more) = evaluate_tree(tree[0]), evaluate_tree(tree[2])
    text = f"({left}{tree[1]} {right})"
    if a is None or b is None or (tree[1] == "/" and b == 0):
        return None, text, used + more
    value = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[tree[1]]()
    return value, text, used + more


@given(trees.filter(lambda tree: not isinstance(tree, int)))
def test_countdown_agrees_with_exact_evaluation(tree):
    value, text, used = evaluate_tree(tree)
    if value is None:
        assert grade_countdown(text, used, 0) == 0.0
    else:
        assert grade_countdown(text, used[::-1], value) == 1.0
        assert grade_countdown(text, used, value + 1) == 0.0
        assert grade_countdown(text, used + [1], value) == 0.0
        assert grade_countdown(text, used[1:], value) == 0.0


def test_countdown_operators_bind_as_usual():
    assert grade_countdown("1+2*3-8/4/2", [1, 2, 3, 8, 4, 2], 6) == 1.0
    assert grade_countdown("9-3-2", [9, 3, 2], 4) == 1.0


# --------------------------------------------------------------------------------------------------------- hostile text

any_text = st.text(st.characters(exclude_categories=()), max_size=300)
mathy_text = st.text("0123456789+-*/().,=x^\\{}$#<>[]_ \n\u2212answeroxd", max_size=300)
INLINE = [
    ("exact", "1"),
    ("number", "1"),
    ("gsm8k", "#### 1"),
    ("choice", "A"),
    ("countdown", {"numbers": [1, 2], "target": 3}),
]


@given(any_text | mathy_text)
@settings(max_examples=300)
def test_no_inline_grader_raises(text):
    for grader, answer in INLINE:
        assert GRADERS[grader].score(text, answer) in (0.0, 1.0)
    assert rewards.final_code(text) is not None


@given(any_text | mathy_text)
@settings(max_examples=30, deadline=None)
def test_no_isolated_grader_raises(pool, gym, text):
    rows = [Row("math", "1"), Row("format", ".*a"), gym]
    for score, _ in grade_all(pool, [(row, text) for row in rows]):
        assert score in (0.0, 1.0)


JUNK = ["", "\0", "\ud800", "\U0001f600" * 50, "\u202e\u0000\uffff", "x" * 1_000_000, "(" * 1_000_000, "1+" * 500_000]
JUNK += [
    "9" * 1_000_000,
    "\\boxed{" * 100_000,
    "```" * 300_000,
    "<answer>" * 100_000,
    "1," * 500_000,
    "((((((((((1))))))))))" * 9,
]


def test_junk_scores_zero_everywhere(pool, gym):
    rows = [Row(g, a) for g, a in INLINE] + [Row("math", "77"), Row("format", "abc"), gym]
    rows += [Row("code", "assert f(1) == 2")] * HAS_SANDBOX
    for row in rows:
        for text, (score, _) in zip(JUNK, grade_all(pool, [(row, text) for text in JUNK]), strict=True):
            if not (row.references[0].grader in ("number", "gsm8k") and "1" in text):  # junk that does end in the answer
                assert score == 0.0, (row, text[:20])


def test_a_right_answer_counts_after_a_megabyte_of_any_script(pool, gym):
    noise = "so \U0001f600 \u6211\u4eec \u043f\u0440\u0438 \u202e\u0661 x\n" * 50_000
    right = {"number": "24", "gsm8k": "#### 1024", "choice": "B", "countdown": "<answer>(1+2)*3</answer>", "math": "\\boxed{42}"}
    answers = {"number": 24, "gsm8k": GSM8K, "choice": "B", "countdown": {"numbers": [1, 2, 3], "target": 9}, "math": "42"}
    work = [(Row(name, answers[name]), noise + text) for name, text in right.items()]
    work += [(Row("exact", noise.strip()), noise), (Row("format", ".*x"), noise)]
    work += [(gym, f"{noise}<answer>{gym_row('spell_backward')[1]['answer']}</answer>")]
    work += [(Row("code", "assert x == '\u6211'"), noise + "```python\nx = '\u6211'\n```")] * HAS_SANDBOX
    assert grade_all(pool, work * 2) == [(1.0, None)] * len(work * 2)


def test_no_grader_runs_the_text(pool, tmp_path):
    trace = tmp_path / "trace"
    command = f"__import__('os').system('touch {trace}')"
    texts = [
        command,
        f"<answer>{command}</answer>",
        f"\\boxed{{{command}}}",
        f"${command}$",
        f"1+{command}",
        f"[{command}]",
    ]
    texts += [
        f"#### {command}",
        f"answer is {command}",
        f"{{{command}}}",
        f"(lambda: {command})()",
        f"```python\n{command}\n```",
    ]
    texts += [
        f"\\operatorname{{{command}}}",
        f"\\text{{{command}}}",
        f"print(open('{trace}', 'w'))",
        f"'%s' % {command}",
    ]
    rows = [Row(g, a) for g, a in INLINE] + [Row("math", "77"), Row("format", "abc")]
    rows += [gym_row(task)[0] for task in rewards.EVALUATED if task != "polynomial_multiplication"]
    rows += [Row("code", "assert 1"), Row("code", [{"stdin": "", "stdout": ""}])] * HAS_SANDBOX
    grade_all(pool, [(row, text) for row in rows for text in texts])
    assert not trace.exists()
    # the same text does leave a trace where it is evaluated, so the check above can fail
    eval(command)
    assert trace.exists()


@pytest.mark.parametrize(
    "task", ["spell_backward", "n_queens", "binary_matrix", "simple_integration", "leg_counting", "acre"]
)
def test_reasoning_gym_pays_its_own_answer_and_nothing_else(pool, task):
    row, item = gym_row(task)
    texts = [item["answer"], f"Hm.\n<answer>\n{item['answer']}\n</answer> so", "", "zzz", "<answer>zzz</answer>"]
    assert [score for score, _ in grade_all(pool, [(row, text) for text in texts])] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_reasoning_gym_problem_that_changes_stops_the_run(pool):
    row, _ = gym_row("spell_backward")
    row.references[0].answer["question_crc"] ^= 1
    with pytest.raises(GraderError, match="spell_backward did not make the same problem twice"):
        grade_all(pool, [(row, "x")])


# ----------------------------------------------------------------------------------------------------- hanging, failing


def test_a_hanging_text_fails_alone_and_is_killed():
    pool = GraderPool(workers=1, timeout_s=3.0)
    hang = Row("format", "(a+)+c")
    tower = Row("math", "1")
    good = Row("math", "42")
    try:
        results = grade_all(
            pool,
            [
                (good, "\\boxed{42}"),
                (hang, "a" * 40 + "b"),
                (tower, "$9^{9^{9^9}}$"),
                (good, "\\boxed{42}"),
                (good, "41"),
            ],
        )
        assert [score for score, _ in results] == [1.0, 0.0, 0.0, 1.0, 0.0]
        assert [failure for _, failure in results] == [
            None,
            "grading took more than 3 s",
            "grading took more than 3 s",
            None,
            None,
        ]
        assert pool.failures == {"format": 1, "math": 1}
    finally:
        pool.close()


def test_a_grader_that_hangs_holds_up_no_other():
    pool = GraderPool(workers=1, timeout_s=600.0)
    hang, good = Row("format", "(a+)+c"), Row("math", "42")

    async def main():
        hanging = [asyncio.create_task(pool.score(hang, hang.references[0], "a" * 60 + "b")) for _ in range(5)]
        await asyncio.sleep(0)  # they are first in every queue
        others = asyncio.gather(*(pool.score(good, good.references[0], "\\boxed{42}") for _ in range(5)))
        try:
            assert await asyncio.wait_for(others, 60) == [(1.0, None)] * 5
            assert not any(task.done() for task in hanging)
        finally:
            await asyncio.to_thread(pool.close)
            await asyncio.gather(*hanging, return_exceptions=True)

    asyncio.run(main())


def test_a_worker_that_is_stopped_is_replaced_at_the_deadline(monkeypatch):
    """Stopped while idle: it neither reads the text, which is longer than what a pipe takes in, nor answers."""
    pool = GraderPool(workers=1, timeout_s=20.0)
    try:
        (worker,) = pool.crews["format"].workers
        with monkeypatch.context() as patch:
            patch.setattr("grading.START_S", 2.0)  # of this process; the one that takes its place may start slowly
            worker.start()
        stopped = worker.process.pid
        os.kill(stopped, signal.SIGSTOP)
        work, results = [(Row("format", "a+"), "a" * 4_000_000)], []
        grading = threading.Thread(target=lambda: results.extend(grade_all(pool, work)))
        grading.start()
        grading.join(60)
        assert results == [(1.0, None)] and gone(stopped)
    finally:
        pool.close()


def test_pathological_maths_called_directly_returns():
    assert grade_math("\\boxed{9^{9^{9^9}}}", "1", timeout_s=1.0) == 0.0
    assert grade_math("\\boxed{1}", "1") == 1.0


def test_exception_on_one_item_leaves_the_others(pool, monkeypatch):
    def fails_on_seven(response, answer):
        if response == "7":
            raise RuntimeError("seven")
        return float(response == answer)

    monkeypatch.setitem(GRADERS, "odd", rewards.Grader(fails_on_seven))
    before = pool.failures["odd"]
    results = grade_all(pool, [(Row("odd", str(i)), str(i)) for i in range(10)])
    assert results == [(1.0, None)] * 7 + [(0.0, "RuntimeError: seven")] + [(1.0, None)] * 2
    assert pool.failures["odd"] - before == 1


def test_a_reference_that_math_verify_cannot_read_is_a_counted_failure(pool):
    [(score, failure)] = grade_all(pool, [(Row("math", "\\"), "\\boxed{1}")])
    assert score == 0.0 and "reads no answer in the reference" in failure


@pytest.mark.parametrize("value", ["None", "float('nan')", "float('inf')", "1.5", "-0.1", "'x'", "[1]"])
@pytest.mark.parametrize("isolated", [False, True])
def test_what_is_no_score_stops_the_run(forked, value, isolated):
    module = forked(f"GRADERS['bad'] = Grader(lambda response, answer: {value}, isolated={isolated})")
    pool = module.GraderPool(workers=1, timeout_s=20.0)
    try:
        with pytest.raises(module.GraderError, match="grader bad returned .* for row test/1"):
            grade_all(pool, [(Row("bad", "1"), "1")])
    finally:
        pool.close()


def test_a_worker_that_is_killed_while_it_grades_costs_no_text_its_score(forked, tmp_path):
    module = forked(
        f"""
        def grade_mine(response, answer):
            import os
            if not os.path.exists({str(tmp_path / "killed")!r}):
                open({str(tmp_path / "killed")!r}, "w").close()
                os.kill(os.getpid(), 9)
            return 1.0

        GRADERS["mine"] = Grader(grade_mine, isolated=True)
        """
    )
    pool = module.GraderPool(workers=1, timeout_s=20.0)
    try:
        assert grade_all(pool, [(Row("mine", ""), "a")]) == [(1.0, None)]
    finally:
        pool.close()


def test_a_users_isolated_grader(forked):
    module = forked(
        """
        def grade_mine(response, answer):
            if response == "die":
                import os
                os._exit(3)
            if response == "raise":
                raise KeyError("mine")
            if response == "imports":
                import sys
                return float("torch" not in sys.modules)
            return 0.25

        GRADERS["mine"] = Grader(grade_mine, isolated=True)
        """
    )
    pool = module.GraderPool(workers=1, timeout_s=20.0)
    try:
        results = grade_all(pool, [(Row("mine", ""), text) for text in ("a", "die", "raise", "imports", "b")])
    finally:
        pool.close()
    assert results == [(0.25, None), (0.0, "the worker died"), (0.0, "KeyError: 'mine'"), (1.0, None), (0.25, None)]


@pytest.mark.parametrize("tests", ["", [], [{"stdin": "1"}], 3, None, [1]])
def test_tests_that_test_nothing_are_refused(tests):
    with pytest.raises((ValueError, KeyError, TypeError)):
        GRADERS["code"].check(tests)
    with pytest.raises((ValueError, KeyError, TypeError)):
        grade_code("x = 1", tests)


def test_the_gates_of_evaluated_tasks():
    import re

    formula, lists = rewards._FORMULA, rewards._LISTS
    for text in ("3*x**2 + sin(x)/2 - exp(x)", "(1+2)*3.5", "log(x) + C"):
        assert re.fullmatch(formula, text, re.ASCII)
    for text in (
        "x.y",
        "x . y",
        "(1).real",
        "1..real",
        "sympify(1)",
        "__import__",
        "x or y",
        "f'x'",
        "x[0]",
        "1,2",
        "1" * 5000 + "!",
    ):
        assert not re.fullmatch(formula, text, re.ASCII), text
    assert re.fullmatch(lists, "[['0', \"1\"], [0, 1]]\n", re.ASCII)
    for text in ("f()", "a.b", "{1}", "lambda: 1", "a:=1", "\\x41", "@a"):
        assert not re.fullmatch(lists, text, re.ASCII), text


def test_a_worker_killed_while_idle_is_replaced(pool):
    work = [(Row("format", "a"), "a")] * 4
    assert grade_all(pool, work) == [(1.0, None)] * 4
    for worker in pool.crews["format"].workers:
        if worker.process:
            worker.process.kill()
    assert grade_all(pool, work) == [(1.0, None)] * 4


def test_what_a_grader_needs_and_is_missing_stops_the_run(forked):
    module = forked("GRADERS['bad'] = Grader(lambda response, answer: 1.0, isolated=True, imports=('no_such_module',))")
    pool = module.GraderPool(workers=1, timeout_s=20.0)
    try:
        with pytest.raises(module.GraderError, match="grader bad: cannot import no_such_module"):
            grade_all(pool, [(Row("bad", "1"), "1")])
    finally:
        pool.close()


def test_a_worker_that_cannot_start_stops_the_run(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(grading, "PAUSES", (0.0, 0.1))
    pool = GraderPool(workers=1, timeout_s=20.0)
    try:
        with pytest.raises(grading.WorkerLost, match="grader format: its worker process does not start"):
            grade_all(pool, [(Row("format", "a"), "a")])
    finally:
        pool.close()


def test_unknown_grader_names_the_nearest():
    with pytest.raises(ConfigError, match="there is no 'countdwon'; did you mean countdown?"):
        rewards.find_grader("countdwon")


# ------------------------------------------------------------------------------------------------------------ processes


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_gone(pid, seconds):
    deadline = time.monotonic() + seconds
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone(pid)


def test_close_leaves_no_process_even_while_grading():
    threads = set(threading.enumerate())
    pool = GraderPool(workers=2, timeout_s=600.0)
    hang, tower = Row("format", "(a+)+c"), Row("math", "1")
    work = [(hang, "a" * 60 + "b"), (tower, "$9^{9^{9^9}}$")] * 3
    workers = [worker for name in ("format", "math") for worker in pool.crews[name].workers]

    async def main():
        tasks = [asyncio.create_task(pool.score(row, row.references[0], text)) for row, text in work]
        while not all(worker.process for worker in workers):
            await asyncio.sleep(0.05)
        pids = [worker.process.pid for worker in workers]
        await asyncio.to_thread(pool.close)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        return pids

    pids = asyncio.run(main())
    assert len(pids) == 4 and all(gone(pid) for pid in pids)
    assert all(worker.process is None for crew in pool.crews.values() for worker in crew.workers)
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("text", ["b", "a" * 60 + "b"], ids=["idle", "grading"])
def test_workers_end_when_their_parent_is_killed(text):
    program = f"""
import asyncio, data, grading
row = data.Row("x", "x", "x", (data.Reference("format", "(a+)+c"),))
pool = grading.GraderPool(1, 3.0)
async def main():
    await pool.score_all(row, "b")
    score = asyncio.create_task(pool.score_all(row, {text!r}))
    await asyncio.sleep(0.5)
    print(pool.crews["format"].workers[0].process.pid, score.done(), flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=REPO, text=True)
    worker, idle = parent.stdout.readline().split()
    assert not gone(worker) and idle == str(len(text) == 1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_gone(worker, 60)


def test_importing_rewards_stays_light():
    program = "import grading, sys; print([m for m in ('torch', 'sympy', 'numpy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True).stdout == "[]\n"


# -------------------------------------------------------------------------------------------------------------- sandbox

FORBIDDEN = {
    "network": "import socket; socket.create_connection(('1.1.1.1', 53), timeout=3)",
    "host loopback": "import socket, sys; socket.create_connection(('127.0.0.1', PORT), timeout=3)",
    "fork": "import os; os.fork()",
    "subprocess": "import subprocess; subprocess.run(['/usr/bin/true'], check=True)",
    "memory": "x = bytearray(1 << 30)",
    "threads without end": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "file outside": "open('TRACE', 'w')",
    "read outside": "open('README_PATH').read()",
    "etc": "open('/etc/passwd').read()",
    "proc": "import os; os.listdir('/proc/1')",
    "root": "open('/x', 'w')",
    "shared memory": "open('/dev/shm/x', 'w')",
    "python's own files": "import json; open(json.__file__, 'a')",
    "a file too large": "open('/tmp/x', 'wb').write(bytes(8 << 20))",
    "files too many bytes": "for i in range(20): open(f'/tmp/{i}', 'wb').write(bytes(3 << 20))",
    "limits raised": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "more output than allowed": "while True: print('x' * 100000)",
    "environment": "import os; assert 'SECRET_OF_RUN' in os.environ",
    "time": "while True: pass",
    "sleep": "import time; time.sleep(100)",
}


@needs_sandbox
@pytest.mark.parametrize("what", FORBIDDEN)
def test_sandbox_refuses(what, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    monkeypatch.setenv("SECRET_OF_RUN", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = FORBIDDEN[what].replace("TRACE", str(trace)).replace("README_PATH", __file__)
        program = program.replace("PORT", str(server.getsockname()[1]))
        assert grade_code(f"```python\n{program}\n```", "pass", timeout_s=2.0) == 0.0
        assert grade_code(f"```python\n{program}\n```", [{"stdin": "", "stdout": ""}], timeout_s=2.0) == 0.0
    assert not trace.exists()


@needs_sandbox
def test_sandbox_allows_what_programs_need():
    program = """
import collections, json, math, re, threading
with open("/tmp/a", "w") as f: f.write("1")
with open("b", "w") as f: f.write(open("/tmp/a").read())
thread = threading.Thread(target=print, args=("from a thread",)); thread.start(); thread.join()
"""
    assert grade_code(program, "assert open('b').read() == '1'") == 1.0
    assert grade_code(program, "assert not open('b').read()") == 0.0


def runs(pid, program):
    try:
        return program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return False


@needs_sandbox
def test_sandbox_leaves_no_process():
    program = f"import time\nwhile True: time.sleep(0.{time.monotonic_ns()})"
    grading = threading.Thread(target=grade_code, args=(program, "pass"), kwargs={"timeout_s": 2.0})
    grading.start()
    time.sleep(1.0)
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and runs(pid, program)]
    grading.join()
    assert pids and all(wait_gone(pid, 10) for pid in pids)


@needs_sandbox
def test_sandbox_check_passes_here_and_names_the_package_where_it_is_missing(monkeypatch):
    sandbox.check()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="grader code: needs bubblewrap.*apt-get install bubblewrap"):
        rewards.find_grader("code")


# ----------------------------------------------------------------------------------------------------------- the reward


@given(
    task=st.floats(0, 1), foreign_words=st.integers(0, 500), length=st.integers(0, 1 << 17), max_length=st.integers(1, 1 << 17),
    pass_rate=st.floats(0, 1), w_lang=st.floats(0, 1), alpha=st.floats(0, 0.1), w_len=st.floats(0, 1),
)  # fmt: skip
def test_shape_equals_exact_arithmetic(task, foreign_words, length, max_length, pass_rate, w_lang, alpha, w_len):
    exact = Fraction(task) + Fraction(w_lang) * max(1 - Fraction(alpha) * foreign_words, 0)
    exact -= Fraction(w_len) * Fraction(pass_rate) * length / max_length
    parts = dict(foreign_words=foreign_words, length=length, max_length=max_length, pass_rate=pass_rate)
    got = shape(task, **parts, w_lang=w_lang, alpha=alpha, w_len=w_len)
    assert got == pytest.approx(float(exact), rel=1e-14, abs=1e-14 * max(1, length / max_length))


def test_shape_is_the_report_formula():
    base = dict(foreign_words=0, length=0, max_length=100, pass_rate=0.5, w_lang=0.5, alpha=0.005, w_len=0.25)
    assert shape(1.0, **base) == 1.5
    assert shape(0.0, **base | dict(foreign_words=100)) == pytest.approx(0.25)
    assert shape(0.0, **base | dict(foreign_words=10_000)) == 0.0
    assert shape(1.0, **base | dict(length=100)) == pytest.approx(1.0 + 0.5 - 0.125)
    assert shape(1.0, **base | dict(length=100, pass_rate=0.0)) == 1.5  # a problem nobody solves may be long
    assert shape(1.0, **base | dict(w_lang=0.0, w_len=0.0, foreign_words=9, length=50)) == 1.0
