"""An engine rank: hosts one SGLang server, pulls prompts, runs rollouts, gates, grades, ships groups.

Read it from the bottom: `EngineRank.run` is the loop, `run_group` the life of one prompt (first responses, gate, full
group, gate, penalties). The server itself, and what happens when it or another one fails, is engine.py.

A group belongs to the rank that began it, from its prompt to its message to the learner. Where the rank's own engine
fails, its requests go on elsewhere; grading, gates and everything else stay.
"""

import asyncio
import math
import os
import time
from dataclasses import dataclass
from typing import Optional

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

import data
import engine
import faults
import sync
import trajectory
from configs.schema import Config, ConfigError, Stage
from grading import GraderPool
from judge import Judge
from language import foreign_words
from rewards import language_part, length_part, merge, shape
from routing import Routing, routing_of
from server import EngineError, Response, Sampling, stop_signals

POLL = 0.01  # seconds between looks at the run state

# ----------------------------------------------------------------------------------------------------------- one response


def to_rollout(prompt: list[int], response: Response, text: str, task: float, failure: Optional[str]) -> trajectory.Rollout:
    """Prompt ids (mask 0) followed by the sampled ids (mask 1)."""
    p, r = len(prompt), len(response.ids)

    def after_prompt(values, fill):
        return np.concatenate([np.full(p, fill, values.dtype), values])

    return trajectory.Rollout(
        tokens=np.concatenate([np.array(prompt, dtype=np.int32), response.ids]),
        mask=after_prompt(np.ones(r, dtype=np.uint8), 0),
        behaviour_logp=after_prompt(response.logp, 0.0),
        versions=after_prompt(response.versions, -1),
        text=text,
        finish=response.finish,
        task=task,
        failure=failure,
        kept_counts=None if response.kept_counts is None else after_prompt(response.kept_counts, 0),
        kept_ids=response.kept_ids,
        experts=response.experts,
    )


# ---------------------------------------------------------------------------------------------------------- gate, rewards


def merge_tasks(row: data.Row, rollouts: list[trajectory.Rollout]) -> list[float]:
    """The task scores of a group, which are also set, from the scores of the row's graders."""
    scores = [[r.parts[f"grader/{reference.grader}"] for reference in row.references] for r in rollouts]
    tasks = merge(row.merge, scores, [r.weight for r in row.references], [r.veto for r in row.references])
    for rollout, task in zip(rollouts, tasks, strict=True):
        rollout.task = task
    return tasks


def passes(task: float) -> bool:
    """A response passes if its raw task score is positive (the merges in rewards.py say what that means)."""
    return task > 0


def gate(tasks: list[float], low: float, high: float) -> bool:
    """Whether the pass rate of a group is worth learning from. Raw task scores, never shaped rewards."""
    return low <= np.mean([passes(t) for t in tasks]) <= high


def has_variance(tasks: list[float]) -> bool:
    """Without it every advantage is zero. A tolerance, because scores may be fractions."""
    return max(tasks) - min(tasks) > 1e-6


# --------------------------------------------------------------------------------------------------------- the engine rank


@dataclass
class Prompts:
    """What turns a ticket into token ids and sampled ids into text."""

    train: data.Mixture
    held_out: list[data.Row]
    tokenizer: PreTrainedTokenizerBase
    template: str
    model_path: str
    vocab_size: int  # of the model: at least as large as the tokenizer's
    stop_ids: list[int]
    skipped: int  # prompts of local data that were left out because they are longer than `room`
    room: int  # tokens of the longest prompt that leaves room for a response
    judge: Judge  # what grader `judge` asks
    routing: Optional[Routing] = None  # of the model, where it is replayed

    def ids(self, row: data.Row) -> list[int]:
        return data.render(row.prompt, self.tokenizer, self.template)

    def decode(self, ids: np.ndarray) -> str:
        """The text that is graded: without special tokens; ids that the tokenizer does not know give nothing."""
        return self.tokenizer.decode(ids[ids < len(self.tokenizer)].tolist(), skip_special_tokens=True)


def open_prompts(config: Config) -> Prompts:
    """Tokenizer, training prompts and held-out prompts of a run. Raises ConfigError before anything expensive starts."""
    path = config.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model_config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        what = "has no usable config.json and tokenizer" if os.path.isdir(path) else "is no directory and no hub model"
        raise ConfigError(f"model.path: {path} {what} ({str(error).splitlines()[0][:200]})") from error
    if not tokenizer.encode("0", add_special_tokens=False):  # transformers makes an empty one up where there is none
        raise ConfigError(f"model.path: {path} has no tokenizer, or one that does not know the digit 0")
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = model_config.eos_token_id  # a model directory need not have a generation_config.json
    if eos is None:
        raise ConfigError(f"model.path: {path} names no eos_token_id: responses would never end")
    limit = config.model.context_length or model_config.max_position_embeddings
    room = min(limit, config.train.max_tokens_per_microbatch) - config.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in the context of {limit} and "
            f"train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch}"
        )

    def fits(row: data.Row) -> bool:
        return len(data.render(row.prompt, tokenizer, config.model.template)) <= room

    train = data.open_sources(config.data.train, config.run.seed, "train", fits)
    evaluation = data.open_sources(config.data.eval, config.run.seed, "eval", fits)
    held_out = evaluation.eval_rows(config.eval.prompts)
    return Prompts(
        train,
        held_out,
        tokenizer,
        config.model.template,
        path,
        vocab_size=model_config.vocab_size,
        stop_ids=[eos] if isinstance(eos, int) else list(eos),
        skipped=train.skipped + evaluation.skipped,
        room=room,
        judge=Judge(config.judge),
        routing=routing_of(model_config, path) if config.rollout.routing_replay else None,
    )


class EngineRank:
    """The loop of a rank that hosts a server: pull, generate, grade, ship; load weights; evaluate; stop."""

    def __init__(self, config: Config, ranks: sync.Ranks, prompts: Prompts):
        self.config, self.ranks, self.prompts = config, ranks, prompts
        rollout = config.rollout
        self.state = sync.RunState(ranks.store, config.staleness.max, config.groups_per_update)
        self.engine = engine.Engine(config, ranks, self.state, prompts.model_path, prompts.stop_ids)
        self.engines = engine.Engines(config, ranks, self.state, self.engine)
        self.samplings = [  # one per stage of the length curriculum
            Sampling(
                rollout.temperature, stage.max_tokens, rollout.top_p, rollout.top_k, rollout.mask_replay, prompts.routing,
                prompts.vocab_size,
            )  # fmt: skip
            for stage in config.stages
        ]
        # Always the longest limit: held-out numbers of one run are comparable, and no rise of theirs is a raised limit.
        self.eval_sampling = Sampling(config.eval.temperature, rollout.max_tokens, vocab_size=prompts.vocab_size)
        self.requests = asyncio.Semaphore(max(1, rollout.max_concurrent // rollout.responses_per_request))
        self.running = 0  # requests that engines have
        self.totals = trajectory.EngineStats(self.engine.index)

    async def run(self) -> None:
        """From the start of the server to the end of the run."""
        try:
            await self.engine.start()
            await self.work()
        finally:
            if self.engine.server.http is not None:
                await self.engine.server.http.close()

    async def work(self) -> None:
        self.state.open()
        # As many as the gate lets be under way: without rejected groups it is the gate that shuts first.
        self.outbox = trajectory.Outbox(self.ranks, (self.config.staleness.max + 1) * self.config.groups_per_update)
        self.outbox.send(self.totals)  # before the run can take a step: so every step knows which engines live
        self.state.ready()
        plan = self.state.plan()
        limits = self.config.rollout
        self.graders = GraderPool(limits.grader_workers, limits.grader_timeout, self.prompts.judge)
        self.ready_at = self.looked_at = time.monotonic()
        tasks: set[asyncio.Task] = {asyncio.create_task(self.engine.supervise())}
        eval_done = -1
        patience, loop = self.config.faults.stall_after, asyncio.get_running_loop()
        watchdog = faults.Watchdog(patience, self.config.run.dir, self.ranks.record, self.describe, loop)
        try:
            while not (seen := self.state.read()).stop:
                watchdog.saw(seen.progress)
                if stop_signals and not seen.stop_asked:
                    self.state.ask_stop(f"{stop_signals[0]} to rank {self.ranks.role.rank}")
                if seen.version > self.engine.copy_version:
                    await self.engine.receive(seen.version, plan)
                    if self.engine.loading:
                        tasks.add(self.engine.loading)
                if seen.eval_id > eval_done and self.engine.copy_version == seen.version >= 0:
                    eval_done = seen.eval_id
                    tasks.add(asyncio.create_task(self.run_eval(eval_done, self.engine.copy_version)))
                while self.may_begin(seen):
                    version = self.engine.server.version
                    ticket = self.state.claim(self.ranks.role.rank, version)
                    if ticket is None:
                        break
                    tasks.add(asyncio.create_task(self.run_group(ticket, seen.stage, version)))
                    await asyncio.sleep(0)  # let it take its requests, so that `locked` tells the truth
                self.report()
                self.outbox.pump()
                for task in [t for t in tasks if t.done()]:
                    tasks.remove(task)
                    task.result()  # a failed group or evaluation ends the run with its reason
                await asyncio.sleep(POLL)
            await self.engine.release_lenders()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.graders.close()
            self.outbox.close()

    def may_begin(self, seen: sync.Snapshot) -> bool:
        """Whether this rank has room for another group, an engine of its own to begin it on, and a learner that takes it."""
        serving = self.engine.status == engine.SERVING
        return serving and not seen.stop_asked and not self.requests.locked() and not self.outbox.is_full

    def describe(self) -> dict:
        """What the watchdog writes of this rank. Another thread asks, at any moment."""
        hosted = self.engine.describe()
        return {"doing": f"{self.running} request(s) run, its engine is {hosted['status']}"} | hosted

    def report(self) -> None:
        """Running totals for the learner's log, about once a second."""
        now = time.monotonic()
        if self.running:
            self.totals.busy += now - self.looked_at
        self.looked_at = now
        if now - self.ready_at - self.totals.wall > 0.5:
            self.totals.wall = now - self.ready_at
            self.totals.serving = self.engine.status == engine.SERVING
            self.totals.pause = self.engine.pause
            self.totals.restarts, self.totals.retried = self.engine.restarted, self.engines.retried
            self.totals.memory_gb = self.engine.memory_gb
            self.outbox.send(self.totals)

    async def respond(self, prompt: list[int], n: int, sampling: Sampling, version: int) -> list[Response]:
        """`n` responses under `version` or later ones, as requests that wait for room in the engine."""

        async def request(k):
            async with self.requests:
                self.running += 1
                try:
                    return await self.engines.generate(prompt, k, sampling, version)
                finally:
                    self.running -= 1

        size = self.config.rollout.responses_per_request
        sizes = [min(size, n - i) for i in range(0, n, size)]
        responses = [r for some in await asyncio.gather(*(request(k) for k in sizes)) for r in some]
        self.totals.tokens += sum(len(r.ids) for r in responses)
        self.totals.prompt_tokens += sum(r.prompt_tokens for r in responses)
        self.totals.cached_tokens += sum(r.cached_tokens for r in responses)
        return responses

    async def rollouts(
        self, row: data.Row, prompt: list[int], n: int, sampling: Sampling, version: int
    ) -> list[trajectory.Rollout]:
        """`n` graded rollouts of one prompt, not yet merged and shaped."""

        async def graded(response):
            text = self.prompts.decode(response.ids)
            scores, failure = await self.graders.score_all(row, text)
            rollout = to_rollout(prompt, response, text, math.nan, failure)  # merge_tasks sets the task score
            rollout.parts = {f"grader/{name}": score for name, score in scores.items()}
            return rollout

        return await asyncio.gather(*(graded(r) for r in await self.respond(prompt, n, sampling, version)))

    async def run_group(self, ticket: int, stage: int, version: int) -> None:
        """The life of one prompt: early responses, gate, full group, gate, penalties, off to the learner; all of it
        under the limits of one stage of the length curriculum, and none of it by weights older than `version`."""
        config = self.config.rollout
        row = self.prompts.train.row(ticket)
        prompt = self.prompts.ids(row)
        sampling = self.samplings[stage]
        dropped = None
        rollouts = []
        if config.early_size:
            rollouts += await self.rollouts(row, prompt, config.early_size, sampling, version)
            if not gate(merge_tasks(row, rollouts), *config.early_range):
                dropped = "early_gate"
        if not dropped:
            rollouts += await self.rollouts(row, prompt, config.group_size - len(rollouts), sampling, version)
            tasks = merge_tasks(row, rollouts)
            if not has_variance(tasks):
                dropped = "zero_variance"
            elif not gate(tasks, *config.keep_range):
                dropped = "keep_gate"
        # in a thread: it reads every word of long texts
        await asyncio.to_thread(self.shape_rewards, row, rollouts, self.config.stages[stage])
        for rollout in rollouts:
            rollout.check(self.prompts.vocab_size, self.prompts.routing)
        if dropped:
            self.state.give_back()
        self.outbox.send(
            trajectory.Group(ticket, self.engine.index, row.prompt_id, row.source, row.prompt, rollouts, dropped, stage)
        )

    def shape_rewards(self, row: data.Row, rollouts: list[trajectory.Rollout], stage: Stage) -> None:
        """The reward of each rollout from its parts (rewards.shape); the parts are kept for the log."""
        weights = self.config.reward
        pass_rate = float(np.mean([passes(r.task) for r in rollouts]))
        for r in rollouts:
            length = int(r.mask.sum())
            words = foreign_words(r.text, data.plain_text(row.prompt))
            limits = dict(foreign_words=words, length=length, max_length=stage.max_tokens)
            r.reward = shape(
                r.task, **limits, pass_rate=pass_rate, w_lang=weights.w_lang, alpha=weights.alpha, w_len=stage.w_len
            )
            r.parts |= {
                "foreign_words": float(words),
                "lang": language_part(words, weights.alpha),
                "len": length_part(pass_rate, length, stage.max_tokens),
            }

    async def run_eval(self, eval_id: int, version: int) -> None:
        """This engine's share of the held-out prompts, k samples each. The learner publishes nothing meanwhile."""
        share = self.prompts.held_out[self.engine.index :: self.config.layout.engines]

        async def one(row):
            rollouts = await self.rollouts(row, self.prompts.ids(row), self.config.eval.k, self.eval_sampling, version)
            versions = {v for r in rollouts for v in r.versions[r.mask == 1]}
            if versions != {version}:
                raise EngineError(f"an evaluation of version {version} ran under versions {versions}")
            # Each as a group of its own: a merge over the group would compare samples that nobody compares.
            return float(np.mean([passes(task) for r in rollouts for task in merge_tasks(row, [r])]))

        passed = await asyncio.gather(*(one(row) for row in share))
        sources = [row.source for row in share]
        self.outbox.send(trajectory.EvalPart(eval_id, self.engine.index, version, sources, passed))


def serve(config: Config, ranks: sync.Ranks, prompts: Prompts) -> None:
    """Runs an engine rank to the end of the run; its server never outlives this call."""
    if ranks.role.tp > 0:
        return engine.lend_device(config, ranks, sync.RunState(ranks.store, config.staleness.max, config.groups_per_update))
    rank = EngineRank(config, ranks, prompts)
    try:
        asyncio.run(rank.run())
    finally:
        rank.engine.server.stop()
