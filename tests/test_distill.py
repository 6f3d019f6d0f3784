"""The self-distillation reset on made-up rollout stores: what is chosen (against brute force), how it is taught (against
separate sequences in float64 and the formulas), what is written, and what a user gets wrong."""

import json
import math
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
import distill
import pretrain
import train
from configs import schema
from configs.schema import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def line(
    prompt="1+2=", response="3", version=5, task=1.0, finish="stop", failure=None, prompt_ids=(4, 30, 1, 5), **more
):
    """A line of a store, of pretrain's tokenizer; a version for each sampled token, or one for all."""
    ids = [9 + ord(c) - 32 for c in response] + [1] * (finish == "stop")
    versions = [version] * len(ids) if isinstance(version, int) else list(version)
    n = len(prompt_ids)
    return {
        "prompt_id": "p", "source": "p", "prompt": prompt, "tokens": [*prompt_ids, *ids], "mask": [0] * n + [1] * len(ids),
        "behaviour_logp": [0.0] * (n + len(ids)), "versions": [-1] * n + versions, "text": response, "task": task,
        "reward": task, "parts": {}, "finish": finish, "failure": failure, "ticket": 0, "learned_at": 1, "dropped": None,
    } | more  # fmt: skip


def evaluation(step, rate, source="p", prompts=100, version=None):
    version = step if version is None else version
    return {
        "step": step,
        "version": version,
        "source": source,
        "pass_at_1": rate,
        "stderr": 0.0,
        "k": 1,
        "prompts": prompts,
    }


def write_run(folder: Path, model: str, files: list[list[dict]], evals=(), *overrides) -> str:
    """A run directory as train.py leaves it, without checkpoints."""
    (folder / "rollouts").mkdir(parents=True)
    overrides = [f"model.path={model}", f"run.dir={folder}", "layout.threads=1", *overrides]
    (folder / "config.yaml").write_text(schema.to_yaml(schema.load(None, overrides)))
    for step, lines in enumerate(files, 1):
        text = "".join(json.dumps(item) + "\n" for item in lines)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    (folder / "eval.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
    return str(folder)


def sums(rng, n, version=5):
    """n right answers to different sums, rendered as the chat template of pretrain.py renders them."""
    tokenizer = pretrain.build_tokenizer(512)
    items = []
    while len(items) < n:
        a, b = rng.randrange(1, 60), rng.randrange(1, 60)
        if all(item["prompt"] != f"{a}+{b}=" for item in items):
            ids = tuple(data.render(f"{a}+{b}=", tokenizer, "chat"))
            items.append(line(f"{a}+{b}=", f"{a}+{b}={a + b}", version, prompt_ids=ids))
    return items


# -------------------------------------------------------------------------------------------------------- which traces


@pytest.mark.parametrize(
    "rates, expected",
    [
        ([0.3, 0.5, 0.8, 0.98, 0.97, 0.99, 0.5, 0.1], (30, 50)),  # before the collapse, from the start of the plateau
        ([0.3, 0.5, 0.9, 0.6, 0.1], (10, 20)),  # no plateau: from the evaluation before
        ([0.3, 0.98, 0.5, 0.98, 0.98], (30, 40)),  # the latest of equals; a dip cuts the plateau
        ([0.3, 0.6, 0.2, 0.99], (20, 30)),  # nothing within the margin
        ([0.97, 0.98, 0.99, 0.1], (0, 20)),
    ],
)
def test_window_ends_at_the_best_evaluation_and_starts_with_its_plateau(rates, expected):
    assert distill.window([evaluation(10 * i, rate) for i, rate in enumerate(rates)], 0.02) == expected


def test_window_counts_sources_by_their_prompts_and_speaks_of_versions():
    evals = [evaluation(10 * i, 0.0, version=5 * i) for i in range(4)]
    many, few = [0.1, 0.5, 0.4, 0.3], [0.0, 0.0, 0.9, 0.9]  # 0.09, 0.45, 0.45, 0.36: the latest of equals
    evals = [evaluation(10 * i, r, "many", 900, 5 * i) for i, r in enumerate(many)]
    evals += [evaluation(10 * i, r, "few", 100, 5 * i) for i, r in enumerate(few)]
    assert distill.window(evals, 0.02) == (5, 10)


def test_window_of_a_run_that_never_improved():
    with pytest.raises(ConfigError, match="no evaluation is better than the first"):
        distill.window([evaluation(0, 0.3), evaluation(10, 0.2)], 0.02)
    with pytest.raises(ConfigError, match="better than the first"):
        distill.window([evaluation(0, 0.5), evaluation(10, 0.4), evaluation(20, 0.5)], 0.02)
    with pytest.raises(ConfigError, match="--versions"):
        distill.window([], 0.02)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, "usable"),
        ({"task": 0.0}, "failed"),
        ({"task": -1.0}, "failed"),
        ({"failure": "grader died"}, "failed"),
        ({"finish": "length"}, "unfinished"),
        ({"version": (3, 4)}, "of other publications"),  # began before the window
        ({"version": (6, 7)}, "of other publications"),  # ended after it
        ({"version": (4, 6)}, "usable"),
        ({"text": "hack"}, "filtered"),
    ],
)
def test_verdict(change, expected):
    r = distill.decode(json.dumps(line(**change)).encode(), "file", 1)
    assert distill.verdict(r, (4, 6), lambda r: r.text != "hack") == expected


def test_choice_is_even_over_prompts_distinct_and_complete():
    for seed in range(200):
        rng = random.Random(seed)
        prompts = [rng.choice("abcdefg") for _ in range(rng.randint(1, 40))]
        copies = [rng.randint(1, 5) for _ in prompts]
        n, per_prompt = rng.randint(1, 40), rng.randint(1, 4)
        chosen = distill.choose(prompts, copies, n, per_prompt, seed)
        have, taken = Counter(prompts), Counter(prompts[i] for i in chosen)
        assert len(set(chosen)) == len(chosen) == min(n, sum(min(count, per_prompt) for count in have.values()))
        most = max(taken.values())
        assert most <= per_prompt
        assert all(taken[p] >= min(have[p], most - 1) for p in have), "one prompt had a turn more than another"
        assert chosen == distill.choose(prompts, copies, n, per_prompt, seed)


def test_choice_within_a_prompt_is_as_if_copies_were_shuffled():
    """Brute force: shuffle the copies of 5 + 2 + 1 rollouts, keep the first of each."""
    rng, rounds = random.Random(0), 4000
    expected, seen = Counter(), Counter()
    for seed in range(rounds):
        copies = [0] * 5 + [1] * 2 + [2]
        rng.shuffle(copies)
        expected[tuple(dict.fromkeys(copies))] += 1
        seen[tuple(distill.choose("aaa", [5, 2, 1], 3, 3, seed))] += 1
    assert set(seen) == set(expected)
    for order in expected:
        assert abs(seen[order] - expected[order]) < 5 * math.sqrt(2 * expected[order])


def test_counts_keep_the_shares():
    assert distill.counts_by_share([1000], [1.0], 64) == [64]
    assert distill.counts_by_share([40], [1.0], 64) == [40]
    assert distill.counts_by_share([1000, 1000], [3.0, 1.0], 100) == [75, 25]
    assert distill.counts_by_share([1000, 20], [3.0, 1.0], 100) == [60, 20]  # fewer in all, not another mixture
    rng = random.Random(0)
    for _ in range(300):
        runs = rng.randint(1, 4)
        available, shares = [rng.randint(1, 50) for _ in range(runs)], [rng.uniform(0.1, 1) for _ in range(runs)]
        most = rng.randint(runs, 60)
        counts = distill.counts_by_share(available, shares, most)
        n = sum(counts)
        assert n <= most and all(0 <= c <= a for c, a in zip(counts, available))
        assert n < 2 * runs or all(abs(c - n * s / sum(shares)) < 1 + runs for c, s in zip(counts, shares))


def test_held_out_prompts_are_a_fraction_and_never_all():
    prompts = [str(i // 3) for i in range(300)]
    held_out = distill.hold_out(prompts, 0.1, 0)
    assert len(held_out) == 10 and held_out < set(prompts) and held_out != distill.hold_out(prompts, 0.1, 1)
    assert distill.hold_out(["a", "a"], 0.9, 0) == set()
    assert distill.hold_out(prompts, 0.0, 0) == set()


# ----------------------------------------------------------------------------------------------------------- the store


def test_candidates_equal_brute_force_over_the_store(tmp_path):
    rng = random.Random(0)
    files = [
        [
            line(
                f"{rng.randrange(6)}", rng.choice(["1", "22", "hack"]), (rng.randrange(8),) * 6, rng.choice([0.0, 1.0, 0.5]),
                rng.choice(["stop", "length"]), rng.choice([None, None, "died"]), prompt_ids=(4, 20 + rng.randrange(6), 5),
            )
            for _ in range(120)
        ]
        for _ in range(3)
    ]  # fmt: skip
    for item in (item for lines in files for item in lines):
        item["versions"] = item["versions"][: len(item["tokens"])]
    run = write_run(tmp_path / "run", "none", files)
    elsewhere_tokens = next(i["tokens"] for i in files[2] if i["task"] and i["finish"] == "stop" and i["text"] == "22")
    elsewhere = {distill.digest(np.array(elsewhere_tokens, dtype=np.int64).tobytes())}
    found, verdicts = distill.candidates(run, (2, 5), lambda r: r.text != "hack", elsewhere)

    expected = Counter(
        tuple(i["tokens"]) for lines in files for i in lines
        if i["task"] > 0 and i["finish"] == "stop" and i["failure"] is None and 2 <= i["versions"][-1] <= 5
        and i["text"] != "hack" and i["tokens"] != elsewhere_tokens
    )  # fmt: skip
    assert len(expected) > 5 and max(expected.values()) > 1
    assert {tuple(distill.read(place).tokens): copies for place, copies in found.items()} == expected
    assert verdicts["usable"] == sum(expected.values()) and sum(verdicts.values()) == 360
    assert verdicts["of another run too"] > 0 and verdicts["filtered"] > 0
    by_prompt = {}
    for place in found:
        by_prompt.setdefault(place.prompt, set()).add(distill.read(place).prompt)
    assert all(len(prompts) == 1 for prompts in by_prompt.values())
    assert len(by_prompt) == len({distill.read(place).prompt for place in found})


def test_a_last_line_that_a_kill_cut_short_is_skipped_and_counted(tmp_path):
    run = write_run(tmp_path / "run", "none", [[line(), line("other", "7")]])
    path = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    found, verdicts = distill.candidates(run, (0, 9), distill.keep, set())
    assert len(found) == 1 and verdicts == {"usable": 1, "cut short": 1}


@pytest.mark.parametrize(
    "broken, what",
    [
        ('{"prompt": "1', "is no rollout"),
        ("{}", "is no rollout"),
        (json.dumps(line(mask=[0, 1])), "do not fit together"),
        (json.dumps(line() | {"mask": [0, 0, 2, 1, 1, 1]}), "do not fit together"),
        (json.dumps(line() | {"tokens": [10**30] * 6}), "is no rollout"),
        (json.dumps(line() | {"mask": [1] * 6}), "do not fit together"),
        (json.dumps(line() | {"mask": [0] * 6}), "do not fit together"),
    ],
)
def test_any_other_broken_line_is_an_error_that_names_it(tmp_path, broken, what):
    run = write_run(tmp_path / "run", "none", [[line()]])
    path = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    path.write_text(path.read_text() + broken + "\n" + json.dumps(line()) + "\n")
    with pytest.raises(ConfigError, match=f"{path}: line 2 .*{what}"):
        distill.candidates(run, (0, 9), distill.keep, set())


# ---------------------------------------------------------------------------------------------------------- the tokens


def stored(**changes):
    return distill.decode(json.dumps(line(**changes)).encode(), "file", 1)


def test_another_prompt_format_keeps_the_ids_of_the_response(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    r = stored(prompt_ids=(7, 7, 7))
    chat = distill.render_again(r, tokenizer, "chat", keep_ids=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, return_dict=False
    )
    assert chat.tokens == prompt + r.tokens[3:] and chat.mask == [0] * len(prompt) + [1, 1]
    raw = distill.render_again(r, tokenizer, "raw", keep_ids=True)
    assert raw.tokens == tokenizer.encode("1+2=") + r.tokens[3:]


def test_another_vocabulary_takes_the_text_and_its_own_end(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    r = stored()
    r.tokens = [90] * len(r.tokens)
    again = distill.render_again(r, tokenizer, "chat", keep_ids=False)
    assert again.tokens[-2:] == tokenizer.encode("3") + [tokenizer.eos_token_id] and again.mask[-2:] == [1, 1]
    assert len(again.tokens) == len(again.mask) == len(again.versions)


def test_a_trace_of_several_turns_cannot_be_rendered_again(model_dir):
    r = stored(response="3+4")
    r.mask = [0, 0, 0, 0, 1, 0, 1, 1]
    with pytest.raises(ConfigError, match="several turns"):
        distill.render_again(r, AutoTokenizer.from_pretrained(model_dir), "chat", keep_ids=True)


# ------------------------------------------------------------------------------------------------------------ teaching


@pytest.mark.parametrize("steps, warmup", [(100, 0.02), (1000, 0.02), (7, 0.5), (3, 0.0), (1, 0.02)])
def test_schedule_is_its_formula(steps, warmup):
    rise = max(1, round(steps * warmup))
    for step in range(steps):
        expected = (step + 1) / rise if step < rise else math.cos(math.pi / 2 * (step - rise) / (steps - rise)) ** 2
        assert distill.schedule(step, steps, warmup) == pytest.approx(expected)
    assert distill.schedule(steps, steps, warmup) < 1e-9 or steps == rise  # asked for after the last step


def test_dropout_is_on_in_training_off_in_evaluation_and_gone_afterwards(model_dir):
    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        plain, config = lm(ids).logits, lm.config.to_dict()
        with distill.residual_dropout(lm, 0.15):
            outputs = []
            watched = [lm.model.layers[1].self_attn, lm.model.layers[0].mlp]
            hooks = [m.register_forward_hook(lambda m, args, out: outputs.append(out)) for m in watched]
            one, two = lm(ids).logits, lm(ids).logits
            [hook.remove() for hook in hooks]
            still = lm.eval()(ids).logits
        lm.train()
        after = lm(ids).logits
    assert not torch.equal(one, two) and not torch.equal(one, plain)
    assert torch.equal(still, plain) and torch.equal(after, plain)
    for out in outputs[:2]:
        out = out[0] if isinstance(out, tuple) else out
        assert abs((out == 0).float().mean() - 0.15) < 0.03  # 2,560 values: 4 standard deviations
    assert lm.config.to_dict() == config


@pytest.mark.parametrize("capacity", [24, 400])
def test_the_packed_gradient_is_that_of_separate_sequences(model_dir, capacity):
    rng = np.random.default_rng(0)
    traces = [tiny.rollout(rng, int(rng.integers(1, 8)), int(rng.integers(1, 15))) for _ in range(9)]
    policy = train.Policy(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), 1.0, 16).train()
    loss = distill.mean_loss(policy, traces, capacity, torch.float32, learn=True)

    exact = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
    total, n = 0.0, sum(int(t.mask.sum()) for t in traces)
    for t in traces:
        at = np.flatnonzero(t.mask)
        logp = exact(torch.from_numpy(t.tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
        total = total - logp[at - 1, t.tokens[at].tolist()].sum() / n
    total.backward()
    assert loss == pytest.approx(total.item(), abs=1e-5)
    for (name, p), q in zip(policy.lm.named_parameters(), exact.parameters()):
        assert (p.grad - q.grad).abs().max() < 1e-5 * max(1, q.grad.abs().max()), name
    assert distill.mean_loss(policy, traces, capacity, torch.float32, learn=False) == pytest.approx(loss, abs=1e-5)
    assert math.isnan(distill.mean_loss(policy, [], capacity, torch.float32, learn=False))


# ------------------------------------------------------------------------------------------------------- the whole thing

QUICK = ["--steps", "30", "--batch", "16", "--lr", "3e-3", "--prompts", "100"]


@pytest.fixture(scope="module")
def run(model_dir, tmp_path_factory):
    """A run that was best at version 20 and collapsed: what it sampled at version 30 passes too, and must not be taught."""
    rng = random.Random(0)
    good, late = sums(rng, 120, 15), [item | {"text": "late"} for item in sums(rng, 40, 30)]
    evals = [evaluation(s, r) for s, r in [(0, 0.1), (10, 0.7), (20, 0.9), (30, 0.2)]]
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", model_dir, [good, good[:30], late], evals)


@pytest.fixture(scope="module")
def student(run):
    """(directory, the model as it was in memory, the arguments of finetune)"""
    kept = {}
    with pytest.MonkeyPatch.context() as patch:
        write, finetune = distill.write, distill.finetune
        patch.setattr(distill, "write", lambda out, lm, *rest: (kept.update(lm=lm), write(out, lm, *rest)))
        patch.setattr(distill, "finetune", lambda *args: (kept.update(args=args), finetune(*args))[1])
        assert distill.main([run + "/", *QUICK]) == 0
    return run + "-reset/student", kept["lm"], kept["args"]


def test_only_traces_of_the_window_are_taught_and_no_prompt_is_on_both_sides(student):
    _, _, (_, taught, held_out, _, _) = student
    assert (len(taught), len(held_out)) == (114, 6)
    assert {int(v) for t in taught + held_out for v in t.versions[t.mask == 1]} == {15}
    assert not {t.text.split("=")[0] for t in taught} & {t.text.split("=")[0] for t in held_out}


def test_with_few_prompts_the_publications_reach_further_back(run, model_dir, tmp_path, capsys):
    """The window is 10..20; the store has 20 prompts of publication 15 and 30 of publication 3."""
    rng = random.Random(1)
    evals = [evaluation(s, r) for s, r in [(0, 0.1), (10, 0.7), (20, 0.9), (30, 0.2)]]
    few = write_run(tmp_path / "few", model_dir, [sums(rng, 20, 15), sums(rng, 30, 3), sums(rng, 40, 30)], evals)
    for wanted, said in [("15", "publications 10..20; 20 of 20"), ("40", "publications 0..20; 50 of 50")]:
        out = str(tmp_path / f"student{wanted}")
        assert distill.main([few, "--out", out, *QUICK, "--prompts", wanted, "--steps", "2"]) in (0, 2)
        assert said in capsys.readouterr().out


def test_the_student_loads_and_gives_the_same_logits(student, model_dir):
    path, lm, _ = student
    again = AutoModelForCausalLM.from_pretrained(path)
    assert again.dtype == torch.float32
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, lm.eval()(ids).logits)
        assert torch.equal(again.train()(ids).logits, again.eval()(ids).logits), "dropout would be alive in the RL run"
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    assert again.config.to_dict() | {"_name_or_path": ""} == base.config.to_dict() | {"_name_or_path": ""}
    assert again.generation_config.eos_token_id == base.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(path).get_vocab() == AutoTokenizer.from_pretrained(model_dir).get_vocab()
    assert not Path(path + ".partial").exists()


def test_the_record_and_the_loss(student, run, model_dir):
    record = json.loads((Path(student[0]) / distill.RECORD).read_text())
    losses = record["losses"]
    assert losses["held_out"]["30"] < 0.5 * losses["held_out"]["0"] and len(losses["train"]) == 30
    assert record["base"] == model_dir and record["options"]["seed"] == 0 and record["options"]["dropout"] == 0.15
    (mine,) = record["runs"]
    assert (mine["run"], mine["versions"], mine["traces"], mine["prompts"]) == (run, [10, 20], 120, 120)
    assert mine["verdicts"] == {"usable": 150, "of other publications": 40}


def test_the_config_of_the_run_starts_from_the_student(student, run, capsys):
    arguments = [f"model.path={student[0]}", f"run.dir={run}-reset", "dry_run=true"]
    assert train.main([f"{run}/config.yaml", *arguments]) == 0, capsys.readouterr().err


def test_a_run_from_a_student_is_distilled_into_the_clean_base(student, model_dir, run):
    config = schema.load(f"{run}/config.yaml", [f"model.path={student[0]}"])
    assert distill.clean_base(config) == model_dir


def test_make_reset_distils_once_and_starts_the_run(run):
    recipe = subprocess.check_output(["make", "-n", "reset", f"RUN={run}/", "ARGS=train.lr=1"], cwd=ROOT, text=True)
    distils, starts = recipe.replace("\\\n", "").splitlines()[-2:]
    there, otherwise = distils.split("else")
    assert f'if test -e "{run}-reset/student"; then echo' in there and "distill.py" not in there
    assert f'.venv/bin/python distill.py "{run}" --out "{run}-reset/student"' in otherwise
    expected = (
        f'train.py "{run}/config.yaml" "model.path={run}-reset/student" "run.dir={run}-reset" run.name=tiny-reset train.lr=1'
    )
    assert " ".join(starts.split()).endswith(expected)


def test_specialists_are_merged_by_share(run, model_dir, tmp_path, capsys):
    other = write_run(tmp_path / "other", model_dir, [sums(random.Random(1), 20)])
    out = tmp_path / "deep" / "merged"
    assert distill.main([f"{run}=0.75", f"{other}=0.25", "--out", str(out), "--versions", "0:20", *QUICK]) == 0
    record = json.loads((out / distill.RECORD).read_text())
    first, second = (mine["traces"] for mine in record["runs"])
    assert first + second == sum(record["traces"].values()) and second <= 20 and first == 3 * second
    assert "there are no more in these shares" in capsys.readouterr().out


def test_the_filter_decides(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_filter.py").write_text("def long(r):\n    return len(r.text) > 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--filter", "my_filter:long", "--out", str(tmp_path / "student"), *QUICK]
    assert distill.main([run, *options]) == 0
    record = json.loads((tmp_path / "student" / distill.RECORD).read_text())
    long = {item.text for item in map(distill.read, distill.candidates(run, (10, 20), distill.keep, set())[0])}
    assert record["runs"][0]["traces"] == sum(len(text) > 8 for text in long) < 120


# ------------------------------------------------------------------------------------------------------ a user's mistakes


@pytest.fixture
def refused(capsys):
    """refused(*arguments) -> the one line on stderr of a distill.py that exits with code 2."""

    def call(*arguments):
        assert distill.main([str(a) for a in arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 500, err
        return err

    return call


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--versions", "30"], "FIRST:LAST"),
        (["--versions", "9:3"], "FIRST:LAST"),
        (["--versions", "40:50"], "no rollout of publications 40..50"),
        (["--examples", "0"], "at least 1"),
        (["--dropout", "1"], "below 1"),
        (["--lr", "nan"], "above 0"),
        (["--filter", "nothing:there"], "nothing"),
        (["--filter", "distill:there"], "there"),
        (["--exmples", "3"], "exmples"),
        (["--template", "html"], "html"),
        (["--row-tokens", "10"], "--row-tokens"),
        (["--base", "/nowhere"], "/nowhere"),
        (["--lr", "5", "--steps", "2", "--held-out", "0.5"], "lower --lr"),
    ],
)
def test_wrong_options_are_one_line(refused, run, tmp_path, options, expected):
    assert expected in refused(run, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_wrong_runs_are_one_line(refused, run, model_dir, tmp_path):
    assert "no run directory" in refused(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "config.yaml" in refused(tmp_path / "empty")
    bare = write_run(tmp_path / "bare", model_dir, [], [evaluation(0, 0.1), evaluation(10, 0.5)])
    assert "rollouts" in refused(bare)
    assert "--out" in refused(run, bare)
    assert "share" in refused(f"{run}=much")
    assert "twice" in refused(f"{run}=0.5", f"{run}=0.5", "--out", tmp_path / "out")
    other = write_run(tmp_path / "other", str(tmp_path), [[line()]])
    assert "--base" in refused(run, other, "--out", tmp_path / "out")
    raw = write_run(tmp_path / "raw", model_dir, [[line()]], [], "model.template=raw")
    assert "--template" in refused(run, raw, "--out", tmp_path / "out")
    (tmp_path / "taken").mkdir()
    assert "exists" in refused(run, "--out", tmp_path / "taken")


def test_a_base_of_another_format_or_vocabulary_needs_a_template(refused, run, model_dir, tmp_path):
    base = shutil.copytree(model_dir, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>", "<|assistant|>\n")
    tokenizer.save_pretrained(base)
    assert "--template" in refused(run, "--base", base, "--out", tmp_path / "out")
    assert distill.main([run, "--base", str(base), "--template", "chat", "--out", str(tmp_path / "out"), *QUICK]) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(["one"])
    tokenizer.save_pretrained(base)
    assert "--template" in refused(run, "--base", base, "--out", tmp_path / "other")
