"""Attention of the CPU platform against a float64 oracle that takes one query at a time, and against SGLang's own."""

import importlib.metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_cpu

DIM = 16


def cache(prefixes, extends, heads=4, kv_heads=2, value_dim=DIM, spread=1.0, seed=0):
    """Requests whose keys lie in random slots of a cache that is NaN everywhere else."""
    torch.manual_seed(seed)
    lengths = [p + e for p, e in zip(prefixes, extends, strict=True)]
    slots = torch.randperm(sum(lengths) + 7)
    req_to_token = torch.full((len(lengths) + 3, max(lengths) + 5), int(slots[-1]), dtype=torch.int32)  # a NaN slot
    req_rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
    k = torch.full((len(slots), kv_heads, DIM), torch.nan)
    v = torch.full((len(slots), kv_heads, value_dim), torch.nan)
    used = 0
    for row, length in zip(req_rows, lengths, strict=True):
        mine = slots[used : used + length]
        req_to_token[row, :length] = mine.int()
        k[mine], v[mine] = torch.randn(length, kv_heads, DIM) * spread, torch.randn(length, kv_heads, value_dim)
        used += length
    query = torch.randn(sum(extends), heads, DIM) * spread
    return query, k, v, req_to_token, req_rows, torch.tensor(prefixes), torch.tensor(extends)


def oracle(query, k, v, req_to_token, req_rows, prefixes, extends, scale=None, window=None):
    query, k, v = (x.double().numpy() for x in (query, k, v))
    scale = query.shape[2] ** -0.5 if scale is None else scale
    group = query.shape[1] // k.shape[1]
    out = np.empty((*query.shape[:2], v.shape[2]))
    token = 0
    for row, prefix, extend in zip(req_rows.tolist(), prefixes.tolist(), extends.tolist(), strict=True):
        for position in range(prefix, prefix + extend):
            first = 0 if window is None else max(0, position - window)
            seen = req_to_token[row, first : position + 1].numpy()
            for head in range(query.shape[1]):
                scores = k[seen, head // group] @ query[token, head] * scale
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ v[seen, head // group] / weights.sum()
            token += 1
    return out


def decoded(query, k, v, req_to_token, req_rows, prefixes, extends, scale=None, window=None):
    out = torch.full((*query.shape[:2], v.shape[2]), torch.nan)
    return sglang_cpu.decode(query, k, v, req_to_token, req_rows, prefixes + extends, scale, out, window)


def extended(query, k, v, req_to_token, req_rows, prefixes, extends, scale=None, window=None):
    out = torch.full((*query.shape[:2], v.shape[2]), torch.nan)
    tiles = sglang_cpu.plan(req_to_token, req_rows, prefixes, extends, window)
    return sglang_cpu.extend(query, k, v, tiles, scale, out)


def assert_close(out, expected):
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-6, rtol=0)


HEADS = [(4, 4), (4, 2), (6, 1)]  # one key head per query head, shared by a group, shared by all


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_decode(heads, kv_heads):
    case = cache([0, 1, 12, 40, 3], [1] * 5, heads, kv_heads, value_dim=24)
    assert_close(decoded(*case), oracle(*case))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_extend(heads, kv_heads):
    case = cache([0, 0, 7, 30, 1, 0], [5, 1, 9, 2, 0, 33], heads, kv_heads, value_dim=24)  # one has nothing new
    assert_close(extended(*case), oracle(*case))


@pytest.mark.parametrize("window", [0, 3, 100])
def test_window(window):
    case = cache([0, 10, 20], [1, 1, 1])
    assert_close(decoded(*case, window=window), oracle(*case, window=window))
    case = cache([0, 10, 4], [12, 1, 9])
    assert_close(extended(*case, window=window), oracle(*case, window=window))


@pytest.mark.parametrize("spread", [1.0, 30.0])  # scores of thousands: exp would overflow with the maximum left in
def test_scale_and_large_scores(spread):
    case = cache([4, 9], [1, 1], spread=spread)
    assert_close(decoded(*case, scale=0.7), oracle(*case, scale=0.7))
    assert_close(extended(*case, scale=0.7), oracle(*case, scale=0.7))


def test_one_very_long_request_among_short_ones(monkeypatch):
    case = cache([2000, 3, 0, 5], [1] * 4)
    assert_close(decoded(*case), oracle(*case))
    monkeypatch.setattr(sglang_cpu, "QUERY_BLOCK", 32)
    monkeypatch.setattr(sglang_cpu, "FREE_PADDING", 64)
    case = cache([50, 3, 0, 5], [300, 2, 1, 0], heads=2, kv_heads=1)
    assert_close(extended(*case), oracle(*case))


def test_nothing_to_do():
    none = torch.zeros(0, dtype=torch.long)
    assert sglang_cpu.plan(torch.zeros(1, 1, dtype=torch.int32), none, none, none) == []
    empty = torch.zeros(0, 4, DIM)
    assert extended(empty, empty, empty, torch.zeros(1, 1, dtype=torch.int32), none, none, none).shape == empty.shape


requests = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)).filter(sum), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(requests)
def test_plan_covers_every_token_once_within_its_bounds(lengths):
    prefixes, extends = torch.tensor(lengths).T
    req_to_token = torch.arange(len(lengths) * 800, dtype=torch.int32).view(len(lengths), 800)
    tiles = sglang_cpu.plan(req_to_token, torch.arange(len(lengths)), prefixes, extends)
    covered = []
    for tile in tiles:
        real = torch.arange(len(tile.queries)) if tile.real is None else tile.real
        covered += tile.queries[real].tolist()
        visible = (tile.mask == 0).sum(-1).flatten()[real].sum()  # what exact causal attention computes
        batch, _, queries, keys = tile.mask.shape
        assert batch == 1 or tile.mask.numel() <= sglang_cpu.TILE_POSITIONS
        assert queries <= sglang_cpu.QUERY_BLOCK
        # Causality halves a square at most; the rest of the excess is padding.
        needed = 2 * int(visible)
        assert tile.mask.numel() <= max(sglang_cpu.PADDING_FACTOR * needed, needed + sglang_cpu.FREE_PADDING)
    assert sorted(covered) == list(range(int(extends.sum())))


def backend():
    """As SGLang makes it; the pools are arguments of the calls under test."""
    return sglang_cpu.batched_backend(SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None))


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 5])
def test_backend_equals_the_one_that_it_replaces(dtype, atol, window):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Stock

    ours = backend()
    for prefixes, extends in (([0, 3, 20], [6, 1, 4]), ([5], [3])):  # the tiles of one forward pass do not outlive it
        ours.init_forward_metadata(SimpleNamespace(out_cache_loc=None))
        query, k, v, req_to_token, rows, prefixes, extends = cache(prefixes, extends)
        query, k, v = query.to(dtype), k.to(dtype), v.to(dtype)
        shared = dict(enable_gqa=True, causal=True, sliding_window_size=window)
        arguments = (k, v, req_to_token, rows, prefixes + extends, prefixes, extends)
        out = ours._run_sdpa_forward_extend(query, torch.empty_like(query), *arguments, **shared)
        expected = Stock._run_sdpa_forward_extend(ours, query, torch.empty_like(query), *arguments, **shared)
        torch.testing.assert_close(out, expected, atol=atol, rtol=0)

        ours.init_forward_metadata(SimpleNamespace(out_cache_loc=None))
        query, shared["causal"] = query[: len(rows)], False
        arguments = (k, v, req_to_token, rows, prefixes + extends)
        out = ours._run_sdpa_forward_decode(query, torch.empty_like(query), *arguments, **shared)
        expected = Stock._run_sdpa_forward_decode(ours, query, torch.empty_like(query), *arguments, **shared)
        torch.testing.assert_close(out, expected, atol=atol, rtol=0)


def test_registered_where_sglang_looks_and_aside_where_there_is_a_gpu(monkeypatch):
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.platforms", name="model_rocket_cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert entry.load()() == "sglang_cpu.CpuPlatform"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert entry.load()() is None
