"""Skinny GEMMs on the GPU: our kernels against cuBLAS, at the shapes of two models.

    python benchmarks/ops/linear.py [--rows 1 2 16] [--tiles]

Calls alternate between the weights of all layers, so that none is in the L2 cache. Times are medians of replayed graphs
with programmatic dependent launch. `--tiles` also measures other tile sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from timing import replay_seconds
from torch.nn.functional import linear

from slipstream.ops.elementwise import silu_and_mul
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.linear.streaming_hopper import StreamingTile, streaming_gemm
from slipstream.ops.gemm.linear.triton import GemvTile, SkinnyTile, gemv, skinny_mma
from slipstream.ops.gemm.table import multiply

SHAPES = {  # name: (out, in, gate)
    "0.6B qkv": (4096, 1024, ""),
    "0.6B o": (1024, 2048, ""),
    "0.6B gate_up": (6144, 1024, "silu"),
    "0.6B down": (1024, 3072, ""),
    "0.6B head": (151936, 1024, ""),
    "8B qkv": (6144, 4096, ""),
    "8B o": (4096, 4096, ""),
    "8B gate_up": (24576, 4096, "silu"),
    "8B down": (4096, 12288, ""),
    "8B head": (151936, 4096, ""),
}
FEW_TILES = [(4, 1024, 4), (4, 512, 4), (2, 1024, 4), (2, 2048, 8), (2, 4096, 8)]
SOME_TILES = [(16, 1024, 1, 4, 1), (16, 1024, 3, 4, 1), (32, 256, 2, 4, 4), (64, 256, 1, 4, 3)]
STREAM_TILES = [(1,), (2,), (1, 64, 32), (2, 64, 32), (1, 64, 32, 4), (1, 128, 64, 1), (2, 64, 64), (1, 128, 128, 1)]

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def time_us(gemm: Gemm, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """Median time of a call; each call uses the next weight."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights[:2]:
            gemm(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                gemm(x, weight)
        seconds = replay_seconds(graph)
    return seconds * 1e6 / len(weights)


def candidates(rows: int, gate: str) -> dict[str, Multiply]:
    """Kernels and tiles by name."""

    def few(tile: tuple[int, ...]) -> Gemm:
        return lambda x, w: gemv(x, w, None, None, gate, GemvTile(*tile))

    def some(tile: tuple[Any, ...]) -> Gemm:
        return lambda x, w: skinny_mma(x, w, None, gate, SkinnyTile(*tile))

    def stream(tile: tuple[int, ...]) -> Gemm:
        return lambda x, w: streaming_gemm(x, w, None, gate, StreamingTile(*tile))

    found = {f"few {tile}": few(tile) for tile in FEW_TILES} if rows <= 2 else {}
    if 2 < rows <= 32:
        found |= {f"some {tile}": some(tile) for tile in SOME_TILES}
    if 2 < rows <= 256:
        found |= {f"stream {tile}": stream(tile) for tile in STREAM_TILES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16, 32, 64])
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    for name, (num_out, num_in, gate) in SHAPES.items():
        count = max(2, min(28, int(2e9 // (num_out * num_in * 2))))
        weights = [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        activation = silu_and_mul if gate else None
        floor = num_out * num_in * 2 / 4.2e6
        for rows in args.rows:
            x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
            exact = linear(x.double(), weights[0].double())
            exact = activation(exact) if activation else exact

            def library(x: torch.Tensor, w: torch.Tensor, gate: str = gate) -> torch.Tensor:
                return silu_and_mul(linear(x, w)) if gate else linear(x, w)

            def ours(x: torch.Tensor, w: torch.Tensor, activation: Any = activation) -> torch.Tensor:
                return multiply(Gemm(x, w, None, activation))

            off = (ours(x, weights[0]).double() - exact).norm() / exact.norm()
            line = f"{name:<13} rows {rows:>2} | floor {floor:6.2f} us | library {time_us(library, x, weights):6.2f}"
            line += f" | ours {time_us(ours, x, weights):6.2f} | off {off:.4f}"
            if args.tiles:
                times = {tile: time_us(gemm, x, weights) for tile, gemm in candidates(rows, gate).items()}
                line += "".join(f" | {tile} {time:.2f}" for tile, time in sorted(times.items(), key=lambda t: t[1]))
            print(line, flush=True)


if __name__ == "__main__":
    main()
