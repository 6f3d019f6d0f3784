"""SGLang on machines without a GPU: an out-of-tree platform, with batched attention.

SGLang's own CPU engine needs kernels that no package registry has. Its plain PyTorch path runs anywhere, but computes
attention one request at a time. This platform selects that path and replaces its attention by one that computes many
requests per call; the numbers are the same up to rounding.

`make env` registers `activate` as an entry point of the group `sglang.srt.platforms`, where the server and its child
processes find it. Where there is a GPU it stands aside. MODEL_ROCKET_STOCK_ATTENTION=1 keeps SGLang's own attention,
for comparison (benchmarks/attention.py).
"""

import os
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

# Query tokens of one request that share a tile; a longer prompt is cut, so that its early tokens skip its late keys.
QUERY_BLOCK = 256
# Upper bound of batch * queries * keys in one tile: 4 M score positions are a 16 MB float32 mask.
TILE_POSITIONS = 1 << 22
# A request joins a tile only while padded positions stay below this multiple of the needed ones ...
PADDING_FACTOR = 1.5
# ... or below this many keys per query row, where a further call costs more than the padding.
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
            return attend(query, k_cache, v_cache, self.tiles[sliding_window_size], scaling, output)

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
            # Decoding extends every request by one token.
            return self._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_rows, seq_lens, seq_lens - 1,
                torch.ones_like(seq_lens), None, scaling, enable_gqa, True, False, sliding_window_size,
            )  # fmt: skip

    return BatchedAttention(runner)


@dataclass
class Tile:
    """Query tokens of several requests that one SDPA call serves. B pieces, padded to Q queries and K keys."""

    queries: torch.Tensor  # [B * Q] rows of the flat query; padding repeats the piece's last row
    slots: torch.Tensor  # [B * K] rows of the KV cache; padding repeats the piece's last slot
    mask: torch.Tensor  # [B, 1, Q, K] float, added to the scores: 0 or -inf
    real: torch.Tensor | None  # [real queries] positions in B * Q that are not padding; None: all of them


def plan(req_to_token, req_rows, prefix_lens, extend_lens, window=None):
    """Cut the new tokens of a batch of requests into tiles of similar shape.

    req_to_token: [rows, max context] KV slot of each position; req_rows: [requests] row of each request.
    prefix_lens, extend_lens: [requests] tokens cached before, and new tokens; decoding is an extension by one.
    window: a query at position p sees keys p - window to p; None: all keys up to p.
    Returns a list of Tile that covers every new token once. Padding is bounded by PADDING_FACTOR and FREE_PADDING,
    memory by TILE_POSITIONS.
    """
    pieces = []  # (queries, keys, first row in the flat query, row in req_to_token)
    row = 0
    for request, prefix, extend in zip(req_rows.tolist(), prefix_lens.tolist(), extend_lens.tolist()):
        for start in range(0, extend, QUERY_BLOCK):
            count = min(QUERY_BLOCK, extend - start)
            pieces.append((count, prefix + start + count, row + start, request))
        row += extend
    pieces.sort()

    tiles, members, needed = [], [], 0
    longest = 0
    for piece in pieces:
        count, keys = piece[:2]
        padded = (len(members) + 1) * count * max(longest, keys)
        needed += count * keys
        if members and (padded > TILE_POSITIONS or padded > max(PADDING_FACTOR * needed, needed + FREE_PADDING)):
            tiles.append(_tile(members, req_to_token, window))
            members, needed, longest = [], count * keys, 0
        members.append(piece)
        longest = max(longest, keys)
    if members:
        tiles.append(_tile(members, req_to_token, window))
    return tiles


def _tile(pieces, req_to_token, window):
    counts, keys, first_rows, requests = torch.tensor(pieces).unbind(1)  # [B] each
    width, depth = int(counts.max()), int(keys.max())
    query = torch.arange(width)  # [Q]
    key = torch.arange(depth)  # [K]
    rows = first_rows[:, None] + torch.minimum(query, counts[:, None] - 1)  # [B, Q]
    slots = req_to_token[requests[:, None], torch.minimum(key, keys[:, None] - 1)]  # [B, K]
    position = (keys - counts)[:, None, None] + query[:, None]  # [B, Q, 1] of each query in its sequence
    hidden = key > position  # [B, Q, K]; a padded query sees real keys too, so that no row is empty
    if window is not None:
        hidden |= key < position - window
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    real = None if bool((counts == width).all()) else (query < counts[:, None]).flatten().nonzero().squeeze(1)
    return Tile(rows.flatten(), slots.flatten().long(), mask[:, None], real)


def attend(query, k_cache, v_cache, tiles, scale, out):
    """Scaled dot-product attention of new tokens over cached keys, grouped-query heads included.

    query: [tokens, heads, dim]; k_cache, v_cache: [slots, kv heads, dim]; out: [tokens, heads, value dim], filled.
    scale: factor on the scores, None for dim ** -0.5.
    """
    kv_heads = k_cache.shape[1]
    for tile in tiles:
        batch, _, width, depth = tile.mask.shape
        # index_select and a float mask: many times faster on a CPU than indexing and a bool mask.
        q = query.index_select(0, tile.queries).view(batch, width, *query.shape[1:]).transpose(1, 2)  # [B, heads, Q, dim]
        k = k_cache.index_select(0, tile.slots).view(batch, depth, kv_heads, -1).transpose(1, 2).to(q.dtype)
        v = v_cache.index_select(0, tile.slots).view(batch, depth, kv_heads, -1).transpose(1, 2).to(q.dtype)
        if width == 1:  # the heads that share a key are then the query rows of one head, and keys are read once
            q = q.reshape(batch, kv_heads, -1, q.shape[3])
        seen = scaled_dot_product_attention(
            q, k, v, attn_mask=tile.mask.to(q.dtype), scale=scale, enable_gqa=q.shape[1] != kv_heads
        )
        seen = seen.reshape(batch, -1, width, seen.shape[3]).transpose(1, 2).flatten(0, 1)  # [B * Q, heads, value dim]
        if tile.real is None:
            out.index_copy_(0, tile.queries, seen)
        else:
            out.index_copy_(0, tile.queries[tile.real], seen[tile.real])
    return out
