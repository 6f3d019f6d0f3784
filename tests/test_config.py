"""What a user can get wrong in config and arguments, and what they get: exit code 2 and one line that names the key."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import launch
import pretrain
import rollout
import sync
import train
from configs import schema

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pretrain, "ensure", lambda: pytest.fail("the base model was built"))
    monkeypatch.setattr(os, "execv", lambda *args: pytest.fail("torchrun was started"))


@pytest.fixture
def refused(model_dir, tmp_path, capsys):
    """refused(*arguments) -> the one line on stderr of a train.py that exits with code 2."""

    def call(*arguments, defaults=(f"model.path={model_dir}", f"run.dir={tmp_path}/run")):
        assert train.main([*arguments, *defaults]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 600, err
        return err

    return call


def write(path, text):
    path.write_text(text)
    return str(path)


# --------------------------------------------------------------------------------------------------- the default values


def test_defaults_are_the_recipe(tmp_path):
    cfg = schema.load(write(tmp_path / "empty.yaml", ""), [])
    assert (cfg.train.eps, cfg.train.k_max, cfg.train.delta, cfg.train.target_entropy) == (0.6, 2.5, 0.25, 0.3)
    assert (cfg.train.r_min, cfg.train.r_max) == (0.0, 50.0)
    assert (cfg.train.beta1, cfg.train.beta2, cfg.train.adam_eps, cfg.train.weight_decay) == (0.95, 0.95, 1e-15, 0.0)
    assert cfg.train.lr == 1e-6 and cfg.reward.alpha == 0.005


@pytest.mark.parametrize("name", [p.name for p in (ROOT / "configs").glob("*.yaml")])
def test_every_config_file_loads(name):
    cfg = schema.load(str(ROOT / "configs" / name), [])
    again = OmegaConf.merge(OmegaConf.structured(schema.Config), OmegaConf.create(schema.to_yaml(cfg)))
    assert schema.flatten(OmegaConf.to_object(again)) == schema.flatten(cfg), "it reads back as it was written"


def test_every_rule_is_for_a_key_and_every_number_has_a_rule():
    flat = schema.flatten(schema.Config())
    assert schema.RULES.keys() <= flat.keys()
    without = {k for k, v in flat.items() if type(v) in (int, float) and k not in schema.RULES}
    assert without == {"run.seed", "data.train[0].weight", "data.eval[0].weight"}  # checked source by source


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path):
    path = write(tmp_path / "x.yaml", "train: {steps: 3, lr: 1e-4}\nrun: {name: abc}\n")
    cfg = schema.load(path, ["train.steps=4", "train.steps=5"])
    assert (cfg.train.steps, cfg.train.lr, cfg.run.dir) == (5, 1e-4, "runs/abc")
    cfg = schema.load(path, ["run.name=a=b", "data.train[0].args.terms=3", "data.eval=[{}, {}]", "train={steps: 6}"])
    assert (cfg.run.name, cfg.data.train[0].args, len(cfg.data.eval)) == ("a=b", {"terms": 3}, 2)
    assert (cfg.train.steps, cfg.train.lr) == (6, 1e-4), "a section in an override keeps the file's other keys"


# ------------------------------------------------------------------------------------------------------ what is refused

WRONG = {  # arguments -> what the line must say
    # keys
    ("train.lrr=1",): ["train.lrr", "did you mean train.lr?"],
    ("trian.lr=1",): ["trian", "train"],
    ("rollout.steps=1",): ["rollout.steps", "did you mean train.steps?"],
    ("lr=1",): ["unknown config key lr", "did you mean train.lr?"],
    ("dryrun=true",): ["dryrun", "did you mean dry_run?"],
    ("train.stepps.x=1",): ["train.stepps"],
    ("data.train=[{kind: generator, grdaer: number}]",): ["data.train", "grdaer", "did you mean", "grader?"],
    ("zzzzqq=1",): ["zzzzqq"],
    # arguments
    ("train.steps",): ["train.steps", "key=value"],
    ("nowhere.yaml",): ["nowhere.yaml", "not found"],
    ("train.steps=[1",): ["YAML"],
    ("=3",): [],
    # types
    ("train.steps=many",): ["train.steps", "many"],
    ("train.steps=1.5",): ["train.steps"],
    ("train.steps=true",): ["train.steps"],
    ("train.lr=fast",): ["train.lr", "fast"],
    ("train.lr=[1]",): ["train.lr"],
    ("train=5",): ["train"],
    ("train.lr.x=5",): ["train.lr"],
    ("sync.verify=maybe",): ["sync.verify", "maybe"],
    ("train.steps=null",): ["train.steps"],
    ("data.train=5",): ["data.train"],
    ("data.train=[5]",): ["data.train"],
    ("run.name=${run.nothing}",): ["run.name", "run.nothing"],
    ("data.train[x].kind=file",): ["data.train"],
    ("data.train[1].kind=file",): ["data.train[1]"],
    ("data.train[0].kidn=file",): ["data.train[0].kidn", "did you mean data.train[0].kind?"],
    ("run..name=x",): ["run"],
    ("rollout.keep_range=[low,high]",): ["rollout.keep_range"],
    # ranges
    ("train.steps=-1",): ["train.steps", "-1"],
    ("train.groups_per_step=0",): ["train.groups_per_step", "at least 1"],
    ("train.lr=0",): ["train.lr", "above 0"],
    ("train.lr=nan",): ["train.lr", "nan"],
    ("train.lr=inf",): ["train.lr", "inf"],
    ("train.eps=1",): ["train.eps"],
    ("train.beta2=1",): ["train.beta2"],
    ("train.r_min=0.5",): ["train.r_min", "0.4"],
    ("train.r_max=4",): ["train.r_max", "5"],
    ("rollout.group_size=1",): ["rollout.group_size", "at least 2"],
    ("rollout.temperature=0",): ["rollout.temperature"],
    ("rollout.temperature=-0.5",): ["rollout.temperature"],
    ("staleness.max=-1",): ["staleness.max"],
    ("layout.trainers=0",): ["layout.trainers"],
    ("layout.engines=0",): ["layout.engines"],
    ("rollout.top_p=0",): ["rollout.top_p"],
    ("rollout.top_p=1.1",): ["rollout.top_p"],
    ("rollout.keep_range=[0.8,0.1]",): ["rollout.keep_range"],
    ("rollout.keep_range=[0.1]",): ["rollout.keep_range"],
    ("rollout.early_range=[0,nan]",): ["rollout.early_range"],
    ("model.dtype=float16",): ["model.dtype", "bfloat16"],
    ("model.template=jinja",): ["model.template", "raw"],
    ("run.resume=always",): ["run.resume", "never"],
    ("wandb.mode=on",): ["wandb.mode"],
    ("faults.stop_timeout=0",): ["faults.stop_timeout"],
    # contradictions
    ("rollout.top_p=0.97",): ["rollout.top_p", "mask_replay"],
    ("rollout.top_k=50",): ["rollout.top_k", "mask_replay"],
    ("rollout.mask_replay=true",): ["rollout.top_k", "2..4096"],
    ("rollout.mask_replay=true", "rollout.top_p=0.9", "rollout.top_k=1"): ["rollout.top_k"],
    ("rollout.early_size=16",): ["rollout.early_size", "rollout.group_size"],
    ("rollout.stages=[{step: 0, max_tokens: 8}]",): ["rollout.max_tokens", "must be 8", "not 32"],
    ("rollout.stages=[{step: 1, max_tokens: 32}]",): ["rollout.stages[0].step", "step 0"],
    ("rollout.stages=[{max_tokens: 8}, {max_tokens: 32}]",): ["rollout.stages[1].step", "above that of the stage before, 0"],
    ("rollout.stages=[{step: 0}]",): ["rollout.stages[0].max_tokens", "at least 1"],
    ("rollout.stages=[{max_tokens: 32, w_len: -1}]",): ["rollout.stages[0].w_len"],
    ("rollout.stages=[{max_token: 32}]",): ["rollout.stages", "did you mean", "max_tokens?"],
    ("rollout.grow_when_truncated=0.3",): ["rollout.grow_when_truncated", "rollout.stages"],
    ("alarms.action=halt",): ["alarms.action", "warn, stop"],
    ("alarms.ess=2",): ["alarms.ess", "between 0 and 1"],
    ("alarms.patience=0",): ["alarms.patience"],
    ("alarms.entropy_high=0.01",): ["alarms.entropy_high", "alarms.entropy_low"],
    ("rollout.max_concurrent=4",): ["rollout.max_concurrent"],
    ("data.train=[]",): ["data.train"],
    ("data.eval=[]",): ["data.eval"],
    ("data.train=[{weight: 0}]",): ["data.train[0].weight"],
    ("data.train=[{kind: web}]",): ["data.train[0].kind"],
    ("data.train=[{instruction: solve it}]",): ["data.train[0].instruction", "{prompt}"],
    ("rollout.max_tokens=100000",): ["rollout.max_tokens", "context"],
    ("train.max_tokens_per_microbatch=32",): ["train.max_tokens_per_microbatch"],
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_mistake_is_one_line_that_names_the_key(arguments, refused):
    line = refused(*arguments)
    for words in WRONG[arguments]:
        assert words in line, line


BAD_FILES = {
    "a list": ("- 1\n- 2\n", []),
    "a word": ("hello\n", []),
    "not YAML": ("train: {steps: 3\n", ["YAML"]),
    "an unknown key": ("train:\n  stesp: 3\n", ["train.stesp", "did you mean train.steps?"]),
    "a wrong type": ("train:\n  steps: [3]\n", ["train.steps"]),
    "an unknown key of a source": ("data:\n  train:\n    - kind: file\n      pth: x\n", ["pth", "path?"]),
    "binary": ("\x00\x01\x02", []),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_mistake_in_the_file_is_one_line(kind, refused, tmp_path):
    text, words = BAD_FILES[kind]
    line = refused(write(tmp_path / "bad.yaml", text))
    assert all(w in line for w in words), line


def test_directory_as_config_is_one_line(refused, tmp_path):
    (tmp_path / "dir.yaml").mkdir()
    assert "dir.yaml" in refused(str(tmp_path / "dir.yaml"))


# ----------------------------------------------------------------------------------------------------------- the model


def test_model_that_is_not_there(refused, tmp_path):
    line = refused(defaults=[f"model.path={tmp_path}/nowhere", f"run.dir={tmp_path}/run"])
    assert "model.path" in line and "nowhere" in line


@pytest.mark.parametrize("missing", [["tokenizer.json", "tokenizer_config.json"], ["config.json"], ["*"]], ids=str)
def test_model_directory_that_lacks_a_part(missing, refused, model_dir, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model_dir, copy)
    for pattern in missing:
        for path in copy.glob(pattern):
            path.unlink()
    line = refused(defaults=[f"model.path={copy}", f"run.dir={tmp_path}/run"])
    assert "model.path" in line and str(copy) in line


def test_model_without_an_end_token(refused, model_dir, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model_dir, copy)
    (copy / "generation_config.json").unlink()
    described = json.loads((copy / "config.json").read_text())
    described["eos_token_id"] = None
    (copy / "config.json").write_text(json.dumps(described))
    assert "eos_token_id" in refused(defaults=[f"model.path={copy}", f"run.dir={tmp_path}/run"])


# ----------------------------------------------------------------------------------------------------- layout and ranks


def test_world_size_that_does_not_fit(refused, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = refused("layout.trainers=2", "layout.engines=2", "layout.engine_tp=2")
    assert "4 ranks" in line and "--nproc-per-node 6" in line and "layout.trainers=2" in line


def test_only_the_first_rank_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["train.lrr=1"]) == 2
    assert capsys.readouterr() == ("", "")


def test_roles_of_the_ranks():
    cfg = schema.Config()
    cfg.layout.trainers, cfg.layout.engines, cfg.layout.engine_tp = 2, 2, 2
    assert [(r.rank, r.kind, r.engine, r.tp) for r in sync.roles(cfg)] == [
        (0, "learner", -1, -1), (1, "learner", -1, -1),
        (2, "engine", 0, 0), (3, "engine", 0, 1), (4, "engine", 1, 0), (5, "engine", 1, 1),
    ]  # fmt: skip
    assert cfg.world_size == 6


# -------------------------------------------------------------------------------------------------- the run directory


def run_dir_of(tmp_path, model_dir, *overrides):
    folder = tmp_path / "run"
    folder.mkdir()
    cfg = schema.load(None, [f"model.path={model_dir}", f"run.dir={folder}", *overrides])
    write(folder / "config.yaml", schema.to_yaml(cfg))


@pytest.mark.parametrize(
    "override",
    [
        "train.eps=0.3", "rollout.group_size=8", "staleness.max=5", "data.train[0].generator=countdown", "run.seed=1",
        "train.steps_per_update=2",
    ],
)  # fmt: skip
def test_run_directory_of_another_config(override, refused, tmp_path, model_dir):
    run_dir_of(tmp_path, model_dir)
    line = refused(override)
    assert "run.dir" in line and override.split("=")[0] in line


@pytest.mark.parametrize(
    "override",
    ["train.steps=7", "layout.engines=2", "run.name=x", "run.checkpoint_every=3", "eval.k=2", "wandb.mode=disabled"],
)
def test_run_directory_may_go_on_with_more_steps_or_another_layout(override, tmp_path, model_dir, capsys):
    run_dir_of(tmp_path, model_dir)
    assert train.main([override, "dry_run=true", f"model.path={model_dir}", f"run.dir={tmp_path}/run"]) == 0


def test_run_directory_with_more_sources(refused, tmp_path, model_dir):
    run_dir_of(tmp_path, model_dir, "data.train=[{}, {generator: countdown}]")
    assert "data.train[1]" in refused()


def test_resume_never_refuses_a_run_directory(refused, tmp_path, model_dir):
    run_dir_of(tmp_path, model_dir, "run.resume=never")
    assert "run.resume=never" in refused("run.resume=never")


def test_resume_never_starts_in_a_new_directory(tmp_path, model_dir, capsys):
    arguments = ["run.resume=never", "dry_run=true", f"model.path={model_dir}", f"run.dir={tmp_path}/run"]
    assert train.main(arguments) == 0
    assert not (tmp_path / "run").exists(), "a dry run leaves nothing behind"


# ------------------------------------------------------------------------------------------------------------- prompts


def test_context_leaves_room_for_the_response(model_dir, tmp_path):
    """The longest prompt that fits is as long as the context and the row allow, minus the response."""
    words = ["1+1=", "1+2=" + "3" * 100, "2+2=" + "3" * 40]
    write(tmp_path / "p.jsonl", "".join(json.dumps({"question": w, "answer": "2"}) + "\n" for w in words))
    source = f"[{{kind: file, path: {tmp_path}/p.jsonl, grader: number}}]"
    base = [f"model.path={model_dir}", f"data.train={source}", f"data.eval={source}", "rollout.max_tokens=32"]
    tokens = len(words[2]) + 3  # the characters, the role, the end, the next role
    for overrides in ([f"model.context_length={tokens + 32}"], [f"train.max_tokens_per_microbatch={tokens + 32}"]):
        prompts = rollout.open_prompts(schema.load(None, base + overrides))
        assert prompts.train.skipped == 1
        assert sorted(r.prompt for r in prompts.held_out) == [words[0], words[2]]
        key, value = overrides[0].split("=")
        assert rollout.open_prompts(schema.load(None, base + [f"{key}={int(value) - 1}"])).train.skipped == 2


# ------------------------------------------------------------------------------------------------- as a user starts it


def start(*arguments):
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip


def test_command_with_a_mistake():
    done = start("train.lrr=1e-4", "dry_run=true")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip() == "error: unknown config key train.lrr; did you mean train.lr?"


def test_dry_run_prints_config_ranks_and_memory(model_dir, tmp_path):
    done = start("dry_run=true", f"model.path={model_dir}", f"run.dir={tmp_path}/run", "layout.engines=2")
    assert done.returncode == 0, done.stderr
    resolved, table = done.stdout.split("rank  role\n")
    assert OmegaConf.create(resolved).layout.engines == 2
    assert [line.split()[:2] for line in table.splitlines()[:3]] == [["0", "learner"], ["1", "engine"], ["2", "engine"]]
    memory = table.splitlines()[3]
    parameters = 0.1  # millions, to the digit that is printed
    assert memory.startswith(f"memory: {parameters} M parameters") and not math.isnan(parameters)


def test_config_of_a_run_is_never_seen_half_written(tmp_path, monkeypatch):
    """A rank that starts later reads it while the first one writes it."""
    cfg = schema.load(None, [f"run.dir={tmp_path}"])
    launch.write_config(cfg)
    seen, replace = [], os.replace

    def look(source, path):
        seen.append(schema.load(path, []).train.steps)
        replace(source, path)
        seen.append(schema.load(path, []).train.steps)

    monkeypatch.setattr(os, "replace", look)
    cfg.train.steps += 1
    launch.write_config(cfg)
    assert seen == [cfg.train.steps - 1, cfg.train.steps]
