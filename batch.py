"""What a gradient step is made of: finished groups, packed into rows, and the account of every prompt.

    pack, make_row, make_batches   sequences into rows of tokens, rows onto learner ranks
    Buffer                         rank 0's store of finished groups; which prompts are learned from, returned, or waiting
"""

from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

import checkpoint
import rollout
import routing
import sync
import trajectory
from objective import advantages_of

# ---------------------------------------------------------------------------------------------------------------- packing


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of sequences per row, no row above `capacity` tokens.

    Raises ValueError for a sequence that no row can hold.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > capacity:
            raise ValueError(f"a sequence of {lengths[i]} tokens does not fit train.max_tokens_per_microbatch={capacity}")
        row = next((r for r in range(len(rows)) if room[r] >= lengths[i]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


@dataclass
class Row:
    """A micro-batch: several sequences one after another in a row of T tokens, N of them sampled by the policy."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, restarting at 0 with every sequence
    predictors: torch.Tensor  # [N] int64: where in the row the prediction of each sampled token is made
    targets: torch.Tensor  # [N] int64: the sampled tokens
    behaviour_logp: torch.Tensor  # [N] float32
    advantages: torch.Tensor  # [N] float32
    versions: torch.Tensor  # [N] int64
    sequence: torch.Tensor  # [N] int64: which of the row's sequences it belongs to
    kept: Optional[torch.Tensor] = None  # [N, K] int64, padded with -1
    experts: Optional[torch.Tensor] = None  # [T, layers, top_k] int16, -1 where the engine chose none

    def to(self, device: torch.device) -> "Row":
        return Row(*(None if t is None else t.to(device) for t in vars(self).values()))


@dataclass
class Batch:
    """What one learner rank gets for one gradient step."""

    rows: list[Row]
    normalizer: int  # sampled tokens of the global batch
    sequences: int  # of the global batch
    version: int  # that the learner's weights were last published as


def make_row(rollouts: list[trajectory.Rollout], advantages: list[float]) -> Row:
    """Packs whole sequences into one row; masks come from the rollouts, never from token ids."""
    sampled = np.concatenate([r.mask for r in rollouts]) == 1
    if any(r.mask[0] for r in rollouts):
        raise ValueError("a sequence whose first token is sampled: nothing predicts it")
    tokens = torch.from_numpy(np.concatenate([r.tokens for r in rollouts]).astype(np.int64))
    where = torch.from_numpy(np.flatnonzero(sampled))
    each = np.concatenate([np.full(len(r.tokens), a, dtype=np.float32) for r, a in zip(rollouts, advantages)])
    kept = None
    if len({r.kept_ids is None for r in rollouts}) > 1:
        raise ValueError("a row of rollouts with and without the ids that their sampler kept")
    if rollouts[0].kept_ids is not None:
        counts = np.concatenate([r.kept_counts for r in rollouts])[sampled].astype(np.int64)
        flat = torch.from_numpy(np.concatenate([r.kept_ids for r in rollouts]).astype(np.int64))
        kept = torch.full((len(counts), int(counts.max())), -1)
        kept[torch.arange(kept.shape[1])[None] < torch.from_numpy(counts)[:, None]] = flat
    experts = None
    if rollouts[0].experts is not None:
        # The engine never computes the last token of a sequence. In the learner it goes where the learner's own router
        # sends it: it predicts nothing, and no other token attends to it.
        nothing = np.full((1, *rollouts[0].experts.shape[1:]), -1, dtype=np.int16)
        experts = torch.from_numpy(np.concatenate([e for r in rollouts for e in (r.experts.astype(np.int16), nothing)]))
    return Row(
        tokens=tokens,
        positions=torch.from_numpy(np.concatenate([np.arange(len(r.tokens)) for r in rollouts])),
        predictors=where - 1,
        targets=tokens[where],
        behaviour_logp=torch.from_numpy(np.concatenate([r.behaviour_logp for r in rollouts])[sampled]),
        advantages=torch.from_numpy(each[sampled]),
        versions=torch.from_numpy(np.concatenate([r.versions for r in rollouts])[sampled].astype(np.int64)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(rollouts)), [r.mask.sum() for r in rollouts])),
        kept=kept,
        experts=experts,
    )


def empty_row(like: Row) -> Row:
    """A row without a sampled token, for a rank that has fewer rows than its peers: FSDP's collectives need it."""
    nothing = slice(0, 0)
    kept = None if like.kept is None else like.kept[nothing]
    experts = None if like.experts is None else torch.full_like(like.experts[:1], -1)
    return Row(
        like.tokens[:1], like.positions[:1], like.predictors[nothing], like.targets[nothing],
        like.behaviour_logp[nothing], like.advantages[nothing], like.versions[nothing], like.sequence[nothing], kept,
        experts,
    )  # fmt: skip


def make_batches(
    groups: list[trajectory.Group], trainers: int, capacity: int, version: int, objective: str = "rocket"
) -> list[Batch]:
    """One Batch per learner rank: the same number of rows each, tokens balanced, advantages by group."""
    rollouts, advantages = [], []
    for group in groups:
        rollouts += group.rollouts
        rewards = torch.tensor([r.reward for r in group.rollouts], dtype=torch.float64)
        advantages += advantages_of(objective)(rewards).tolist()
    packed = pack([len(r.tokens) for r in rollouts], capacity)
    rows = [make_row([rollouts[i] for i in row], [advantages[i] for i in row]) for row in packed]
    rows.sort(key=lambda row: -len(row.tokens))
    rows += [empty_row(rows[0])] * (-len(rows) % trainers)
    # Dealt like cards, back and forth, so that no rank gets the longer row every time.
    deals = [rows[i : i + trainers][:: 1 if (i // trainers) % 2 == 0 else -1] for i in range(0, len(rows), trainers)]
    normalizer = sum(len(row.targets) for row in rows)
    return [Batch([deal[rank] for deal in deals], normalizer, len(rollouts), version) for rank in range(trainers)]


class Buffer:
    """Rank 0's store of finished groups, and the account of every ticket: learned, returned, or waiting here."""

    def __init__(
        self, state: sync.RunState, max_staleness: int, vocab_size: int, saved: checkpoint.Progress,
        replay: Optional[routing.Routing] = None,
    ):  # fmt: skip
        self.state = state
        self.max_staleness = max_staleness
        self.vocab_size = vocab_size
        self.replay = replay
        self.waiting: dict[int, trajectory.Group] = {g.ticket: g for g in saved.waiting}  # by ticket
        self.done: set[int] = set(saved.done)  # tickets learned from or returned, at or above `low`
        self.low = saved.low  # every ticket below it is done
        self.returned: list[trajectory.Group] = []  # since the last step, for the rollout store
        self.rejected: list[float] = []  # pass rates of the groups rejected in a row, up to now

    def add(self, group: trajectory.Group) -> None:
        """Takes in a group. Raises ValueError if its rollouts are malformed or its ticket was seen before."""
        if group.ticket < self.low or group.ticket in self.done or group.ticket in self.waiting:
            raise ValueError(f"ticket {group.ticket} of engine {group.engine} has arrived twice")
        if not group.rollouts:
            raise ValueError(f"ticket {group.ticket} of engine {group.engine} came without rollouts")
        for r in group.rollouts:
            r.check(self.vocab_size, self.replay)
        if group.dropped:
            self.finish(group.ticket)
            self.returned.append(group)
            self.rejected.append(sum(rollout.passes(r.task) for r in group.rollouts) / len(group.rollouts))
        else:
            self.waiting[group.ticket] = group
            self.rejected.clear()

    def drop_stale(self, version: int) -> list[trajectory.Group]:
        """Groups whose oldest token is more than `max_staleness` versions old are not learned from. Returns them."""
        stale = []
        for ticket, group in list(self.waiting.items()):
            if version - group.oldest_version > self.max_staleness:
                group.dropped = "stale"
                del self.waiting[ticket]
                self.finish(ticket)
                self.returned.append(group)
                self.state.give_back()
                stale.append(group)
        return stale

    def take(self, n: int) -> list[trajectory.Group]:
        """The n groups that were begun first. They stay waiting until `learned`: a step cut short loses none."""
        return [self.waiting[ticket] for ticket in sorted(self.waiting)[:n]]

    def learned(self, groups: list[trajectory.Group]) -> None:
        for group in groups:
            del self.waiting[group.ticket]
            self.finish(group.ticket)

    def finish(self, ticket: int) -> None:
        self.done.add(ticket)
        while self.low in self.done:
            self.done.remove(self.low)
            self.low += 1
