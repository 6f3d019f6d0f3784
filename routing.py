"""Routing replay: the learner sends every token of a MoE model to the experts that the engine had sent it to.

A router's choice is discrete. Where two experts are nearly level, other kernels, another precision or weights that are a
version newer choose otherwise, and the token's logprob jumps although hardly anything has changed. With replay the choice
is the engine's; the gate weights are still the learner's own, a function of its own router logits, and so are their
gradients (MAI-Thinking-1 report, section 3).

The way of a choice: SGLang's `routed_experts` -> server.Draft -> trajectory.Rollout.experts -> batch.Row.experts
-> `attach`ed hooks. Left out on purpose: routers other than softmax top-k (bias-corrected, grouped, sigmoid ones).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from configs.schema import ConfigError

MODEL_TYPES = ("qwen3_moe",)  # whose router is softmax, then top-k, then norm_topk_prob


@dataclass(frozen=True)
class Routing:
    """The shape of a model's routing choices."""

    layers: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> type:
        """What a choice travels as."""
        return np.uint8 if self.experts <= 256 else np.uint16

    def check(self, experts: np.ndarray, tokens: int) -> None:
        """Raises ValueError unless `experts` [tokens, layers, top_k] names top_k different experts everywhere."""
        shape = (tokens, self.layers, self.top_k)
        if experts.shape != shape:
            raise ValueError(f"routed experts of shape {experts.shape}, not {shape}")
        if experts.min() < 0 or experts.max() >= self.experts:
            raise ValueError(f"routed experts {experts.min()}..{experts.max()} of {self.experts}")
        ordered = np.sort(experts, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():  # all zeros is what an engine returns that recorded nothing
            raise ValueError("routed experts that name one expert twice for a token")


def routing_of(config: PretrainedConfig, path: str) -> Routing:
    """The routing of a model. Raises ConfigError where replay does not know its router, or SGLang its layers."""
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"rollout.routing_replay: needs a MoE model of type {' or '.join(MODEL_TYPES)}, but model.path={path} is of type "
            f"{config.model_type}; set rollout.routing_replay=false"
        )
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ConfigError(f"model.path: {path} has layers without experts; SGLang would serve it as if they had some")
    return Routing(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)


def gate_weights(logits: torch.Tensor, chosen: torch.Tensor, normalise: bool) -> torch.Tensor:
    """[T, experts] router logits, [T, top_k] int64 -> [T, top_k]: softmax(logits) at the chosen experts, over their sum
    if `normalise`. In float32, then in the dtype of the logits: as transformers' own router computes it."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def attach(lm: nn.Module) -> list[nn.Module]:
    """Makes the routers of `lm` take the experts that its base model is called with, as routed_experts=
    [T, layers, top_k] (-1: the router's own choice); without them nothing changes. Returns the routers.

    The experts reach a layer as an argument, so that activation checkpointing recomputes it with the same ones.
    """
    layers = lm.base_model.layers
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(_hand_over, i), with_kwargs=True)
        layer.mlp.gate.register_forward_hook(_reroute)
    return [layer.mlp.gate for layer in layers]


def _hand_over(i, layer, args, kwargs):
    experts = kwargs.pop("routed_experts", None)
    layer.mlp.gate.replayed = None if experts is None else experts[:, i]
    return args, kwargs


def _reroute(router, args, output):
    logits, _, own = output
    if router.replayed is None:
        return output
    if router.replayed.shape != own.shape:  # it would broadcast
        raise ValueError(f"routed experts of shape {tuple(router.replayed.shape)} for a choice of {tuple(own.shape)}")
    chosen = torch.where(router.replayed < 0, own, router.replayed.long())
    router.changed = (own.sort(-1).values != chosen.sort(-1).values).any(-1).sum()
    return logits, gate_weights(logits, chosen, router.norm_topk_prob), chosen


def changed(routers: list[nn.Module], experts: torch.Tensor) -> torch.Tensor:
    """[2]: in the last forward pass, with `experts` [T, layers, top_k], the (token, layer) pairs whose replayed set of
    experts was not the router's own, and all pairs that had one."""
    return torch.stack([sum(router.changed for router in routers), (experts[:, :, 0] >= 0).sum()])
