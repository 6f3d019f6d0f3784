"""SGLang on machines without a GPU: an out-of-tree platform, with attention over many requests per call.

SGLang's own CPU engine needs kernels that no package registry has. Its plain PyTorch path runs anywhere, but computes
attention one request at a time. This platform selects that path and replaces its attention; the numbers are the same
up to rounding.

    decode   reads every cached key once and is bound by memory: one compiled loop over the cache, nothing copied
    extend   is bound by arithmetic: the new tokens of many requests are padded into tiles, one SDPA call each

`make env` registers `activate` as an entry point of the group `sglang.srt.platforms`, where the server and its child
processes find it. Where there is a GPU it stands aside. MODEL_ROCKET_STOCK_ATTENTION=1 keeps SGLang's own attention,
for comparison (benchmarks/attention.py).
"""

import functools
import os
from dataclasses import dataclass

import numba  # a pinned requirement of SGLang
import numpy as np
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from torch.nn.functional import scaled_dot_product_attention

# New tokens of one request that share a tile; a longer prompt is cut, so that its early tokens skip its late keys.
QUERY_BLOCK = 256
# Upper bound of batch * queries * keys in one tile: its float32 mask takes 4 MB.
TILE_POSITIONS = 1 << 20
# A request joins a tile while padded positions stay below this multiple of the needed ones ...
PADDING_FACTOR = 1.5
# ... or exceed them by no more than this, where a further call costs more than the padding.
FREE_PADDING = 1 << 15


def activate():
    """Entry point: the qualified name of the platform class, or None where a GPU is present."""
    return None if torch.cuda.is_available() else "sglang_cpu.CpuPlatform"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self):
        return "torch_native"

    def get_dispatch_key_name(self):
        return "native"

    def is_pin_memory_available(self, device=None):
        return False

    def init_backend(self):
        """Runs once in every worker process, before a model is loaded."""
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.mem_cache.pool_host import common

        # Returning routed experts pins host memory for CUDA; there is nothing to pin for here.
        common._cuda_host_register = lambda buffer, registration_granularity_bytes=None: None
        if os.environ.get("MODEL_ROCKET_STOCK_ATTENTION") != "1":
            decode_loop()  # compile now, not while the first request waits
            ATTENTION_BACKENDS["torch_native"] = batched_backend


def batched_backend(runner):
    """Factory that SGLang calls in place of its own for --attention-backend torch_native."""
    # Imported here: this module is loaded while SGLang's own modules are still being imported.
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(TorchNativeAttnBackend):
        def init_forward_metadata(self, forward_batch):
            super().init_forward_metadata(forward_batch)
            self.tiles = {}  # window -> tiles of this forward pass: all layers share them

        def _run_sdpa_forward_extend(
            self, query, output, k_cache, v_cache, req_to_token, req_rows, seq_lens, prefix_lens, extend_lens,
            encoder_lens=None, scaling=None, enable_gqa=False, causal=False, is_cross_attn=False,
            sliding_window_size=None,
        ):  # fmt: skip
            if encoder_lens is not None or not causal:  # encoder models keep SGLang's own loop
                return super()._run_sdpa_forward_extend(
                    query, output, k_cache, v_cache, req_to_token, req_rows, seq_lens, prefix_lens, extend_lens,
                    encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
                )  # fmt: skip
            if sliding_window_size not in self.tiles:
                self.tiles[sliding_window_size] = plan(
                    req_to_token, req_rows, prefix_lens, extend_lens, sliding_window_size
                )
            return extend(query, k_cache, v_cache, self.tiles[sliding_window_size], scaling, output)

        def _run_sdpa_forward_decode(
            self, query, output, k_cache, v_cache, req_to_token, req_rows, seq_lens,
            encoder_lens=None, scaling=None, enable_gqa=False, causal=False, is_cross_attn=False,
            sliding_window_size=None,
        ):  # fmt: skip
            if encoder_lens is not None:
                return super()._run_sdpa_forward_decode(
                    query, output, k_cache, v_cache, req_to_token, req_rows, seq_lens,
                    encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
                )  # fmt: skip
            if query.dtype == k_cache.dtype == v_cache.dtype == torch.float32:
                return decode(
                    query, k_cache, v_cache, req_to_token, req_rows, seq_lens, scaling, output, sliding_window_size
                )
            # Other dtypes: decoding is extending every request by one token.
            return self._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_rows, seq_lens, seq_lens - 1,
                torch.ones_like(seq_lens), None, scaling, enable_gqa, True, False, sliding_window_size,
            )  # fmt: skip

    return BatchedAttention(runner)


# ------------------------------------------------------------------------------------------------------------ decode


def decode(query, k_cache, v_cache, req_to_token, req_rows, seq_lens, scale, out, window=None):
    """Attention of one new token per request over its cached keys, its own included; float32.

    query: [requests, heads, dim]; k_cache, v_cache: [slots, kv heads, dim]; out: [requests, heads, value dim], filled.
    req_to_token: [rows, max context] int32 KV slot of each position; req_rows, seq_lens: [requests].
    scale: factor on the scores, None for dim ** -0.5. window: keys seen before the own one, None for all.
    """
    first_keys = torch.zeros_like(seq_lens) if window is None else (seq_lens - 1 - window).clamp_min(0)
    decode_loop()(
        query.contiguous().numpy(), k_cache.numpy(), v_cache.numpy(), req_to_token.numpy(), req_rows.long().numpy(),
        first_keys.long().numpy(), seq_lens.long().numpy(), query.shape[2] ** -0.5 if scale is None else scale,
        out.numpy(),
    )  # fmt: skip
    return out


@functools.cache
def decode_loop():
    """The compiled loop of `decode`. Takes seconds the first time; the result is cached in __pycache__.

    On one thread on purpose: numba's threads wait by yielding, and where the learner wants the same cores every layer
    then waits for a time slice (measured: 100 ms a layer).
    """
    signature = "void(f4[:,:,::1], f4[:,:,::1], f4[:,:,::1], i4[:,::1], i8[::1], i8[::1], i8[::1], f8, f4[:,:,::1])"
    return numba.njit(signature, fastmath={"reassoc", "contract", "arcp"}, cache=True)(_decode_loop)


def _decode_loop(query, k_cache, v_cache, req_to_token, req_rows, first_keys, seq_lens, scale, out):
    requests, heads, dim = query.shape
    kv_heads, value_dim = k_cache.shape[1], v_cache.shape[2]
    group = heads // kv_heads
    for r in range(requests):
        slots = req_to_token[req_rows[r], first_keys[r] : seq_lens[r]]
        weights = np.empty((group, len(slots)), np.float32)
        for kv_head in range(kv_heads):
            for j in range(len(slots)):
                key = k_cache[slots[j], kv_head]
                for g in range(group):  # the heads of a group share the key while it is in cache
                    q = query[r, kv_head * group + g]
                    score = np.float32(0)
                    for i in range(dim):
                        score += q[i] * key[i]
                    weights[g, j] = score * np.float32(scale)
            for g in range(group):
                largest = weights[g].max()
                total = np.float32(0)
                for j in range(len(slots)):
                    weights[g, j] = np.exp(weights[g, j] - largest)
                    total += weights[g, j]
                result = out[r, kv_head * group + g]
                result[:] = 0
                for j in range(len(slots)):
                    weight, value = weights[g, j] / total, v_cache[slots[j], kv_head]
                    for i in range(value_dim):
                        result[i] += weight * value[i]


# ------------------------------------------------------------------------------------------------------------ extend


@dataclass
class Tile:
    """New tokens of several requests that one SDPA call serves: B pieces, padded to Q queries and K keys."""

    queries: torch.Tensor  # [B * Q] rows of the flat query; padding repeats the piece's last row
    slots: torch.Tensor  # [B * K] rows of the KV cache; padding repeats the piece's last slot
    mask: torch.Tensor  # [B, 1, Q, K] float32, added to the scores: 0 or -inf
    real: torch.Tensor | None  # [real queries] positions in B * Q that are not padding; None: all of them


def plan(req_to_token, req_rows, prefix_lens, extend_lens, window=None):
    """Cut the new tokens of a batch of requests into tiles of similar shape.

    req_to_token: [rows, max context] KV slot of each position; req_rows: [requests] row of each request.
    prefix_lens, extend_lens: [requests] tokens cached before, and new tokens.
    window: keys that a query sees before its own one, None for all.
    Returns a list of Tile that covers every new token once. Padding is bounded by PADDING_FACTOR and FREE_PADDING,
    memory by TILE_POSITIONS.
    """
    pieces = []  # (queries, keys, first row in the flat query, row in req_to_token)
    row = 0
    for request, prefix, count in zip(req_rows.tolist(), prefix_lens.tolist(), extend_lens.tolist(), strict=True):
        for start in range(0, count, QUERY_BLOCK):
            queries = min(QUERY_BLOCK, count - start)
            pieces.append((queries, prefix + start + queries, row + start, request))
        row += count
    pieces.sort()

    tiles, members, needed, longest = [], [], 0, 0
    for piece in pieces:
        queries, keys = piece[:2]
        padded = (len(members) + 1) * queries * max(longest, keys)
        needed += queries * keys
        if members and padded > min(TILE_POSITIONS, max(PADDING_FACTOR * needed, needed + FREE_PADDING)):
            tiles.append(_tile(members, req_to_token, window))
            members, needed, longest = [], queries * keys, 0
        members.append(piece)
        longest = max(longest, keys)
    if members:
        tiles.append(_tile(members, req_to_token, window))
    return tiles


def _tile(pieces, req_to_token, window):
    queries, keys, first_rows, requests = torch.tensor(pieces).unbind(1)  # [B] each
    query = torch.arange(int(queries.max()))  # [Q]
    key = torch.arange(int(keys.max()))  # [K]
    rows = first_rows[:, None] + torch.minimum(query, queries[:, None] - 1)  # [B, Q]
    slots = req_to_token[requests[:, None], torch.minimum(key, keys[:, None] - 1)]  # [B, K]
    position = (keys - queries)[:, None, None] + query[:, None]  # [B, Q, 1] of each query in its sequence
    hidden = key > position  # [B, Q, K]
    if window is not None:
        # A padded query may lie so far past its piece that the window leaves it no key; its NaN is never read.
        hidden |= key < position - window
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    real = None if bool((queries == len(query)).all()) else (query < queries[:, None]).flatten().nonzero().squeeze(1)
    return Tile(rows.flatten(), slots.flatten().long(), mask[:, None], real)


def extend(query, k_cache, v_cache, tiles, scale, out):
    """Causal attention of new tokens over their cached keys, grouped-query heads included.

    query: [tokens, heads, dim]; k_cache, v_cache: [slots, kv heads, dim]; tiles: from `plan`.
    scale: factor on the scores, None for dim ** -0.5. out: [tokens, heads, value dim], filled.
    """
    for tile in tiles:
        batch, _, queries, keys = tile.mask.shape
        # index_select and a float mask are many times faster on a CPU than indexing and a bool mask.
        q = query.index_select(0, tile.queries).unflatten(0, (batch, queries)).transpose(1, 2)  # [B, heads, Q, dim]
        k = k_cache.index_select(0, tile.slots).unflatten(0, (batch, keys)).transpose(1, 2).to(q.dtype)
        v = v_cache.index_select(0, tile.slots).unflatten(0, (batch, keys)).transpose(1, 2).to(q.dtype)
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=tile.mask.to(q.dtype), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        attended = attended.transpose(1, 2).flatten(0, 1)  # [B * Q, heads, value dim]
        if tile.real is None:
            out.index_copy_(0, tile.queries, attended)
        else:
            out.index_copy_(0, tile.queries[tile.real], attended[tile.real])
    return out
