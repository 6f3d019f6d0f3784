"""Checkpoints: loaded by new processes, of another number of ranks, after a kill in mid-save; and the export."""

import json
import os

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import sync
import train
from batch import make_batches
import trajectory

OVERRIDES = ["train.groups_per_step=4", "rollout.group_size=2", "train.lr=1e-2", "train.max_tokens_per_microbatch=24"]


def make_groups(seed):
    rng = np.random.default_rng(seed)
    return [tiny.group(rng, ticket, response=int(rng.integers(2, 9))) for ticket in range(4)]


class Learner:
    """Policy, optimiser and progress of a rank, without the rest of a run."""

    def __init__(self, cfg, ranks):
        self.cfg, self.ranks = cfg, ranks
        self.policy = train.load_policy(cfg, ranks)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=cfg.train.lr, betas=(cfg.train.beta1, cfg.train.beta2), eps=1e-3, fused=True
        )
        self.progress = checkpoint.load(cfg.run.dir, self.policy, self.optimizer, ranks)

    def take_step(self, seed):
        batches = make_batches(make_groups(seed), self.cfg.layout.trainers, 24, version=0)
        train.gradient_step(self.policy, self.optimizer, batches[self.ranks.role.rank], 0.0, self.cfg, lambda: False)

    def save(self, step, **progress):
        self.progress = checkpoint.Progress(step=step, **progress)
        tokenizer = AutoTokenizer.from_pretrained(self.cfg.model.path)
        checkpoint.save(self.cfg, self.policy, self.optimizer, self.progress, tokenizer, self.ranks)

    def state(self):
        """Everything that decides how the training goes on."""
        moments = {}
        for name, p in self.policy.named_parameters():
            for key, value in self.optimizer.state[p].items():
                moments[f"{name} {key}"] = sync.full_tensor(value).numpy().copy()
        settings = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        return tiny.weights(self.policy), moments, settings


def equal(a, b, tolerance=0.0):
    assert a.keys() == b.keys() and a
    for name in a:
        assert np.abs(a[name] - b[name]).max() <= tolerance, name


WAITING = dict(low=3, done=[5, 9], next_ticket=14, clip_k=0.75, stage=1, truncated=[0.25])


def steps_and_save(cfg, ranks, save_at, until):
    """An uninterrupted run of `until` steps that saves after `save_at`; its state then and in the end, and random
    numbers drawn right after the save."""
    learner = Learner(cfg, ranks)
    torch.manual_seed(ranks.role.rank)
    saved = drawn = None
    for step in range(1, until + 1):
        learner.take_step(step)
        if step == save_at:
            learner.save(step, waiting=make_groups(77), **WAITING)
            saved, drawn = learner.state(), torch.rand(3).numpy()
    return saved, drawn, learner.state()


def resume_and_step(cfg, ranks, until):
    learner = Learner(cfg, ranks)
    progress, loaded, drawn = learner.progress, learner.state(), torch.rand(3).numpy()
    for step in range(progress.step + 1, until + 1):
        learner.take_step(step)
    account = {name: value for name, value in vars(progress).items() if name != "waiting"}
    return (account, trajectory.encode(progress.waiting)), loaded, drawn, learner.state()


@pytest.mark.parametrize("savers, loaders", [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_resumed_in_new_processes_as_if_never_interrupted(savers, loaders, model_dir, tmp_path):
    def cfg(trainers):
        return tiny.config(model_dir, tmp_path, *OVERRIDES, f"layout.trainers={trainers}", engines=0)

    before = tiny.run_ranks(cfg(savers), steps_and_save, 2, 4)
    after = tiny.run_ranks(cfg(loaders), resume_and_step, 4)
    for rank, ((account, waiting), loaded, drawn, final) in enumerate(after):
        assert account == dict(step=2, **WAITING)
        assert waiting == trajectory.encode(make_groups(77))
        for a, b in zip(before[0][0][:2], loaded[:2]):
            equal(a, b)
        assert before[0][0][2] == loaded[2], "learning rate and the rest of the optimiser's settings"
        if rank < savers:
            assert (drawn == before[rank][1]).all(), "the generators go on where they were"
        for a, b in zip(before[0][2][:2], final[:2]):
            equal(a, b, 1e-6 if savers != loaders else 0.0)


def save_at_0(cfg, ranks):
    Learner(cfg, ranks).save(0)


def first_step(cfg, ranks):
    learner = Learner(cfg, ranks)
    learner.take_step(1)
    return learner.state()


def test_run_that_stopped_before_its_first_step_takes_it_as_a_new_run_does(model_dir, tmp_path):
    """Saving makes torch fill in the optimiser's state, which must not count as a step that was taken."""
    cfg = tiny.config(model_dir, tmp_path / "a", *OVERRIDES, engines=0)
    tiny.run_ranks(cfg, save_at_0)
    assert checkpoint.latest(cfg.run.dir) == 0
    (resumed,) = tiny.run_ranks(cfg, first_step)
    cfg.run.dir = str(tmp_path / "b")
    (fresh,) = tiny.run_ranks(cfg, first_step)
    for a, b in zip(resumed[:2], fresh[:2]):
        equal(a, b)


def save_and_fail(cfg, ranks, where):
    """Saves step 1, then is killed in the middle of saving step 2."""
    learner = Learner(cfg, ranks)
    learner.take_step(1)
    learner.save(1)
    saved = learner.state()
    learner.take_step(2)

    def killed(*args, **options):
        if where != "before the rename" or str(args[0]).endswith(".partial"):  # torch renames files of its own
            raise KeyboardInterrupt
        return real(*args, **options)

    owner, name = {
        "before the weights": (checkpoint.dcp, "save"),
        "in the export": (checkpoint, "save_file"),
        "before the account": (checkpoint, "write"),
        "before the rename": (os, "rename"),
    }[where]
    real = getattr(owner, name)
    setattr(owner, name, killed)
    with pytest.raises(KeyboardInterrupt):
        learner.save(2)
    return saved


@pytest.mark.parametrize("where", ["before the weights", "in the export", "before the account", "before the rename"])
def test_kill_while_saving_leaves_the_previous_checkpoint(where, model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, *OVERRIDES, "run.keep_checkpoints=1", engines=0)
    (saved,) = tiny.run_ranks(cfg, save_and_fail, where)
    assert checkpoint.latest(tmp_path) == 1
    (((account, _), loaded, _, _),) = tiny.run_ranks(cfg, resume_and_step, 0)
    assert account["step"] == 1
    for a, b in zip(saved[:2], loaded[:2]):
        equal(a, b)


def save_often(cfg, ranks):
    learner = Learner(cfg, ranks)
    folder = os.path.join(cfg.run.dir, "checkpoints")
    os.makedirs(os.path.join(folder, "step_5.partial", "hf"))  # what kills left behind
    os.makedirs(os.path.join(folder, "step_9.partial"))
    there = []
    for step in (7, 8, 9, 100):
        learner.save(step)
        there.append(sorted(os.listdir(folder)))
    return there


def test_the_last_checkpoints_are_kept_and_no_leftovers(model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, *OVERRIDES, "run.keep_checkpoints=2", engines=0)
    (there,) = tiny.run_ranks(cfg, save_often)
    assert there[-1] == ["step_100", "step_9"]
    assert there[1] == ["step_7", "step_8"]
    assert checkpoint.latest(tmp_path) == 100, "by number, not by name"
    assert checkpoint.latest(tmp_path / "nothing here") == -1


@pytest.mark.parametrize("dtype, trainers", [("float32", 2), ("bfloat16", 1)])
def test_export_is_the_policy_for_transformers(dtype, trainers, model_dir, tmp_path):
    cfg = tiny.config(model_dir, tmp_path, *OVERRIDES, f"model.dtype={dtype}", f"layout.trainers={trainers}", engines=0)
    weights = tiny.run_ranks(cfg, export)[0]
    hf = tmp_path / "checkpoints" / "step_1" / "hf"
    assert len(list(hf.glob("*.safetensors"))) > 1, "the test needs several files"
    exported = AutoModelForCausalLM.from_pretrained(hf, dtype=dtype)

    expected = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    names = {f"lm.{name}" for name, _ in expected.named_parameters()}
    assert weights.keys() == names
    expected.load_state_dict({n.removeprefix("lm."): torch.from_numpy(w) for n, w in weights.items()}, strict=False)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, expected(ids).logits)

    described = json.loads((hf / "config.json").read_text())
    assert described["architectures"] == ["Qwen3ForCausalLM"], "SGLang looks the model up by this name"
    assert described["dtype"] == dtype
    generation = json.loads((hf / "generation_config.json").read_text())
    assert generation["eos_token_id"] == expected.generation_config.eos_token_id
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {n.removeprefix("lm.") for n in names}

    ours, theirs = AutoTokenizer.from_pretrained(hf), AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "7+5="}, {"role": "assistant", "content": "12"}]
    assert ours.apply_chat_template(chat)["input_ids"] == theirs.apply_chat_template(chat)["input_ids"]
    assert ours.get_vocab() == theirs.get_vocab() and ours.eos_token == theirs.eos_token


def export(cfg, ranks):
    checkpoint.SHARD_BYTES = 30_000
    learner = Learner(cfg, ranks)
    learner.take_step(1)
    learner.save(1)
    return tiny.weights(learner.policy)
