"""Dequantizes GGUF blocks of 32 weights, and K-quants, in plain torch.

    Q4_0  scale, 16 bytes            w = scale * (q - 8)
    Q4_1  scale, minimum, 16 bytes   w = scale * q + minimum
    Q8_0  scale, 32 bytes            w = scale * q, q signed

Scale and minimum are float16. The low halves of 16 bytes are the first 16 weights, the high halves the other 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.ops.gemm.quantized.matrix import QuantizedMatrix, pack_4_bit

# Splits the K-quants of GGUF files in plain torch: 256 weights of a row share float16 scales.
#
# Q4_K, Q5_K  d, dmin, 8 blocks of 32 weights with a scale and a minimum of 6 bits
#             w = d * scale * q - dmin * minimum, q of 4 or 5 bits
# Q6_K        d, 16 blocks of 16 weights with a scale of 8 bits
#             w = d * scale * (q - 32), q of 6 bits

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


# GGUF blocks as a `QuantizedMatrix`, so that the GEMMs of quantised checkpoints multiply them.
#
# Codes are those of the file. Scales and minima are float16: for Q4_0, Q4_1 and Q8_0 the file's own; for K-quants the
# product of both levels of scales, rounded once. Measured on normal weights, that error is 0.4 (Q4_K, Q5_K) or 0.1
# (Q6_K) of the error of weights in bfloat16; with the rounding of operands to bfloat16 in the kernel, 1.08 and 1.01.
#
#     kind   codes   columns per scale   minima   bits per weight (file)
#     Q4_0   4 bits  32                  no       4.5 (4.5)
#     Q4_1   4 bits  32                  yes      5   (5)
#     Q8_0   8 bits  32                  no       8.5 (8.5)
#     Q4_K   4 bits  32                  yes      5   (4.5)
#     Q5_K   8 bits  32                  yes      9   (5.5)
#     Q6_K   8 bits  16                  no       9   (6.56)

_PART = 2**24  # weights that are converted at once
_4_BIT = ("Q4_0", "Q4_1", "Q4_K")
_WITH_MINIMA = ("Q4_1", "Q4_K", "Q5_K")

GGUF_KINDS = KINDS


def gguf_bytes(kind: str, num_rows: int, num_columns: int) -> int:
    """Of the matrix that `gguf_matrix` makes."""
    values = num_columns // 2 if kind in _4_BIT else num_columns
    tables = 2 if kind in _WITH_MINIMA else 1
    return num_rows * (values + 2 * tables * num_columns // _group(kind))


def gguf_matrix(raw: torch.Tensor, kind: str, num_columns: int, device: torch.device) -> QuantizedMatrix:
    """raw [rows, bytes per row] uint8, anywhere; converted on `device`, in parts."""
    rows, groups = len(raw), num_columns // _group(kind)
    width, dtype = (num_columns // 2, torch.uint8) if kind in _4_BIT else (num_columns, torch.int8)
    values = torch.empty((rows, width), dtype=dtype, device=device)
    scale = torch.empty((rows, groups), dtype=torch.float16, device=device)
    minima = torch.empty_like(scale) if kind in _WITH_MINIMA else None
    step = max(1, _PART // num_columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        codes, own_scale, own_minima = _convert(raw[part].to(device), kind)
        values[part] = pack_4_bit(codes) if kind in _4_BIT else codes.view(torch.int8)
        scale[part] = own_scale
        if minima is not None and own_minima is not None:
            minima[part] = own_minima
    return QuantizedMatrix(values, scale, None, 8 if kind == "Q4_0" else 0, minima)


def _group(kind: str) -> int:
    return 16 if kind == "Q6_K" else 32


def _convert(raw: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes [rows, columns], scales and minima [rows, groups] in float32."""
    if kind in K_KINDS:
        parts = split_k(raw, kind)
        scale = (parts.d.float() * parts.scale).flatten(1)
        if parts.dmin is None or parts.minimum is None:
            return parts.values.flatten(1), scale, None
        return parts.values.flatten(1), scale, -(parts.dmin.float() * parts.minimum).flatten(1)
    blocks = split(raw, kind)
    codes = blocks.bytes
    if kind in _4_BIT:
        codes = torch.cat((codes & 15, codes >> 4), -1)
    return codes.flatten(1), blocks.scale.flatten(1), None if blocks.minimum is None else blocks.minimum.flatten(1)


__all__ = [
    "BLOCK",
    "BLOCK_KINDS",
    "Blocks",
    "KBlocks",
    "KINDS",
    "K_KINDS",
    "SUPERBLOCK",
    "dequantize",
    "split",
    "split_k",
]
