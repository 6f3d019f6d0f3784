"""Start here. Asynchronous reinforcement learning of a language model, from one torchrun.

    torchrun --standalone --nproc-per-node 2 train.py [configs/X.yaml] [dotted.key=value ...]
    python train.py ...                 # the same: checks everything, then starts torchrun with the right world size
    python train.py ... dry_run=true    # only checks, prints the rank table and the memory estimate

`main` gives every rank its role. Engine ranks go to rollout.serve; learner ranks to `learn`, which reads as the run does:
wait for a batch -> gradient step -> publish the weights -> evaluate -> log -> checkpoint.

Left out on purpose: a reference model and KL term, a value function, an entropy bonus (the recipe has none of them), and
model parallelism of our own (sharding is FSDP2's, serving parallelism is SGLang's).
"""

import math
import os
import signal
import sys
import time
from typing import Optional

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoModelForCausalLM

import checkpoint
import faults
import launch
import log
import rollout
import routing
import server
import sync
import trajectory
from batch import Batch, Buffer, Row, make_batches
from configs import schema
from configs.schema import Config, ConfigError, Stage
from grading import WorkerLost
from objective import batch_loss, importance_ratio, is_controlled, next_clip_k, ratio_and_bounds
from objective import group_advantages, policy_loss  # noqa: F401 (train.policy_loss is where others look for it)
from rewards import GraderError

# ------------------------------------------------------------------------------------------------- the length curriculum

GROW_OVER = 10  # steps over which rollout.grow_when_truncated looks


def next_stage(stages: list[Stage], stage: int, step: int, truncated: list[float], grow: float) -> int:
    """The stage of the length curriculum, by index, that groups begin in once gradient step `step` is taken.

    `truncated`: the share of truncated responses at each step of `stage` so far. From `grow` on, as a mean over the
    last GROW_OVER of them, the next stage begins before its step; 0: never. No stage is left for an earlier one.
    """
    scheduled = max(i for i, s in enumerate(stages) if s.step <= step)
    recent = truncated[-GROW_OVER:]
    too_short = grow > 0 and len(recent) == GROW_OVER and sum(recent) / GROW_OVER >= grow
    return max(scheduled, min(stage + too_short, len(stages) - 1))


# ------------------------------------------------------------------------------------------------------------- the policy


def token_logp(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, temperature: float, kept: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Logprobs [n] of `targets` [n] under softmax(head(hidden) / temperature), hidden [n, d], in float32.

    With `kept` [n, K] (ids that the sampler kept, padded with -1) the softmax runs over exactly those ids.
    """
    logits = head(hidden).float() / temperature
    target_logits = logits.gather(1, targets[:, None])[:, 0]
    if kept is not None:
        logits = logits.gather(1, kept.clamp(min=0)).masked_fill(kept < 0, -math.inf)
    return target_logits - logits.logsumexp(-1)


class Policy(nn.Module):
    """A causal language model that answers with logprobs: a [tokens, vocabulary] tensor never exists.

    With `replay` its routers take the experts that each row brings.
    """

    def __init__(self, lm: nn.Module, temperature: float, chunk: int, replay: bool = False):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.chunk = chunk
        self.routers = routing.attach(lm) if replay else ()  # a tuple or list: not a second path to them

    def forward(self, row: "Row") -> torch.Tensor:
        """The logprob of every sampled token of a packed row, [N]."""
        if bool(self.routers) != (row.experts is not None):
            raise ValueError("routing replay needs a row with experts, and only it takes one")
        replayed = {"routed_experts": row.experts} if self.routers else {}
        # use_cache=False: with a cache, transformers would let the packed sequences see each other
        out = self.lm.base_model(
            input_ids=row.tokens[None], position_ids=row.positions[None], use_cache=False, **replayed
        )
        hidden = out.last_hidden_state[0, row.predictors]  # [N, d]
        logps = []
        for i in range(0, max(1, len(row.targets)), self.chunk):  # an empty row takes part too, in FSDP's collectives
            part = slice(i, i + self.chunk)
            kept = None if row.kept is None else row.kept[part]
            logps.append(
                recompute(
                    token_logp, hidden[part], self.lm.lm_head, row.targets[part], self.temperature, kept,
                    use_reentrant=False,
                )
            )  # fmt: skip
        return torch.cat(logps)


def load_policy(config: Config, ranks: sync.Ranks) -> Policy:
    """The base model as float32 masters under FSDP2, sharded over the learner ranks."""
    lm = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, attn_implementation=config.model.attention
    )
    lm.train()
    policy = Policy(lm, config.rollout.temperature, config.train.logprob_chunk, config.rollout.routing_replay)
    if config.model.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = DeviceMesh.from_group(
        ranks.learners, ranks.device.type, mesh=list(range(config.layout.trainers)), mesh_dim_names=("learners",)
    )
    compute = MixedPrecisionPolicy(param_dtype=getattr(torch, config.model.dtype), reduce_dtype=torch.float32)
    for layer in lm.base_model.layers:
        if config.model.compile:
            layer.compile(dynamic=True)
        fully_shard(layer, mesh=mesh, mp_policy=compute)
    fully_shard(policy, mesh=mesh, mp_policy=compute)
    return policy


# ------------------------------------------------------------------------------------------------------ one gradient step


def gradient_step(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, k: float, config: Config, stopping):
    """Forward, backward and update over the rows of a batch; the metrics of the global batch.

    Returns None, with nothing changed, where `stopping()` turned true between two rows.
    """
    train, device = config.train, next(policy.parameters()).device
    sums = torch.zeros(10, dtype=torch.float64)
    peaks = torch.zeros(2, dtype=torch.float64)
    rerouted = torch.zeros(2, dtype=torch.float64)  # (token, layer) pairs: replay changed the choice; all
    for row in batch.rows:
        if stopping():
            optimizer.zero_grad(set_to_none=True)
            return None
        row = row.to(device)
        logp = policy(row)
        loss = batch_loss(
            logp, row.behaviour_logp, row.advantages, row.sequence, tokens=batch.normalizer, sequences=batch.sequences,
            max_tokens=config.rollout.max_tokens, k=k, train=train,
        )  # fmt: skip
        # FSDP averages over ranks, the normaliser is global: the product undoes the average.
        (loss * config.layout.trainers).backward()
        if policy.routers:
            rerouted += routing.changed(policy.routers, row.experts).cpu()
        with torch.no_grad():
            log_ratio = logp - row.behaviour_logp
            r = importance_ratio(logp, row.behaviour_logp)
            bounded, low, high = ratio_and_bounds(logp, row.behaviour_logp, row.sequence, k, train)
            staleness = (batch.version - row.versions).double()
            sums += torch.stack(
                [
                    loss.double() * batch.normalizer,
                    (-logp * r).sum(),
                    ((bounded < low) & (row.advantages < 0)).sum(),
                    ((bounded > high) & (row.advantages > 0)).sum(),
                    ((r < train.r_min) | (r > train.r_max)).sum(),
                    (r - 1 - log_ratio).sum(),
                    staleness.sum(),
                    torch.tensor(len(row.tokens), device=device),
                    r.double().sum(),
                    r.double().pow(2).sum(),
                ]
            ).double().cpu()
            if len(logp):
                peaks = torch.maximum(peaks, torch.stack([log_ratio.abs().max().double(), staleness.max()]).cpu())
    if config.layout.trainers > 1:
        group = policy_group(policy)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(rerouted, group=group)
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), train.clip_grad)
    grad_norm = float(sync.full_tensor(grad_norm))
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"gradient norm {grad_norm}, loss {sums[0] / batch.normalizer}: the step was not taken")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    sums = (sums / batch.normalizer).tolist()
    replay = {"train/routing_changed_frac": float(rerouted[0] / rerouted[1])} if policy.routers else {}
    return replay | {
        "train/loss": sums[0],
        "train/grad_norm": grad_norm,
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/entropy": sums[1],
        "train/clip_k": k,
        "train/clip_low_frac": sums[2],
        "train/clip_high_frac": sums[3],
        "train/outer_clip_frac": sums[4],
        "train/mismatch_kl": sums[5],
        "train/mismatch_max": float(peaks[0]),
        "train/ess": sums[8] ** 2 / sums[9],  # (sum r)^2 / (N sum r^2): 1 where all ratios are equal
        "train/tokens": batch.normalizer,
        "train/packing_fill": sums[7] * batch.normalizer
        / (len(batch.rows) * config.layout.trainers * train.max_tokens_per_microbatch),
        "staleness/mean": sums[6],
        "staleness/max": float(peaks[1]),
    }  # fmt: skip


def policy_group(policy: Policy) -> dist.ProcessGroup:
    return next(policy.parameters()).device_mesh.get_group()


# ---------------------------------------------------------------------------------------------------------------- learner


LAST_WORDS_S = 3.0  # seconds that the last checkpoint waits for groups that are on their way


class Learner:
    """A learner rank. Rank 0 also owns the run: buffer, publication, evaluation, log, checkpoint."""

    def __init__(self, config: Config, ranks: sync.Ranks, prompts: rollout.Prompts):
        self.config, self.ranks, self.prompts = config, ranks, prompts
        torch.set_num_threads(server.threads(config))
        self.policy = load_policy(config, ranks)
        train = config.train
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=train.lr, betas=(train.beta1, train.beta2), eps=train.adam_eps,
            weight_decay=train.weight_decay, fused=True,
        )  # fmt: skip
        self.progress = checkpoint.load(config.run.dir, self.policy, self.optimizer, ranks)
        for group in self.optimizer.param_groups:
            group["lr"] = train.lr  # a run may go on with another one than its checkpoint was saved with
        self.step = self.progress.step
        self.k = self.progress.clip_k
        self.saved_step = checkpoint.latest(config.run.dir)
        self.version = self.step // train.steps_per_update
        self.parameters = sync.published_parameters(self.policy.lm)
        shapes = sync.published_shapes(self.policy.lm)
        self.plan = sync.plan_buckets(shapes, config.model.dtype, config.sync.bucket_mb << 20)
        self.state = sync.RunState(ranks.store, config.staleness.max, config.groups_per_update)
        if ranks.is_first:
            self.open_run()
        self.state.open()
        self.doing = "starting"  # for the watchdog
        self.moves = 0

    def open_run(self) -> None:
        saved = self.progress
        self.inbox = trajectory.Inbox(self.ranks)
        self.truncated = list(saved.truncated)
        self.stage = next_stage(self.config.stages, saved.stage, self.step, [], 0.0)
        learned = self.step * self.config.train.groups_per_step
        plan = [[tuple(vars(slot).values()) for slot in bucket] for bucket in self.plan]
        self.state.create(
            counted=learned + len(saved.waiting), next_ticket=saved.next_ticket, redo=saved.redo, plan=plan,
            stage=self.stage,
        )  # fmt: skip
        self.buffer = Buffer(
            self.state, self.config.staleness.max, self.prompts.vocab_size, saved, self.prompts.routing
        )
        self.log = log.RunLog(self.config, self.step)
        self.engines = {}  # index -> (its last totals, when they came)
        self.evals: dict[int, list[trajectory.EvalPart]] = {}
        self.eval_asked = -1  # step of the evaluation that is under way
        self.hopeless = ""  # why waiting for another batch is in vain
        self.collapse = ""  # the alarm that stops the run

    # -- waiting

    def stopping(self) -> bool:
        """Whether the run should save and stop. All learner ranks get the same answer (a collective call)."""
        asked = bool(server.stop_signals) or bool(self.state.read().stop_asked)
        if self.config.layout.trainers == 1:
            return asked
        flag = torch.tensor(int(asked))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.ranks.learners)
        return bool(flag)

    def receive(self, timeout: float) -> None:
        for message in self.inbox.receive(timeout):
            if isinstance(message, trajectory.Group):
                self.buffer.add(message)
            elif isinstance(message, trajectory.EvalPart):
                self.evals.setdefault(message.eval_id, []).append(message)
            else:
                self.engines[message.engine] = (message, time.monotonic())

    def receive_the_rest(self) -> None:
        """Receives what engines have sent up to now: a living one says twice a second how much that is."""
        began = time.monotonic()
        while not self.inbox.is_complete(began) and time.monotonic() < began + LAST_WORDS_S:
            self.receive(timeout=0.1)

    def wait_for(self, ready, what: str) -> bool:
        """Receives until `ready()`; False where the run is asked to stop first, or has nothing left to learn from. How long
        that may take is for the watchdog to say."""
        self.doing = f"waiting for {what}"
        while not ready():
            if server.stop_signals or self.state.read().stop_asked or self.hopeless:
                return False
            self.receive(timeout=0.2)
        return True

    def next_batch(self) -> Optional[Batch]:
        """This rank's part of the next full batch; None where the run is asked to stop first."""
        batches = [None] * self.config.layout.trainers
        if self.ranks.is_first:
            need = self.config.train.groups_per_step

            def full():
                self.receive(timeout=0)
                for group in self.buffer.drop_stale(self.version):
                    self.ranks.record("drop", ticket=group.ticket, why=group.dropped)
                is_full, rejected = len(self.buffer.waiting) >= need, self.buffer.rejected
                too_many = not is_full and len(rejected) >= self.config.rollout.max_rejected
                self.hopeless = nothing_to_learn(rejected) if too_many else ""
                return is_full

            if self.wait_for(full, "a full batch"):
                self.groups = self.buffer.take(need)
                train = self.config.train
                capacity = train.max_tokens_per_microbatch
                batches = make_batches(
                    self.groups, self.config.layout.trainers, capacity, self.version, train.objective
                )
        mine = [None]
        self.doing = "waiting for its part of a batch"
        dist.scatter_object_list(mine, batches if self.ranks.is_first else None, src=0, group=self.ranks.learners)
        return mine[0]

    # -- the watchdog

    def moved(self) -> None:
        """A gradient step, an evaluation or a checkpoint is done."""
        self.moves += 1
        self.watchdog.saw(self.moves)
        if self.ranks.is_first:
            self.state.move(self.moves)

    def describe(self) -> dict:
        """What the watchdog writes of this rank. Another thread asks, at any moment."""
        state = {"doing": self.doing, "step": self.step, "version": self.version}
        if self.ranks.is_first:
            now = time.monotonic()
            heard = ", ".join(f"{i}: {now - came:.0f} s ago" for i, (_, came) in list(self.engines.items()))
            state |= {
                "groups waiting": f"{len(self.buffer.waiting)}, a batch takes {self.config.train.groups_per_step}",
                "evaluation asked for": self.eval_asked if self.eval_asked >= 0 else "none",
                "engines heard of": heard or "none",
            }
        return state

    # -- the run

    def learn(self) -> bool:
        """The story of a run. On rank 0 the answer: whether it is finished, its last evaluation included."""
        config, train = self.config, self.config.train
        # The other learner ranks do not see an evaluation of rank 0 end, so they leave it to rank 0 to give up first.
        patience = config.faults.stall_after * (1 if self.ranks.is_first else 2)
        self.watchdog = faults.Watchdog(patience, config.run.dir, self.ranks.record, self.describe)
        clock = log.Clock()
        if not self.engines_up():
            if self.ranks.is_first:
                self.state.stop()  # an engine that is up already waits for this word
            return False
        self.publish()
        if self.step == 0 or config.eval.every and self.step % config.eval.every == 0:
            self.ask_eval()
        resumed = self.step
        while self.step < train.steps:
            clock.start()
            batch = self.next_batch()
            clock.lap("wait")
            self.doing = f"in gradient step {self.step + 1}"
            metrics = batch and gradient_step(self.policy, self.optimizer, batch, self.k, config, self.stopping)
            if metrics is None:
                break
            self.step += 1
            if self.ranks.is_first and self.step == resumed + 1:
                self.ranks.record("first_step", step=self.step)
            self.moved()
            if is_controlled(train.objective):
                self.k = next_clip_k(
                    self.k, metrics["train/entropy"], target=train.target_entropy, delta=train.delta, k_max=train.k_max
                )
            if self.ranks.is_first:
                self.buffer.learned(self.groups)
            clock.lap("train")
            if self.step % train.steps_per_update == 0:
                self.finish_eval()  # an evaluation is of one version: no publication while it runs
                self.version = self.step // train.steps_per_update
                if not self.stopping():  # else the resumed run publishes it
                    self.publish()
            clock.lap("sync")
            if self.ranks.is_first:
                metrics |= self.move_stage()
                raised = self.log.step(self, metrics, clock)
                for line in raised:
                    self.ranks.record("alarm", step=self.step, line=line)
                if raised and config.alarms.action == "stop":
                    self.collapse = raised[0]
                    self.state.ask_stop(self.collapse)
            if self.step < train.steps:
                if config.eval.every and self.step % config.eval.every == 0:
                    self.ask_eval()
                if self.step % config.run.checkpoint_every == 0:
                    self.save()
        return self.close()

    def engines_up(self) -> bool:
        """Waits until every engine serves; False where the run is asked to stop first. An engine that cannot start ends
        its rank, and so the job."""
        if self.ranks.is_first:
            print(f"waiting for {self.config.layout.engines} engine(s) to come up; they log to {self.config.run.dir}/logs/", flush=True)
        while self.state.engines_ready() < self.config.layout.engines:
            if server.stop_signals:
                return False
            time.sleep(0.1)
        return True

    def publish(self) -> None:
        """Sends the weights to every engine under the current version number (a collective call)."""
        self.doing = f"publishing version {self.version}"
        began = time.monotonic()
        if self.ranks.is_first:
            self.state.announce(self.version)
        sync.send_weights(self.parameters, self.plan, self.ranks, self.version)
        if self.ranks.is_first:
            self.ranks.record("publication", version=self.version, seconds=round(time.monotonic() - began, 3))
        if not self.moves:
            self.moved()  # the clocks of all watchdogs start

    def move_stage(self) -> dict:
        """Begins the next stage of the length curriculum when it is time. The metrics of the one the step was in."""
        config, stage = self.config, self.config.stages[self.stage]
        metrics = {"rollout/stage": self.stage, "rollout/max_tokens": stage.max_tokens}
        # Groups that began in an earlier stage say nothing of this one's limit.
        groups = [group for group in self.groups + self.buffer.returned if group.stage == self.stage]
        cut = [r.finish == "length" for group in groups for r in group.rollouts]
        if cut:
            self.truncated = [*self.truncated, sum(cut) / len(cut)][-GROW_OVER:]
        after = next_stage(config.stages, self.stage, self.step, self.truncated, config.rollout.grow_when_truncated)
        if after != self.stage:
            limits = config.stages[after]
            print(
                f"stage {after} of the length curriculum after step {self.step}: max_tokens {stage.max_tokens} -> "
                f"{limits.max_tokens}, w_len {stage.w_len:g} -> {limits.w_len:g}",
                flush=True,
            )
            self.stage, self.truncated = after, []
            self.state.enter_stage(after)
        return metrics

    def ask_eval(self) -> None:
        """Starts an evaluation of the published weights; its result is logged under the current step."""
        if self.ranks.is_first and self.step not in self.log.evaluated and self.eval_asked < 0:
            self.eval_asked, self.eval_asked_at = self.step, time.monotonic()
            self.state.ask_eval(self.step)

    def finish_eval(self) -> None:
        """Waits for the evaluation under way, if there is one, or for the run to be asked to stop."""
        if self.ranks.is_first and self.eval_asked >= 0:
            parts = self.evals.setdefault(self.eval_asked, [])
            if self.wait_for(lambda: len(parts) == self.config.layout.engines, "an evaluation"):
                self.log.evaluation(self.eval_asked, self.evals.pop(self.eval_asked), self.config.eval.k)
                seconds = round(time.monotonic() - self.eval_asked_at, 3)
                self.ranks.record("evaluation", step=self.eval_asked, seconds=seconds)
                self.eval_asked = -1
                self.moved()

    def save(self) -> None:
        """Writes a checkpoint of the current step, unless it has one (a collective call)."""
        if self.step == self.saved_step:
            return
        self.saved_step = self.step
        self.doing = f"saving step {self.step}"
        began = time.monotonic()
        self.progress = checkpoint.Progress(self.step, self.k)
        if self.ranks.is_first:
            self.receive(timeout=0)
            self.log.rollouts([], self.buffer.returned, self.step)
            self.buffer.returned.clear()
            self.progress.stage, self.progress.truncated = self.stage, self.truncated
            self.progress.low, self.progress.done = self.buffer.low, sorted(self.buffer.done)
            self.progress.waiting = list(self.buffer.waiting.values())
            self.progress.next_ticket = self.state.frontier(self.state.read().started)
        checkpoint.save(self.config, self.policy, self.optimizer, self.progress, self.prompts.tokenizer, self.ranks)
        if self.ranks.is_first:
            self.ranks.record("checkpoint", step=self.step, seconds=round(time.monotonic() - began, 3))
        self.moved()

    def close(self) -> bool:
        """After the last step: the last evaluation. In any case: a checkpoint, and every rank is released. The answer is
        that of `learn`."""
        finished = self.step >= self.config.train.steps
        if finished:
            self.finish_eval()
            if self.step % self.config.train.steps_per_update and not self.stopping():
                self.version += 1
                self.publish()
            self.ask_eval()
            self.finish_eval()
        if self.ranks.is_first:
            self.receive_the_rest()
        self.save()
        if self.ranks.is_first:
            self.state.stop()
            self.doing = "closing its log"
            self.log.close(finished)
            if self.hopeless:
                raise NothingToLearn(self.hopeless)
            if self.collapse:
                raise Collapse(f"stopped (alarms.action=stop) by the {self.collapse}")
        return finished and self.ranks.is_first and self.eval_asked < 0


def nothing_to_learn(rejected: list[float]) -> str:
    """Why a run stops after these pass rates of groups that were rejected in a row."""
    solved, failed = sum(rate == 1 for rate in rejected), sum(rate == 0 for rate in rejected)
    return (
        f"{len(rejected)} groups in a row were rejected (rollout.max_rejected): {solved} with every response right, "
        f"{failed} with none, {len(rejected) - solved - failed} between, outside rollout.early_range or keep_range or "
        "without variance"
    )


class NothingToLearn(Exception):
    """No group that is worth learning from has come for too long. The run has been saved."""


class Collapse(Exception):
    """An alarm has stopped the run. It has been saved, and the checkpoint from before is kept."""


# ------------------------------------------------------------------------------------------------------------------- main


SIGNAL_S = 2.0  # seconds within which torchrun tells the other ranks that one has died

# Ends that another attempt of the job would not mend.
FINAL = (ConfigError, GraderError, server.EngineError, NothingToLearn, Collapse)


def main(argv: list[str]) -> int:
    launched = "RANK" in os.environ
    rank = int(os.environ.get("RANK", 0))
    try:
        path = argv.pop(0) if argv and argv[0].endswith((".yaml", ".yml")) else None
        config = schema.load(path, argv)
        if launched:
            sync.check_world_size(config, int(os.environ["WORLD_SIZE"]))
        if end := faults.final_end(config.run.dir):
            if rank == 0:
                print(f"not tried again: {end['why']}", file=sys.stderr, flush=True)
            return end["code"]
        prompts = launch.prepare(config)
        if rank == 0 and not config.dry_run:
            lock = launch.lock_run_dir(config)  # noqa: F841 (held until this process ends, or is torchrun)
    except ConfigError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if config.dry_run:
        if rank == 0:
            print(schema.to_yaml(config))
            launch.print_ranks(config)
            print(launch.memory_estimate(config))
        return 0
    if not launched:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set and announce it; layout.threads decides
        torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
        command = [torchrun, "--standalone", f"--nproc-per-node={config.world_size}"]
        command += [f"--max-restarts={config.faults.max_restarts}", os.path.abspath(__file__)]
        os.execv(torchrun, command + ([path] if path else []) + argv)
    os.makedirs(os.path.join(config.run.dir, "logs"), exist_ok=True)
    record = faults.Recorder(config.run.dir, rank)
    transformers.logging.disable_progress_bar()
    server.parent_death_signal(signal.SIGKILL)  # torchrun's death: no rank outlives it
    launch.arm_signals(config)
    try:
        if rank == 0:
            launch.begin(config, record, prompts)
        ranks = sync.join(config)
        if ranks.role.kind == "engine":
            rollout.serve(config, ranks, prompts)
        elif Learner(config, ranks, prompts).learn():
            record.end(0, "the run is finished", final=True)
        elif rank == 0:
            record.end(0, f"stopped and saved: {server.stop_signals or 'asked by another rank'}", final=False)
    except (*FINAL, WorkerLost, TimeoutError) as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        code = 2 if isinstance(error, ConfigError) else 1
        # After a signal it is likely to be another rank's fault that this one could not go on.
        record.end(code, str(error), final=isinstance(error, FINAL) and not server.stop_signals)
        return code
    except Exception as error:
        from_a_write = isinstance(error, (OSError, RuntimeError, CheckpointException, SafetensorError))
        if not (from_a_write and launch.disk_is_full(error, config.run.dir)):
            # What strikes before the first step, such as a slip in an edited script, would strike again; but another rank's
            # death may be what broke a collective here, and torchrun then says so in a moment.
            final = not faults.has_moved(config.run.dir)
            if final:
                time.sleep(SIGNAL_S)
                final = not server.stop_signals
            record.end(1, f"{type(error).__name__}: {error}", final)
            raise
        step = checkpoint.latest(config.run.dir)
        left = f"the last checkpoint is {config.run.dir}/checkpoints/step_{step}" if step >= 0 else "no checkpoint yet"
        first_line = (str(error).splitlines() or [""])[0]
        print(f"error on rank {rank}: the disk is full ({first_line}); {left}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
