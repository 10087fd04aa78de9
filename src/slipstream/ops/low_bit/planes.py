"""Planes: the common form of low-bit weights from which every kernel packs.

A plane holds values u from 0 to 15, two per byte, the even column in the low half. A matrix is the sum of
scale * (u - 8) over its planes plus an offset, with one scale and offset per 32 columns of a row:

    Q4_0  one plane of q
    Q4_1  one plane of q; offset = minimum + 8 * scale
    Q8_0  q + 128 is split into halves: one plane of the high halves with 16 * scale, one of the low halves with
          scale; offset = 8 * scale
    Q4_K  one plane of q with d * scale; offset = 8 * d * scale - dmin * minimum
    Q5_K  one plane of the high bit + 8 with 16 * d * scale, one of the low halves as Q4_K

Q6_K has no planes: its scales are those of 16 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.ops.dequant import K_KINDS, split, split_k

# planes per kind
PLANES = {"Q4_0": 1, "Q4_1": 1, "Q8_0": 2, "Q4_K": 1, "Q5_K": 2}


@dataclass(frozen=True, slots=True)
class Planes:
    pairs: tuple[torch.Tensor, ...]  # each [rows, columns / 2] uint8
    scales: tuple[torch.Tensor, ...]  # each [rows, groups] float32
    offset: torch.Tensor | None  # [rows, groups] float32

    @property
    def num_rows(self) -> int:
        return self.pairs[0].shape[0]

    @property
    def num_columns(self) -> int:
        return 2 * self.pairs[0].shape[1]


def make_planes(raw: torch.Tensor, kind: str) -> Planes:
    """From the bytes of a GGUF tensor, [rows, bytes per row] uint8."""
    if kind in K_KINDS:
        return _make_k_planes(raw, kind)
    blocks = split(raw, kind)
    scale = blocks.scale.squeeze(-1)
    # two bytes at a time: adjacent columns are packed into one byte
    words = blocks.bytes.view(torch.int16)
    low, high = _low_halves(words), _high_halves(words)
    if kind == "Q8_0":
        # adding 128 to a signed byte flips its top bit, the top bit of its high half
        return Planes((high.bitwise_xor_(0x88).flatten(1), low.flatten(1)), (16 * scale, scale), 8 * scale)
    pairs = torch.cat((low, high), -1).flatten(1)
    if blocks.minimum is None:
        return Planes((pairs,), (scale,), None)
    return Planes((pairs,), (scale,), blocks.minimum.squeeze(-1).add(scale, alpha=8))


def _make_k_planes(raw: torch.Tensor, kind: str) -> Planes:
    blocks = split_k(raw, kind)
    assert blocks.dmin is not None and blocks.minimum is not None, f"{kind} has no planes"
    scale = (blocks.d.float() * blocks.scale).flatten(1)
    offset = (blocks.dmin.float() * blocks.minimum).flatten(1).neg_()
    offset.add_(scale, alpha=8)
    columns = blocks.values.flatten(1)
    low = _pair(columns & 15)
    if kind == "Q4_K":
        return Planes((low,), (scale,), offset)
    # near 0: the rounding of activations is multiplied by the values of a plane
    return Planes((_pair((columns >> 4) + 8), low), (16 * scale, scale), offset)


def _pair(columns: torch.Tensor) -> torch.Tensor:
    return columns[:, 0::2] | columns[:, 1::2] << 4


def _low_halves(words: torch.Tensor) -> torch.Tensor:
    return ((words & 0x000F) | ((words & 0x0F00) >> 4)).to(torch.uint8)


def _high_halves(words: torch.Tensor) -> torch.Tensor:
    return (((words & 0x00F0) >> 4) | ((words >> 8) & 0x00F0)).to(torch.uint8)
