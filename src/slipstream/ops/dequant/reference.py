"""Dequantizes GGUF blocks of 32 weights in plain torch; K-quants are in `k_quants.py`.

    Q4_0  scale, 16 bytes            w = scale * (q - 8)
    Q4_1  scale, minimum, 16 bytes   w = scale * q + minimum
    Q8_0  scale, 32 bytes            w = scale * q, q signed

Scale and minimum are float16. The low halves of 16 bytes are the first 16 weights, the high halves the other 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.ops.dequant.k_quants import K_KINDS, dequantize_k

BLOCK = 32

BLOCK_KINDS = {"Q4_0": (2, 18), "Q4_1": (4, 20), "Q8_0": (2, 34)}
"""Bytes before the weights of a block, and bytes per block."""
KINDS = (*BLOCK_KINDS, *K_KINDS)


@dataclass(frozen=True, slots=True)
class Blocks:
    scale: torch.Tensor  # [rows, groups, 1] float32
    minimum: torch.Tensor | None  # same shape
    bytes: torch.Tensor  # [rows, groups, 16 or 32] uint8, in the order of the file


def split(raw: torch.Tensor, kind: str) -> Blocks:
    """Splits packed rows [rows, bytes per row] into scales, minima and weight bytes. K-quants: `split_k`."""
    head, size = BLOCK_KINDS[kind]
    blocks = raw.view(raw.shape[0], -1, size)
    head_values = blocks[..., :head].contiguous().view(torch.float16).float()
    # always copies: the copy is aligned, so that it can be viewed as a wider dtype
    weights = blocks[..., head:].clone(memory_format=torch.contiguous_format)
    return Blocks(head_values[..., :1], head_values[..., 1:] if head > 2 else None, weights)


def dequantize(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """Packed rows to float32 [rows, columns]."""
    if kind in K_KINDS:
        return dequantize_k(raw, kind)
    blocks = split(raw, kind)
    if kind == "Q8_0":
        values = blocks.bytes.view(torch.int8).float()
    else:
        values = torch.cat((blocks.bytes & 15, blocks.bytes >> 4), -1).float()
        if kind == "Q4_0":
            values.sub_(8)
    values.mul_(blocks.scale)
    if blocks.minimum is not None:
        values.add_(blocks.minimum)
    return values.flatten(1)
