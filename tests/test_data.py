"""Prompts: tickets, epochs, weights, the held-out split, what bad data gets, and the token ids of a prompt."""

import asyncio
import collections
import itertools
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import data
from configs.schema import ConfigError, Source
from data import Reference, is_held_out, open_sources, plain_text, render
from grading import GraderPool

REPO = Path(data.__file__).parent


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path, n, name):
    """A file source of n rows with prompts name0, name1, ..."""
    rows = [{"question": f"{name}{i}", "answer": str(i)} for i in range(n)]
    return Source(kind="file", path=write_jsonl(path / f"{name}.jsonl", rows), grader="exact")


# ------------------------------------------------------------------------------------------------------ tickets, epochs


def test_a_ticket_is_a_pure_function_of_sources_and_seed(tmp_path):
    sources = [numbered(tmp_path, 7, "a"), Source(weight=2.0), Source(generator="countdown", weight=0.5)]
    first, second, other = (open_sources(sources, seed, "train") for seed in (5, 5, 6))
    tickets = [*range(50), 999, 1000, 1001, 123_456_789]
    rows = {t: first.row(t) for t in tickets}
    assert {t: second.row(t) for t in reversed(tickets)} == rows
    assert [other.row(t) for t in range(50)] != [first.row(t) for t in range(50)]
    answers = [row.references[0].answer for row in rows.values()]
    assert json.loads(json.dumps(answers)) == answers


def test_a_ticket_means_the_same_in_another_process(tmp_path):
    sources = [numbered(tmp_path, 7, "a"), Source(), Source(kind="reasoning_gym", task="spell_backward")]
    program = f"""
import data
from configs.schema import Source
mixture = data.open_sources({sources!r}, 3, "train")
print([mixture.row(t) for t in range(40)], mixture.eval_rows(9))
"""
    run = [sys.executable, "-c", program]
    outputs = [
        subprocess.run(run, cwd=REPO, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] and len(outputs[0]) > 1000


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [3.0, 1.0, 0.01]])
def test_each_row_comes_once_per_epoch_in_a_new_order(tmp_path, weights):
    sources = [numbered(tmp_path, 7, name) for name in "abc"[: len(weights)]]
    for source, weight in zip(sources, weights, strict=True):
        source.weight = weight
    mixture = open_sources(sources, 0, "train")
    visits = collections.defaultdict(list)
    for ticket in range(4000):
        row = mixture.row(ticket)
        visits[row.source].append(row.prompt)
    for name, prompts in visits.items():
        epochs = [prompts[i : i + 7] for i in range(0, len(prompts) - 6, 7)]
        assert all(sorted(epoch) == [f"{name}{i}" for i in range(7)] for epoch in epochs)
        assert len(epochs) < 3 or len(set(map(tuple, epochs))) > 1
    assert len(visits) == len(weights)


def test_weights_hold_at_every_point_of_the_run():
    sources = [Source(name="a", weight=3.0), Source(name="b", weight=1.0), Source(name="c", weight=0.5)]
    mixture = open_sources(sources, 0, "train")
    counts = collections.Counter()
    for ticket in range(3000):
        counts[mixture.row(ticket).source] += 1
        for source in sources:
            assert abs(counts[source.name] - (ticket + 1) * source.weight / 4.5) < 4
    assert counts == {"a": 3 * 667, "b": 3 * 222, "c": 3 * 111}


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.integers(0, 2000))
def test_shares_sum_and_starve_nobody(weights, n):
    counts = data.shares(weights, n)
    assert sum(counts) == n and all(count >= 0 for count in counts)
    if n >= len(weights):
        assert min(counts) >= 1
    if all(n * w / sum(weights) >= 1 for w in weights):
        assert all(abs(count - n * w / sum(weights)) < 1 for count, w in zip(counts, weights, strict=True))


# ------------------------------------------------------------------------------------------------------------- held out


@pytest.mark.parametrize(
    "source", [Source(args={"terms": 2}), Source(generator="countdown", args={"terms": 2, "largest": 5})], ids=str
)
def test_training_never_draws_a_held_out_problem(source):
    train = open_sources([source], 0, "train")
    evaluation = open_sources([source], 1, "eval")
    trained = {train.row(t).prompt for t in range(2000)}
    held_out = {row.prompt for row in train.eval_rows(30)} | {row.prompt for row in evaluation.eval_rows(30)}
    held_out |= {evaluation.row(t).prompt for t in range(200)}
    assert trained and held_out and not trained & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, trained))


def test_held_out_is_by_the_question_and_not_by_what_is_put_around_it():
    train = open_sources([Source(args={"terms": 2}, instruction="Add: {prompt}")], 0, "train")
    assert not any(is_held_out(train.row(t).prompt.removeprefix("Add: ")) for t in range(300))


def test_eval_rows_are_fixed_distinct_and_spread_by_weight(tmp_path):
    sources = [numbered(tmp_path, 50, "a"), Source(weight=3.0), Source(generator="countdown", weight=1.0)]
    mixture = open_sources(sources, 0, "eval")
    rows = mixture.eval_rows(100)
    assert rows == open_sources(sources, 0, "eval").eval_rows(100)
    assert collections.Counter(row.source for row in rows) == {"a": 20, "arithmetic": 60, "countdown": 20}
    assert len({plain_text(row.prompt) for row in rows}) == len({row.prompt_id for row in rows}) == 100
    assert {row.prompt for row in mixture.eval_rows(5)} <= {row.prompt for row in rows}


def test_eval_rows_of_a_source_that_has_fewer(tmp_path):
    assert len(open_sources([numbered(tmp_path, 5, "a")], 0, "eval").eval_rows(100)) == 5
    few = open_sources([Source(args={"terms": 1})], 0, "eval").eval_rows(100)
    assert sorted(row.prompt for row in few) == [f"{n}=" for n in range(1, 10) if is_held_out(f"{n}=")]


# ----------------------------------------------------------------------------------------------------------- generators


def test_arithmetic_is_right():
    mixture = open_sources([Source(args={"terms": 3})], 0, "train")
    for ticket in range(100):
        row = mixture.row(ticket)
        terms = [int(term) for term in row.prompt.removesuffix("=").split("+")]
        assert (
            len(terms) == 3 and set(terms) <= set(range(1, 10)) and row.references == (Reference("number", sum(terms)),)
        )


def reachable(values):
    """Every number that an expression over all the values can have; by joining any two of them in any way."""
    if len(values) == 1:
        return set(values)
    found = set()
    for i, j in itertools.permutations(range(len(values)), 2):
        a, b = values[i], values[j]
        rest = [v for k, v in enumerate(values) if k not in (i, j)]
        for joined in [a + b, a - b, a * b] + ([a / b] if b else []):
            found |= reachable(rest + [joined])
    return found


def test_countdown_always_has_a_solution():
    mixture = open_sources([Source(generator="countdown", args={"terms": 3, "largest": 20})], 0, "train")
    for ticket in range(60):
        row = mixture.row(ticket)
        numbers, target = row.references[0].answer["numbers"], row.references[0].answer["target"]
        assert len(numbers) == 3 and target in reachable([Fraction(n) for n in numbers])
        assert f"Reach {target} with the numbers {', '.join(map(str, numbers))}:" in row.prompt


def test_reasoning_gym_rows_are_graded_by_the_tasks_scorer():
    import reasoning_gym

    row = open_sources([Source(kind="reasoning_gym", task="spell_backward")], 0, "train").row(0)
    size, index = row.references[0].answer["args"]["size"], row.references[0].answer["index"]
    item = reasoning_gym.create_dataset("spell_backward", seed=0, size=size)[index]
    assert row.prompt == item["question"]
    pool = GraderPool(1, 20.0)

    async def main():
        return [await pool.score_all(row, text) for text in (item["answer"], "zzz")]

    try:
        assert asyncio.run(main()) == [({"reasoning_gym": 1.0}, None), ({"reasoning_gym": 0.0}, None)]
    finally:
        pool.close()


def test_reasoning_gym_with_another_grader_has_the_answer_as_text():
    row = open_sources([Source(kind="reasoning_gym", task="leg_counting", grader="number")], 0, "train").row(0)
    assert row.references[0].grader == "number" and row.references[0].answer.isdigit()


# ----------------------------------------------------------------------------------------------------------- files, hub

GSM8K = [{"question": f"q{i}", "answer": f"Add {i} and 1.\n#### {i + 1}"} for i in range(5)]


def test_gsm8k_from_the_hub_by_column_names(tmp_path, monkeypatch):
    datasets.Dataset.from_list(GSM8K).to_parquet(tmp_path / "gsm8k.parquet")
    asked = []

    def load_dataset(path, subset, *, split):
        asked.append((path, subset, split))
        return datasets.Dataset.from_parquet(str(tmp_path / "gsm8k.parquet"), cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = Source(kind="hub", path="openai/gsm8k", subset="main", prompt="question", answer="answer", grader="gsm8k")
    mixture = open_sources([source], 0, "train")
    rows = [mixture.row(t) for t in range(5)]
    assert asked == [("openai/gsm8k", "main", "train")]
    assert sorted(row.prompt for row in rows) == [f"q{i}" for i in range(5)] and rows[0].source == "gsm8k"

    async def main():
        pool = GraderPool(1, 10.0)
        scores = [await pool.score_all(row, f"So it is {int(row.prompt[1:]) + 1}.") for row in rows]
        pool.close()
        return scores

    assert asyncio.run(main()) == [({"gsm8k": 1.0}, None)] * 5


@pytest.mark.parametrize("error", [ConnectionError, datasets.exceptions.DatasetNotFoundError, ValueError])
def test_unreachable_hub(monkeypatch, error):
    def load_dataset(*args, **kwargs):
        raise error("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ConfigError, match=r"cannot load the hub data set 'a/b' \(subset None, split train\): .*local file"
    ) as e:
        open_sources([Source(kind="hub", path="a/b", grader="exact")], 0, "train")
    assert "\n" not in str(e.value)


def test_files_jsonl_and_parquet_give_the_same_rows(tmp_path):
    rows = [{"q": [{"role": "user", "content": f"hi {i}"}], "a": i, "more": None} for i in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    write_jsonl(tmp_path / "x.jsonl", rows)
    (tmp_path / "x.json").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    options = dict(kind="file", prompt="q", answer="a", grader="number")
    opened = [
        open_sources([Source(path=str(tmp_path / f"x.{end}"), **options)], 0, "train")
        for end in ("parquet", "jsonl", "json")
    ]
    lists = [[mixture.row(t) for t in range(3)] for mixture in opened]
    assert lists[0] == lists[1] == lists[2]
    assert sorted(row.prompt[0]["content"] for row in lists[0]) == ["hi 0", "hi 1", "hi 2"]


def test_instruction_and_system(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1+1 {x}", "answer": "2"}])
    file = dict(kind="file", path=path, grader="math")
    row = open_sources([Source(**file, instruction="{prompt}\nPut it in \\boxed{}.")], 0, "train").row(0)
    assert row.prompt == "1+1 {x}\nPut it in \\boxed{}."
    row = open_sources([Source(**file, system="Think.")], 0, "train").row(0)
    assert row.prompt == [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1 {x}"}]
    assert plain_text(row.prompt) == "Think.\n1+1 {x}"


# ------------------------------------------------------------------------------------------------------------- mistakes

GOOD = '{"question": "a", "answer": "b"}\n'
BAD_FILES = {
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
    "not JSON": (GOOD + "\n{oops\n", r"line 3 is not a JSON object"),
    "not an object": (GOOD + "[1]\n", r"line 2 is not a JSON object"),
    "no prompt column": (
        '{"prompt": "a", "answer": "b"}\n',
        r"line 1 has no column 'question'; its columns: prompt, answer",
    ),
    "no answer column": (GOOD + '{"question": "a"}\n', r"line 2 has no column 'answer'; its columns: question"),
    "no answer": (GOOD + '{"question": "a", "answer": null}\n', r"line 2 has no answer \(column 'answer'\)"),
    "empty answer": (GOOD + '{"question": "a", "answer": ""}\n', r"line 2 has no answer"),
    "no prompt": (GOOD + '{"question": "", "answer": "b"}\n', r"line 2 has no prompt"),
    "prompt is a number": (
        '{"question": 3, "answer": "b"}\n',
        r"line 1 has a prompt .* neither text nor a list of messages",
    ),
    "messages lack content": (
        '{"question": [{"role": "user"}], "answer": "b"}\n',
        r"line 1 has a prompt .* neither text",
    ),
    "messages of text": ('{"question": ["hello"], "answer": "b"}\n', r"line 1 has a prompt .* neither text"),
}


def check_one_line(sources, match):
    with pytest.raises(ConfigError, match=match) as error:
        open_sources(sources, 0, "train")
    assert "\n" not in str(error.value) and "data.train[" in str(error.value)


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_files(tmp_path, what):
    text, match = BAD_FILES[what]
    (tmp_path / "bad.jsonl").write_text(text)
    check_one_line([Source(), Source(kind="file", path=str(tmp_path / "bad.jsonl"), grader="exact")], match)


@pytest.mark.parametrize(
    "grader, answer, match",
    [
        ("number", "many", "'many' is not a number"),
        ("gsm8k", "no marker", "is not a number"),
        ("choice", "AB", "not one letter"),
        ("format", "(", "cannot use: "),
        ("countdown", {"numbers": [1, "2"], "target": 3}, "must be integers"),
        ("countdown", {"numbers": [1, 2]}, "'target'"),
        ("countdown", 7, "cannot use: "),
    ],
)
def test_answers_that_the_grader_cannot_use(tmp_path, grader, answer, match):
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "a", "answer": answer}])
    check_one_line(
        [Source(kind="file", path=path, grader=grader)], f"line 1 has an answer that grader {grader} .*{match}"
    )


def test_bad_parquet_and_other_endings(tmp_path):
    (tmp_path / "x.parquet").write_text("not parquet")
    check_one_line([Source(kind="file", path=str(tmp_path / "x.parquet"), grader="exact")], "no readable Parquet file")
    datasets.Dataset.from_list([{"question": "a", "answer": ""}]).to_parquet(tmp_path / "y.parquet")
    check_one_line([Source(kind="file", path=str(tmp_path / "y.parquet"), grader="exact")], "row 1 has no answer")
    (tmp_path / "x.csv").write_text("a")
    check_one_line(
        [Source(kind="file", path=str(tmp_path / "x.csv"), grader="exact")], "neither .jsonl, .json nor .parquet"
    )
    (tmp_path / "x.jsonl").write_bytes(GOOD.encode() + b"\xff\xfe\n")
    check_one_line([Source(kind="file", path=str(tmp_path / "x.jsonl"), grader="exact")], "not UTF-8")


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(kind="file", path="nowhere.jsonl", grader="exact"), "there is no file 'nowhere.jsonl'"),
        (dict(kind="file", path="nowhere.jsonl"), "set grader"),
        (dict(kind="fil"), "there is no kind 'fil'; did you mean file?"),
        (dict(generator="arithmetics"), "there is no generator 'arithmetics'; did you mean arithmetic?"),
        (dict(generator="qqqq"), "there is no generator 'qqqq'; one of arithmetic, countdown"),
        (dict(args={"term": 3}), "there is no option 'term'; did you mean terms?"),
        (dict(args={"terms": "3"}), "args.terms must be an integer above 0, not '3'"),
        (dict(args={"terms": 0}), "args.terms must be an integer above 0, not 0"),
        (
            dict(kind="reasoning_gym", task="spell_backwards"),
            "no reasoning-gym task 'spell_backwards'; did you mean spell_backward?",
        ),
        (dict(kind="reasoning_gym", task="spell_backward", args={"x": 1}), "reasoning-gym refuses args"),
        (dict(kind="reasoning_gym", task="game_of_life_halting"), "full marks to any text"),
        (dict(kind="reasoning_gym", task="rush_hour", grader="exact"), "has no answer"),
        (dict(grader="numbr"), "there is no 'numbr'; did you mean number?"),
        (dict(weight=0.0), "weight must be above 0"),
        (dict(weight=float("nan")), "weight must be above 0"),
        (dict(instruction="Add."), "instruction must contain {prompt}"),
    ],
)
def test_bad_sources(options, match):
    check_one_line([Source(**options)], match)


def test_problems_that_depend_on_the_hash_seed_are_refused_unless_it_is_fixed(monkeypatch):
    source = Source(kind="reasoning_gym", task="ransom_note")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_one_line([source], "PYTHONHASHSEED=0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    open_sources([source], 0, "train")


def test_no_source_and_two_of_one_name():
    with pytest.raises(ConfigError, match="data.train: names no source"):
        open_sources([], 0, "train")
    check_one_line([Source(), Source(args={"terms": 2})], "two sources have this name")


# ---------------------------------------------------------------------------------------------------- too long a prompt


def test_long_prompts_are_counted_and_left_out_never_cut(tmp_path):
    rows = [{"question": "x" * n, "answer": "1"} for n in range(1, 11)]
    source = Source(kind="file", path=write_jsonl(tmp_path / "a.jsonl", rows), grader="exact")
    mixture = open_sources([source], 0, "train", lambda row: len(row.prompt) <= 6)
    assert mixture.skipped == 4
    assert sorted(len(mixture.row(t).prompt) for t in range(6)) == [1, 2, 3, 4, 5, 6]
    assert {len(row.prompt) for row in mixture.eval_rows(10)} == {1, 2, 3, 4, 5, 6}
    with pytest.raises(ConfigError, match="all 10 prompts are longer than the context"):
        open_sources([source], 0, "train", lambda row: False)


def test_generated_prompts_that_are_too_long_are_drawn_again_and_counted():
    source = Source(generator="countdown", args={"terms": 2, "largest": 999})
    shortest = len(min((open_sources([source], 0, "train").row(t).prompt for t in range(50)), key=len))
    mixture = open_sources([source], 0, "train", lambda row: len(row.prompt) <= shortest + 3)
    assert max(len(mixture.row(t).prompt) for t in range(50)) <= shortest + 3
    assert mixture.skipped > 0
    with pytest.raises(ConfigError, match="are longer than the context"):
        open_sources([source], 0, "train", lambda row: False)


# ------------------------------------------------------------------------------------------------------------ token ids

CHARACTERS = {c: i for i, c in enumerate(["<s>", "</s>", "<u>", "<a>", *map(chr, range(32, 127))])}
TEMPLATE = (
    "{% for m in messages %}{{ '<u>' + m['content'] + '</s>' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def character_tokenizer(chat_template, adds_bos):
    tokenizer = Tokenizer(models.WordLevel(CHARACTERS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if adds_bos:  # as Llama's: BOS before and, as a few do, EOS behind
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<u>", "<a>"]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def ids(*parts):
    return [CHARACTERS[c] for part in parts for c in ([part] if part in CHARACTERS else part)]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_chat_ids_are_those_of_the_template(adds_bos):
    tokenizer = character_tokenizer(TEMPLATE, adds_bos)
    expected = ids("<u>", "1+1=", "</s>", "<a>")
    assert render("1+1=", tokenizer, "chat") == expected
    assert render([{"role": "user", "content": "1+1="}], tokenizer, "chat") == expected
    messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "2"}]
    assert render(messages, tokenizer, "chat") == ids("<u>", "Hi", "</s>", "<u>", "2", "</s>", "<a>")
    direct = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert render(messages, tokenizer, "chat") == direct
    assert all(type(i) is int for i in render("1", tokenizer, "chat"))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_template_with_bos_gives_one_bos(adds_bos):
    tokenizer = character_tokenizer("{{ bos_token }}" + TEMPLATE, adds_bos)
    assert render("1", tokenizer, "chat") == ids("<s>", "<u>", "1", "</s>", "<a>")


def test_raw_ids_have_bos_only_where_the_tokenizer_adds_it_and_never_eos():
    assert render("1+1=", character_tokenizer(None, adds_bos=False), "raw") == ids("1+1=")
    assert render("1+1=", character_tokenizer(None, adds_bos=True), "raw") == ids("<s>", "1+1=")
    assert render("<s>1", character_tokenizer(None, adds_bos=True), "raw") == ids("<s>", "1")


def test_prompt_and_template_that_do_not_go_together():
    with pytest.raises(ConfigError, match="model.template: raw takes text"):
        render([{"role": "user", "content": "1"}], character_tokenizer(None, False), "raw")
    with pytest.raises(ConfigError, match="no chat template; use raw"):
        render("1", character_tokenizer(None, False), "chat")
