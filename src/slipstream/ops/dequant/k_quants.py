"""Splits the K-quants of GGUF files in plain torch: 256 weights of a row share float16 scales.

Q4_K, Q5_K  d, dmin, 8 blocks of 32 weights with a scale and a minimum of 6 bits
            w = d * scale * q - dmin * minimum, q of 4 or 5 bits
Q6_K        d, 16 blocks of 16 weights with a scale of 8 bits
            w = d * scale * (q - 32), q of 6 bits
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SUPERBLOCK = 256

# bytes per superblock
K_KINDS = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


@dataclass(frozen=True, slots=True)
class KBlocks:
    d: torch.Tensor  # [rows, superblocks, 1] float16
    dmin: torch.Tensor | None  # same shape; None: Q6_K
    scale: torch.Tensor  # [rows, superblocks, 8] uint8; Q6_K: [rows, superblocks, 16] int8
    minimum: torch.Tensor | None  # [rows, superblocks, 8] uint8; None: Q6_K
    values: torch.Tensor  # [rows, superblocks, 8, 32] uint8; Q6_K: int8, q - 32


def split_k(raw: torch.Tensor, kind: str) -> KBlocks:
    """Splits packed rows [rows, bytes per row] into scales, minima and weights, one weight per byte."""
    blocks = raw.view(raw.shape[0], -1, K_KINDS[kind])
    if kind == "Q6_K":
        return _split_q6(blocks)
    halves = blocks[..., :4].contiguous().view(torch.float16)
    scale, minimum = _unpack_scales(blocks[..., 4:16])
    # 32 bytes hold two blocks: one in the low halves, the next in the high halves
    pairs = blocks[..., -128:].unflatten(-1, (4, 32))
    values = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3, -2)
    if kind == "Q5_K":
        # bit n of byte i is the high bit of weight i of block n
        for n in range(8):
            values[..., n, :] |= (blocks[..., 16:48] >> n & 1) << 4
    return KBlocks(halves[..., :1], halves[..., 1:], scale, minimum, values)


def dequantize_k(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """Packed rows to float32 [rows, columns]."""
    blocks = split_k(raw, kind)
    scale = blocks.d.float() * blocks.scale
    values = blocks.values.float().view(*scale.shape, -1)
    values.mul_(scale.unsqueeze(-1))
    if blocks.dmin is not None and blocks.minimum is not None:
        values.sub_((blocks.dmin.float() * blocks.minimum).unsqueeze(-1))
    return values.flatten(1)


def _split_q6(blocks: torch.Tensor) -> KBlocks:
    """128 bytes of low halves, 64 bytes of 2 high bits, 16 scales, d.

    128 weights are 4 blocks of 32: two in the low and two in the high halves of 64 bytes. Their high bits are in 32
    bytes.
    """
    pairs = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.stack((pairs & 15, pairs >> 4), -2).unflatten(-1, (2, 32)).flatten(-3, -2)
    bits = blocks[..., 128:192].unflatten(-1, (2, 32))
    for n in range(4):
        low[..., n, :] |= (bits >> 2 * n & 3) << 4
    values = low.flatten(-3, -2).view(torch.int8).sub_(32)
    scale = blocks[..., 192:208].contiguous().view(torch.int8)
    return KBlocks(blocks[..., 208:].contiguous().view(torch.float16), None, scale, None, values)


def _unpack_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of 8 blocks from 12 bytes: 6 bits for each of the first four blocks; the others have 4 bits in
    the last four bytes and 2 in the top bits of the first eight."""
    scale, minimum, rest = packed.split(4, -1)
    return (
        torch.cat((scale & 63, rest & 15 | (scale >> 6) << 4), -1),
        torch.cat((minimum & 63, rest >> 4 | (minimum >> 6) << 4), -1),
    )
