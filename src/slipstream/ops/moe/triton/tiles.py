"""Tile sizes of the grouped GEMMs."""

from __future__ import annotations

from typing import NamedTuple


class GroupedTile(NamedTuple):
    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


BATCH_INVARIANT = GroupedTile(64, 64, 64, 4, 4)


def grouped_tile(each: float, inward: bool, itemsize: int = 2) -> GroupedTile:
    """The tile for a mean number of tokens per expert, measured on the H200 at the sizes of Qwen3-30B-A3B. Tiles of
    gate and up (`inward`) and of down have the same number of pairs."""
    if each <= 0.25:
        return GroupedTile(16, 32, 128, 2, 4) if inward else GroupedTile(16, 64, 256, 4, 3)
    if each <= 8:
        return GroupedTile(16, 64, 128, 4, 4)
    if each <= 32:
        return GroupedTile(32, 64, 128, 4, 3)
    if each <= 64:
        return GroupedTile(64, 64, 64, 4, 4)
    # gate and up have two accumulators; float32 needs twice the shared memory
    return GroupedTile(128, 128, 64, 8, 3) if inward or itemsize > 2 else GroupedTile(128, 256, 64, 8, 4)


def quantized_tile(each: float, is_inward: bool) -> GroupedTile:
    """As `grouped_tile`, for quantised weights; `inputs` counts bytes of a weight row. Not measured yet."""
    if each <= 8:
        return GroupedTile(16, 64 if is_inward else 128, 128, 4, 4)
    if each <= 32:
        return GroupedTile(32, 64, 128, 4, 3)
    if each <= 64:
        return GroupedTile(64, 64, 128, 4, 3)
    return GroupedTile(128, 128, 64, 8, 3)
