"""Launches of attention kernels: over pages, on Hopper too, and over whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hand_cache import one_group
from nets.launch_inputs import ROWS, half, ints
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.paged_attention import TritonAttention
from slipstream.ops.attention import new_fp8_cache, tile_list


def batch(chunked: bool, pages: bool = True) -> BatchView:
    num_tokens = 40 if chunked else ROWS
    starts = torch.tensor([0, 1, 2, 40], dtype=torch.int32) if chunked else None
    lengths = torch.tensor([5, 9, 38])
    return BatchView(
        ids=ints(num_tokens), positions=ints(num_tokens), lengths=lengths, query_starts=starts,
        slots=(ints(num_tokens),) if pages else (), page_tables=(ints(ROWS, 4),) if pages else (),
        num_tokens=np.array([1, 1, 38] if chunked else [1, 1, 1]), max_lengths=np.array([5, 9, 38]),
        num_single=2 if chunked else ROWS,
    )  # fmt: skip


def fp8_cache(num_pages: int, page_size: int, heads: int, dim: int) -> torch.Tensor:
    return new_fp8_cache(num_pages, page_size, heads, dim, lambda shape, dtype: torch.zeros(shape, dtype=dtype))


def attend(chunked: bool, one_kernel: bool = False, dtype: str = "bfloat16", **facts: Any) -> None:
    groups = one_group(2, 64, num_heads=8, dtype=dtype, **facts)
    backend = TritonAttention(groups, torch.bfloat16, one_kernel=one_kernel)
    view = batch(chunked)
    new_cache = fp8_cache if dtype == "fp8" else half
    caches = [(new_cache(9, 16, 2, 64), new_cache(9, 16, 2, 64))]
    context = ForwardContext(view, backend, backend.make_metadata(view), caches, (0,))
    query = half(len(view.ids), 8, 64)
    sinks = half(8) if facts.get("sinks") else None
    backend.forward(query, None, query, 0, 0.125, context, sinks)


def attend_on_hopper(patch: pytest.MonkeyPatch, chunked: bool, dtype: str = "bfloat16") -> None:
    for module in ("decode", "varlen"):
        patch.setattr(f"slipstream.ops.attention.{module}.hopper_serves", lambda *_: True)
    attend(chunked, dtype=dtype)


def attend_single_on_hopper(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("slipstream.ops.attention.decode.hopper_serves", lambda *_: True)
    backend = TritonAttention(one_group(2, 128, num_heads=8, dtype="bfloat16"), torch.bfloat16)
    view = BatchView(
        ids=ints(1), positions=ints(1), lengths=torch.tensor([5]), slots=(ints(1),), page_tables=(ints(1, 4),),
        num_tokens=np.array([1]), max_lengths=np.array([9]), num_single=1, host_ids=ints(1) - 9,
    )  # fmt: skip
    caches = [(half(9, 16, 2, 128), half(9, 16, 2, 128))]
    context = ForwardContext(view, backend, backend.make_metadata(view), caches, (0,))
    heads = half(1, 12, 128)
    weight, rotary = half(10, 128), half(1, 2, 128)
    assert backend.forward_single(heads[:, :10], heads[:, 10:], weight, 1e-6, rotary, 0, 0.1, context) is not None


def attend_bidirectional(**how: Any) -> None:
    backend = TritonAttention((), torch.bfloat16, (64,))
    view = batch(True, pages=False)
    context = ForwardContext(view, backend, backend.make_metadata(view), [], ())
    query = half(len(view.ids), 4, 64)
    backend.bidirectional(query, query, query, 0.125, context, **how)


def attention(patch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    return {
        "decode": lambda: attend(False),
        "chunks": lambda: attend(True),
        "a window": lambda: attend(True, window=16, soft_cap=30.0),
        "sinks": lambda: attend(True, sinks=True),
        "one kernel": lambda: attend(False, one_kernel=True),
        "decode on Hopper": lambda: attend_on_hopper(patch, False),
        "chunks on Hopper": lambda: attend_on_hopper(patch, True),
        "decode of an FP8 cache on Hopper": lambda: attend_on_hopper(patch, False, "fp8"),
        "chunks of an FP8 cache on Hopper": lambda: attend_on_hopper(patch, True, "fp8"),
        "a single row on Hopper": lambda: attend_single_on_hopper(patch),
        "whole rows": attend_bidirectional,
        "whole rows with a bias": lambda: attend_bidirectional(reach=8, bias=torch.rand(4, 63)),
        "tile list": lambda: tile_list.build_tile_list(
            tile_list.TileListRows(torch.tensor([3, 4]), None, ints(2, 4), 2, 9),
            tile_list.TileListHeads(8, 2, 16, 128),
            tile_list.TileListSplits(),
        ),
    }
