"""Runs of the C kernels on odd sizes: tests compare the results of several compilations of the same source."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from gguf_blocks import K_KINDS, quantize
from slipstream.ops import attention, elementwise
from slipstream.ops.gemm.dequant import KINDS
from slipstream.ops.gemm.linear import tiles as linear_native
from slipstream.ops.gemm.low_bit.interleaved import Interleaved

SIZES = (1, 6, 24, 64, 101)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_norms() -> list[torch.Tensor]:
    found = []
    for size in SIZES:
        x, weight = random(5, size), random(size, seed=1)
        found += [
            elementwise.rms_norm(x, weight, 1e-5),
            *elementwise.add_rms_norm(x, random(5, size, seed=2), weight, 1e-5),
        ]
        found.append(elementwise.rms_norm(random(5, 3, size), random(3, size, seed=3), 1e-5))
    return found


def run_activations() -> list[torch.Tensor]:
    return [
        run(random(3, 2 * size) * 4)
        for size in SIZES
        for run in (elementwise.silu_and_mul, elementwise.gelu_tanh_and_mul)
    ]


def run_rope() -> list[torch.Tensor]:
    return [attention.apply_rope(random(3, 5, size), random(3, 2, size, seed=1)) for size in SIZES if size % 2 == 0]


def run_products() -> list[torch.Tensor]:
    return [
        linear_native.skinny_gemm(random(tokens, size), random(7, size, seed=1).to(dtype), None)
        for size in SIZES
        for tokens in (1, 2, 3, 4, 9)
        for dtype in (torch.float32, torch.bfloat16)
    ]


def run_low_bit() -> list[torch.Tensor]:
    found = []
    for kind in KINDS:
        columns = 256 if kind in K_KINDS else 96
        raw = quantize((random(30, columns) + 0.5).numpy(), gguf.GGMLQuantizationType[kind])
        packed = Interleaved().pack(kind, torch.from_numpy(raw))
        found += [packed.multiply(random(tokens, columns, seed=2)) for tokens in (1, 2, 5, 11)]
    return found


def run_attention() -> list[torch.Tensor]:
    found = []
    for size in SIZES:
        for heads, kv_heads in ((2, 2), (6, 2)):
            keys, values = random(9, 16, kv_heads, size, seed=1), random(9, 16, kv_heads, size, seed=2)
            table, counts = torch.arange(9).view(1, 9), np.array([33], np.int32)
            query, seen = random(33, heads, size), torch.arange(100, 133)
            for tiles in (attention.cut_tiles(counts), None):
                tables = table if tiles is not None else table.expand(33, 9).contiguous()
                for window, cap in ((0, 0.0), (70, 2.0)):
                    args = (query, keys, values, tables, seen, tiles, 0.3, cap, window)
                    found.append(attention.attend_in_place(*args))
    return found


RUNS = (run_norms, run_activations, run_rope, run_products, run_low_bit, run_attention)
