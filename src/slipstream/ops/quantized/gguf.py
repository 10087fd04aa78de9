"""GGUF blocks as a `QuantizedMatrix`, so that the GEMMs of quantised checkpoints multiply them.

Codes are those of the file. Scales and minima are float16: for Q4_0, Q4_1 and Q8_0 the file's own; for K-quants the
product of both levels of scales, rounded once. Measured on normal weights, that error is 0.4 (Q4_K, Q5_K) or 0.1 (Q6_K)
of the error of weights in bfloat16; with the rounding of operands to bfloat16 in the kernel, 1.08 and 1.01.

    kind   codes   columns per scale   minima   bits per weight (file)
    Q4_0   4 bits  32                  no       4.5 (4.5)
    Q4_1   4 bits  32                  yes      5   (5)
    Q8_0   8 bits  32                  no       8.5 (8.5)
    Q4_K   4 bits  32                  yes      5   (4.5)
    Q5_K   8 bits  32                  yes      9   (5.5)
    Q6_K   8 bits  16                  no       9   (6.56)
"""

from __future__ import annotations

import torch

from slipstream.ops.dequant import K_KINDS, KINDS, split, split_k
from slipstream.ops.quantized.matrix import QuantizedMatrix, pack_4_bit

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
