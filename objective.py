"""The objective: advantages, importance ratio, trust region, entropy controller; and what peers use in its place.

Every formula is a pure function of tensors over the N sampled tokens of a row. `train.objective` names an entry of RECIPE
(the recipe, or the recipe without one of its parts) or of PEERS. A peer is an importance ratio, a range for it, what
happens outside the range (its form), how tokens are averaged, and how a group's rewards become advantages. To try
another one, add an entry.

Peers' variants are given as they act here, where every batch is used for one gradient step and the ratio is taken
against the engine's own logprobs (the policy that really sampled, stale or not). What their papers add beside the
objective (a KL term, dynamic sampling, length penalties) is not part of an entry: the gates of rollout.py and the parts
of rewards.py are there for all of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.schema import ConfigError, Train

# ------------------------------------------------------------------------------------------------------------- advantages


def centred_rewards(rewards: torch.Tensor) -> torch.Tensor:
    """[G] -> [G]: R_i - mean(R). Without the division, easy and hard groups are not weighed up (Dr. GRPO,
    arXiv 2503.20783)."""
    exact = rewards.double()
    return (exact - exact.mean()).to(rewards.dtype)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[G] -> [G]: A_i = (R_i - mean(R)) / std(R) over the group (its population standard deviation); zeros where the
    group has no variance."""
    exact = rewards.double()  # in float32 the rounding of a mean looks like variance
    centred = exact - exact.mean()
    std = centred.pow(2).mean().sqrt()
    advantages = torch.where(std > 1e-6, centred / std.clamp(min=1e-6), torch.zeros_like(centred))
    return advantages.to(rewards.dtype)


# ------------------------------------------------------------------------------------------------------------------ ratio


def importance_ratio(logp: torch.Tensor, behaviour_logp: torch.Tensor) -> torch.Tensor:
    """r = exp(logp - behaviour_logp), [N]. Finite for any finite input: beyond e^80 it makes no difference to a clip, but
    an infinity would turn its gradient into NaN."""
    return (logp - behaviour_logp).clamp(-80, 80).exp()


def sequence_mean(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The mean of `values` [N] over each token's own sequence, [N]; `sequence` [N] numbers the sequences from 0."""
    if not len(values):
        return values
    n = int(sequence.max()) + 1
    totals = values.new_zeros(n).index_add(0, sequence, values)
    return (totals / torch.bincount(sequence, minlength=n))[sequence]


def sequence_ratio(logp: torch.Tensor, behaviour_logp: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """GSPO's ratio (arXiv 2507.18071, eq. 7, in its per-token form, eq. 14): the value of every token is its sequence's
    s = exp(mean_t (logp - behaviour_logp)), the gradient that of the token's own logprob."""
    mean = sequence_mean((logp - behaviour_logp).detach(), sequence)
    return importance_ratio(mean + logp - logp.detach(), torch.zeros_like(logp))


# ------------------------------------------------------------------------------------------- form: what the range is for


def clipped(r: torch.Tensor, logp: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(r A, clip(r, low, high) A): PPO's pessimistic clip (arXiv 1707.06347). With A < 0 a ratio above the range is
    not bounded."""
    return torch.minimum(r * advantages, r.clamp(low, high) * advantages)


def truncated(r: torch.Tensor, logp: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """sg[clip(r, low, high)] A logp: every token keeps a gradient, its weight is bounded."""
    return r.clamp(low, high).detach() * advantages * logp


def masked(r: torch.Tensor, logp: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """sg[r where low <= r <= high, else 0] A logp: tokens outside the range are left out."""
    return torch.where((r >= low) & (r <= high), r, 0.0).detach() * advantages * logp


# ------------------------------------------------------------------------------------------------------------- the recipe


def trust_region(eps: float, k: float) -> tuple[float, float]:
    """1 - eps .. 1/(1 - eps) + k: symmetric in the log-ratio at k = 0, its upper side widened by the controller."""
    return 1 - eps, 1 / (1 - eps) + k


def policy_loss(
    logp: torch.Tensor,
    behaviour_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    normalizer: float,
    *,
    eps: float,
    k: float,
    r_min: float,
    r_max: float,
) -> torch.Tensor:
    """Minus the objective (MAI-Thinking-1 report, section 3; every argument [N], the result a scalar):

        J = (1/normalizer) sum_t mask_t min(r_out A, r_tr A)
        r_tr = clip(r, 1 - eps, 1/(1 - eps) + k)      the trust region, its upper side widened by the entropy controller
        r_out = clip(r, r_min, r_max)                 the outer clip, on every branch: one bad token cannot wreck a run

    `normalizer` is the number of response tokens of the global batch, so that the gradient does not depend on how the
    batch was cut into micro-batches and ranks. Positions with mask 0 contribute an exact zero, whatever they hold.
    """
    mask = mask.bool()
    r = importance_ratio(torch.where(mask, logp, 0.0), torch.where(mask, behaviour_logp, 0.0))
    objective = clipped(r.clamp(r_min, r_max), logp, advantages, *trust_region(eps, k))
    return -torch.where(mask, objective, 0.0).sum() / max(normalizer, 1)  # 0: a batch without a sampled token


def next_clip_k(k: float, entropy: float, *, target: float, delta: float, k_max: float) -> float:
    """The entropy controller, once per gradient step: k <- clip(k + delta sign(target - entropy), 0, k_max).

    Entropy too low widens the upper side of the trust region, so that rare tokens may grow; too high narrows it.
    """
    step = delta * ((target > entropy) - (target < entropy))
    return min(max(k + step, 0.0), k_max)


# ------------------------------------------------------------------------------------------------------------ the choices

# train.objective: the recipe, and the recipe without one of its parts (constants that policy_loss then gets instead).
RECIPE = {
    "rocket": {},
    "fixed_clip": {"k": 0.0},  # no entropy controller
    "no_outer_clip": {"r_min": 0.0, "r_max": math.inf},
}


@dataclass(frozen=True)
class Peer:
    """Another published objective."""

    form: Callable
    low: float  # the range of the ratio
    high: float
    average: str = "token"  # token: over all tokens of the batch | sequence: within each, then over the sequences |
    # constant: the sum over a sequence by rollout.max_tokens, then over the sequences
    per_sequence: bool = False  # the ratio is GSPO's
    advantages: Callable[[torch.Tensor], torch.Tensor] = group_advantages


PEERS = {
    "ppo": Peer(clipped, 0.8, 1.2),  # arXiv 1707.06347, with group advantages, tokens averaged over the batch
    "grpo": Peer(clipped, 0.8, 1.2, average="sequence"),  # arXiv 2402.03300, without its KL term
    "dr_grpo": Peer(clipped, 0.8, 1.2, average="constant", advantages=centred_rewards),  # arXiv 2503.20783
    "dapo": Peer(clipped, 0.8, 1.28),  # arXiv 2503.14476, clip-higher
    "gspo": Peer(clipped, 1 - 3e-4, 1 + 4e-4, average="sequence", per_sequence=True),  # arXiv 2507.18071
    # arXiv 2506.13585: no lower bound; the paper tunes an upper one without naming it, 5 is our choice
    "cispo": Peer(truncated, 0.0, 5.0),
    # Truncated importance sampling against the engine (Yao et al. 2025, C = 2). Its PPO ratio is that of the learner to
    # itself before the batch: 1, where a batch is used once.
    "tis": Peer(truncated, 0.0, 2.0),
    "icepop": Peer(masked, 0.5, 5.0),  # arXiv 2510.18855; its PPO ratio is 1 likewise
}


def check(name: str) -> None:
    """Raises ConfigError unless `train.objective` names an entry."""
    if name not in RECIPE and name not in PEERS:
        raise ConfigError(f"train.objective: must be one of {', '.join([*RECIPE, *PEERS])}, not {name:.80}")


def advantages_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return PEERS[name].advantages if name in PEERS else group_advantages


def is_controlled(name: str) -> bool:
    """Whether k follows the entropy; it stays 0 where it has no part in the objective."""
    return name in RECIPE and "k" not in RECIPE[name]


def constants(train: Train, k: float) -> dict[str, float]:
    """What policy_loss gets under one of the RECIPE names."""
    return {"eps": train.eps, "k": k, "r_min": train.r_min, "r_max": train.r_max} | RECIPE[train.objective]


def ratio_and_bounds(
    logp: torch.Tensor, behaviour_logp: torch.Tensor, sequence: torch.Tensor, k: float, train: Train
) -> tuple[torch.Tensor, float, float]:
    """The ratio [N] that the objective bounds, and its bounds."""
    if train.objective in RECIPE:
        used = constants(train, k)
        return importance_ratio(logp, behaviour_logp), *trust_region(used["eps"], used["k"])
    peer = PEERS[train.objective]
    r = sequence_ratio(logp, behaviour_logp, sequence) if peer.per_sequence else importance_ratio(logp, behaviour_logp)
    return r, peer.low, peer.high


def batch_loss(
    logp: torch.Tensor,
    behaviour_logp: torch.Tensor,
    advantages: torch.Tensor,
    sequence: torch.Tensor,
    *,
    tokens: int,
    sequences: int,
    max_tokens: int,
    k: float,
    train: Train,
) -> torch.Tensor:
    """A row's part of minus the objective that `train.objective` names, a scalar.

    Tensors are [N]; `sequence` numbers each token's sequence within the row, which holds it whole. `tokens` and
    `sequences` are counts of the global batch, so that its parts add up.
    """
    if train.objective in RECIPE:
        mask = torch.ones_like(logp)
        return policy_loss(logp, behaviour_logp, advantages, mask, tokens, **constants(train, k))
    peer = PEERS[train.objective]
    r, low, high = ratio_and_bounds(logp, behaviour_logp, sequence, k, train)
    value = peer.form(r, logp, advantages, low, high)
    if peer.average == "token":
        return -value.sum() / max(tokens, 1)
    lengths = max_tokens if peer.average == "constant" else torch.bincount(sequence)[sequence]
    return -(value / lengths).sum() / sequences
