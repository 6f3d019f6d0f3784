"""The tiny base model: reproducible, cached, never half there; its tokenizer, chat format and corpus."""

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pretrain
from configs.schema import ConfigError
from data import arithmetic_problem, is_held_out

ROOT = Path(__file__).parents[1]
SMALL = pretrain.Settings(steps=20, hidden=32, layers=1, heads=2, kv_heads=1, mlp=64, batch=16, microbatch=8)


def weights(path) -> str:
    return hashlib.sha256((Path(path) / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> str:
    return pretrain.ensure(str(tmp_path_factory.mktemp("models") / "small"), SMALL)


@pytest.fixture(scope="module")
def tokenizer(built):
    return AutoTokenizer.from_pretrained(built)


@pytest.fixture
def no_training(monkeypatch):
    def refuse(*_):
        raise AssertionError("trained although nothing changed")

    monkeypatch.setattr(pretrain, "train", refuse)


# -------------------------------------------------------------------------------------------------------- reproducible


def test_the_same_seed_gives_the_same_bytes_whatever_the_threads_and_generators(built, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(99)
    random.seed(99)
    before = torch.random.get_rng_state()
    try:
        again = pretrain.ensure(str(tmp_path / "again"), SMALL)
        assert torch.get_num_threads() == 2, "the caller's thread count is put back"
    finally:
        torch.set_num_threads(threads)
    assert weights(again) == weights(built)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's generator is untouched"


def test_another_process_gives_the_same_bytes(built, tmp_path):
    small = ", ".join(f"{k}={v!r}" for k, v in dataclasses.asdict(SMALL).items())
    code = f"import pretrain; pretrain.ensure({str(tmp_path / 'other')!r}, pretrain.Settings({small}))"
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "5"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert weights(tmp_path / "other") == weights(built)


def test_another_seed_gives_other_weights(built, tmp_path):
    assert weights(pretrain.ensure(str(tmp_path / "m"), dataclasses.replace(SMALL, seed=1))) != weights(built)


# --------------------------------------------------------------------------------------------------------------- cache


def test_nothing_is_trained_when_the_model_is_there(built, no_training):
    assert pretrain.ensure(built, SMALL) == built


def test_other_settings_rebuild(tmp_path):
    path = pretrain.ensure(str(tmp_path / "m"), SMALL)
    first = weights(path)
    other = dataclasses.replace(SMALL, worked=0.5)
    pretrain.ensure(path, other)
    assert weights(path) != first
    assert json.loads((Path(path) / "pretrain.json").read_text())["settings"] == dataclasses.asdict(other)
    pretrain.ensure(path, SMALL)
    assert weights(path) == first


def test_an_edit_of_the_corpus_rebuilds(built, monkeypatch, no_training):
    def arithmetic_problem(rng, terms):
        return "1+1=", 2

    monkeypatch.setattr(pretrain, "arithmetic_problem", arithmetic_problem)
    with pytest.raises(AssertionError, match="trained"):
        pretrain.ensure(built, SMALL)


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "generation_config.json", "pretrain.json"])
def test_a_half_written_directory_is_not_taken_for_a_model(tmp_path, built, missing):
    path = pretrain.ensure(str(tmp_path / "m"), SMALL)
    (Path(path) / missing).unlink()
    pretrain.ensure(path, SMALL)
    assert weights(path) == weights(built)
    AutoTokenizer.from_pretrained(path)


def test_a_kill_while_building_leaves_the_old_model_or_none(tmp_path, monkeypatch):
    """The failure comes after the weights are on disk, which is the latest that a directory can be incomplete."""
    path = tmp_path / "m"

    def fail(self, *_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pretrain.PreTrainedTokenizerFast, "save_pretrained", fail)
        with pytest.raises(KeyboardInterrupt):
            pretrain.ensure(str(path), SMALL)
        assert not path.exists()
    pretrain.ensure(str(path), SMALL)
    old = weights(path)
    with monkeypatch.context() as patch:
        patch.setattr(pretrain.PreTrainedTokenizerFast, "save_pretrained", fail)
        with pytest.raises(KeyboardInterrupt):
            pretrain.ensure(str(path), dataclasses.replace(SMALL, seed=1))
    assert weights(path) == old
    assert {p.name for p in tmp_path.iterdir()} == {"m", ".m.lock"}, "no scratch is left behind"


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="name another directory"):
        pretrain.ensure(str(tmp_path), SMALL)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_that_start_together_build_once(tmp_path, capfd):
    """In threads, which is quicker than processes: the lock is of the open file, so it excludes either."""
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: pretrain.ensure(str(tmp_path / "m"), SMALL), range(2)))
    assert paths == [str(tmp_path / "m")] * 2
    assert capfd.readouterr().out.count("building") == 1


# ----------------------------------------------------------------------------------------------- tokenizer and template


def test_the_model_directory_loads_and_agrees_with_its_tokenizer(built, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.config.architectures == ["Qwen3ForCausalLM"] and model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer), "every id that can be sampled is a token"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.bos_token_id is None


def test_the_default_model_is_small_enough_and_head_dim_suits_the_engine():
    settings = pretrain.Settings()
    model = pretrain.build_model(settings, pretrain.build_tokenizer(settings.context))
    assert sum(p.numel() for p in model.parameters()) <= 3_000_000
    assert settings.head_dim in (32, 64, 128) and settings.heads % settings.kv_heads == 0


def test_every_printable_character_is_a_token_and_comes_back(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\n\t  a . b , c ! \n\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert len(set(tokenizer.encode("".join(map(chr, range(32, 127)))))) == 95
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_the_chat_template_adds_each_special_token_once(tokenizer):
    messages = [{"role": "user", "content": "7+5="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>7+5=<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(text), "encoding the rendered text adds nothing"
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "7", "+", "5", "=", "<|end|>", "<|assistant|>"]
    whole = messages + [{"role": "assistant", "content": "12"}]
    assert tokenizer.apply_chat_template(whole, tokenize=False) == text + "12<|end|>", "the prompt is a prefix"


def test_the_chat_template_knows_tools_and_refuses_other_roles(tokenizer):
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "tool")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|><|tool|>t<|end|>"
    with pytest.raises(Exception, match="unknown role robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": ""}], tokenize=False)


def test_the_corpus_is_written_in_the_chat_format(tokenizer):
    ids, prompt = pretrain.encode(tokenizer, "7+5=", "12")
    assert tokenizer.decode(ids) == "<|user|>7+5=<|end|><|assistant|>12<|end|>"
    assert tokenizer.decode(ids[prompt:]) == "12<|end|>"


# -------------------------------------------------------------------------------------------------------------- corpus


@pytest.fixture(scope="module")
def corpus():
    rng = random.Random(3)
    return [pretrain.document(rng, pretrain.Settings()) for _ in range(20_000)]


def test_the_corpus_has_no_held_out_question(corpus):
    assert not any(is_held_out(question) for question, _ in corpus)
    rng = random.Random(4)
    held_out = {q for q, _ in (arithmetic_problem(rng) for _ in range(2000)) if is_held_out(q)}
    assert len(held_out) > 200 and not held_out & {question for question, _ in corpus}


def test_hardly_any_document_is_worked_and_all_of_those_are_right(corpus):
    settings = pretrain.Settings()
    sums = [(q, r) for q, r in corpus if q.count("+") == settings.terms - 1]
    worked = [(q, r) for q, r in sums if "=" in r]
    assert len(worked) / len(corpus) == pytest.approx(settings.worked, abs=0.01) and settings.worked <= 0.15
    for question, response in worked:
        numbers = [int(n) for n in question[:-1].split("+")]
        totals = [sum(numbers[: i + 1]) for i in range(len(numbers))]
        steps = "".join(f"+{n}={t}" for n, t in zip(numbers[1:], totals[1:]))
        assert response == f"{numbers[0]}{steps}"


def test_most_direct_answers_are_wrong(corpus):
    settings = pretrain.Settings()
    direct = [(q, int(r)) for q, r in corpus if q.count("+") == settings.terms - 1 and "=" not in r]
    off = [answer - sum(map(int, q[:-1].split("+"))) for q, answer in direct]
    assert sum(o == 0 for o in off) / len(off) == pytest.approx(settings.direct_right, abs=0.02)
    assert settings.direct_right < 0.5
    assert set(off) == set(range(-settings.error, settings.error + 1))


def test_worked_response_by_hand():
    assert pretrain.worked_response("7+5+9+3=") == "7+5=12+9=21+3=24"
    assert pretrain.worked_response("12+9=") == "12+9=21"


# ------------------------------------------------------------------------------------------------------------ training


def test_the_loss_is_of_the_response_and_blind_to_padding(built, tokenizer):
    """Against a loop over single documents and positions, through log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(built)
    documents = [pretrain.encode(tokenizer, q, r) for q, r in (("7+5=", "12"), ("7+5+9+3=", "7+5=12+9=21+3=24"))]
    expected = 0.0
    for ids, prompt in documents:
        logp = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        expected -= sum(logp[t - 1, ids[t]].item() for t in range(prompt, len(ids)))
    assert pretrain.response_loss(model, documents).item() == pytest.approx(expected, rel=1e-5)


def test_orthogonal_brings_singular_values_near_one():
    for shape in ((8, 20), (20, 8), (16, 16)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(pretrain.orthogonal(matrix))
        # the quintic's fixed band; tiny singular values of a square matrix may stay below it
        assert values.max() < 1.25 and values[: min(shape) // 2].min() > 0.6


def test_training_lowers_the_loss(built, tokenizer):
    rng = random.Random(7)
    documents = [pretrain.encode(tokenizer, *pretrain.document(rng, SMALL)) for _ in range(64)]
    torch.manual_seed(0)
    untrained = pretrain.build_model(SMALL, tokenizer)
    trained = AutoModelForCausalLM.from_pretrained(built)
    with torch.no_grad():
        assert pretrain.response_loss(trained, documents) < 0.8 * pretrain.response_loss(untrained, documents)
