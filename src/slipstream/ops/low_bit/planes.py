"""Planes: the common form of low-bit weights from which every kernel packs.

A plane holds values u from 0 to 15, two per byte, the even column in the low half. A matrix is the sum of
scale * (u - 8) over its planes plus an offset, with one scale and offset per 32 columns of a row:

    Q4_0  one plane of q
    Q4_1  one plane of q; offset = minimum + 8 * scale
    Q8_0  q + 128 is split into halves: one plane of the high halves with 16 * scale, one of the low halves with
          scale; offset = 8 * scale
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.ops.dequant import split

PLANES = {"Q4_0": 1, "Q4_1": 1, "Q8_0": 2}


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


def _low_halves(words: torch.Tensor) -> torch.Tensor:
    return ((words & 0x000F) | ((words & 0x0F00) >> 4)).to(torch.uint8)


def _high_halves(words: torch.Tensor) -> torch.Tensor:
    return (((words & 0x00F0) >> 4) | ((words >> 8) & 0x00F0)).to(torch.uint8)
