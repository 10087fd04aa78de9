"""The blocks of Q4_0, Q4_1 and Q8_0 in plain torch.

    Q4_0  scale, 16 bytes            w = scale * (q - 8)
    Q4_1  scale, minimum, 16 bytes   w = scale * q + minimum
    Q8_0  scale, 32 bytes            w = scale * q, q signed

Scale and minimum are float16. Of 16 bytes the low halves are the first 16 weights, the high halves the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32

# bytes before the numbers of a block, and bytes of a block
KINDS = {"Q4_0": (2, 18), "Q4_1": (4, 20), "Q8_0": (2, 34)}


@dataclass(frozen=True, slots=True)
class Blocks:
    scale: torch.Tensor  # [rows, groups, 1] float32
    minimum: torch.Tensor | None  # likewise
    bytes: torch.Tensor  # [rows, groups, 16 or 32] uint8, as they lie in the file


def split(raw: torch.Tensor, kind: str) -> Blocks:
    """Rows of packed bytes [rows, bytes of a row] into their parts."""
    head, size = KINDS[kind]
    blocks = raw.view(raw.shape[0], -1, size)
    numbers = blocks[..., :head].contiguous().view(torch.float16).float()
    # copies also where a view would do, so that they begin at an address which wider numbers may be read from
    weights = blocks[..., head:].clone(memory_format=torch.contiguous_format)
    return Blocks(numbers[..., :1], numbers[..., 1:] if head > 2 else None, weights)


def dequantize(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows of packed bytes to float32 [rows, columns]."""
    blocks = split(raw, kind)
    if kind == "Q8_0":
        numbers = blocks.bytes.view(torch.int8).float()
    else:
        numbers = torch.cat((blocks.bytes & 15, blocks.bytes >> 4), -1).float()
        if kind == "Q4_0":
            numbers.sub_(8)
    numbers.mul_(blocks.scale)
    if blocks.minimum is not None:
        numbers.add_(blocks.minimum)
    return numbers.flatten(1)
