"""Sorts the tokens of a step by adapter and cuts them into tiles, on the host; and outputs of a product into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from slipstream.config.memory import FEW_ADAPTED

Ints = np.ndarray[Any, np.dtype[np.int32]]

BLOCK = 128
"""Outputs that one program of the expand kernel computes."""
FEW_TOKENS = FEW_ADAPTED
"""Up to this many tokens, tiles are small and the inputs of A are split over programs: such steps wait for weights."""
MAX_COLUMNS = 64
"""Columns of A, or inputs of B, of one product of a kernel."""


def tile_size(num_tokens: int) -> int:
    """Tokens per tile in a step of `num_tokens` tokens, padding included."""
    return 16 if num_tokens <= FEW_TOKENS else 64


def num_tiles(num_tokens: int, num_slots: int) -> int:
    """Maximum number of tiles of a step: each slot, and the tokens without one, may have one that is not full."""
    return min(num_tokens, num_tokens // tile_size(num_tokens) + num_slots + 1)


def num_counters(num_columns: int, num_slots: int) -> int:
    """Groups of programs that split the inputs of a matrix A with `num_columns` columns, in the largest such step."""
    return num_tiles(FEW_TOKENS, num_slots) * -(-num_columns // min(num_columns, MAX_COLUMNS))


def make_tiles(slots: Ints, counts: Ints, num_tokens: int, num_slots: int) -> tuple[Ints, Ints]:
    """`order` and `tiles` of `LoraTiles`. `slots`: per row, the slot of its adapter, -1: none. `counts`: tokens of each
    row, which lie row after row. `num_tokens`: of the step, padding included."""
    size = tile_size(num_tokens)
    tiles = np.full((num_tiles(num_tokens, num_slots), 3), -1, np.int32)
    by_token = np.full(num_tokens, -1, np.int16)  # padding has no adapter
    by_token[: counts.sum()] = np.repeat(slots, counts)
    # without an adapter last: -1 is the largest unsigned number; 16 bits are sorted by radix
    order = np.argsort(by_token.view(np.uint16), kind="stable").astype(np.int32)
    by_token = by_token[order]
    firsts: Ints = np.flatnonzero(np.diff(by_token, prepend=-2)).astype(np.int32)
    borders = [*firsts.tolist(), len(by_token)]
    used = 0
    for first, end in zip(borders[:-1], borders[1:], strict=True):
        begins = np.arange(first, end, size)
        own = tiles[used : used + len(begins)]
        own[:, 0], own[:, 1], own[:, 2] = by_token[first], begins, np.minimum(begins + size, end)
        used += len(begins)
    return order, tiles


def make_blocks(runs: Sequence[tuple[int, int, int]]) -> Ints:
    """Runs of outputs cut into blocks of at most BLOCK: (first output, end, index of the matrix A)."""
    blocks = [(at, min(at + BLOCK, end), matrix) for first, end, matrix in runs for at in range(first, end, BLOCK)]
    return np.array(blocks, np.int32)


@cache
def has_paired_blocks(runs: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether the second half of the blocks has the outputs that follow those of the first half in the same order, as
    the up rows of a gated product follow the gate rows."""
    bounds = make_blocks(runs)[:, :2]
    half, rest = len(bounds) // 2, len(bounds) % 2
    return not rest and bool((bounds[half:] == bounds[:half] + runs[-1][1] // 2).all())
