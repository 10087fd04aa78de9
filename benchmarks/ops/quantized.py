"""GEMMs with quantised weights on the GPU beside bfloat16, at the shapes of Qwen3-8B.

    python benchmarks/ops/quantized.py [--rows 1 16 64 256 4096] [--kinds fp8 int4] [--tiles] [--compile]

Calls alternate between several weights, so that none is in the L2 cache. Times are medians of replayed graphs.
`--tiles` also measures other tile sizes; `--compile` only compiles, so that several processes can share that work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import replay_seconds

from slipstream.ops.elementwise import silu_and_mul
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize, words_of
from slipstream.ops.gemm.quantized.dispatch import accepts_streaming
from slipstream.ops.gemm.quantized.gemm import GemmTile, quantize_rows, quantized_gemm
from slipstream.ops.gemm.quantized.streaming import SliceTile, streaming_gemm_low_bit
from slipstream.ops.gemm.table import multiply

SHAPES = {  # name: (out, in, gate)
    "qkv": (6144, 4096, ""),
    "o": (4096, 4096, ""),
    "gate_up": (24576, 4096, "silu"),
    "down": (4096, 12288, ""),
}
SPLITS = (1, 2, 4, 8)
MANY_TILES = [(128, 128, 64, 1, 8, 3), (128, 128, 64, 1, 8, 4), (128, 256, 64, 1, 8, 3)]
GROUP = 128

Multiply = Callable[[torch.Tensor, QuantizedMatrix], torch.Tensor]


def make(kind: str, num_out: int, num_in: int) -> QuantizedMatrix:
    groups = 1 if kind == "fp8" else num_in // GROUP
    scale = torch.full((num_out, groups), 0.01, device="cuda")
    if kind in ("fp8", "block"):
        values = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return QuantizedMatrix(values, scale, None)
    if kind == "int8":
        return QuantizedMatrix(
            torch.randint(-128, 128, (num_out, num_in), device="cuda", dtype=torch.int8), scale, None
        )
    values = torch.randint(0, 256, (num_out, num_in // 2), device="cuda", dtype=torch.uint8)
    zeros = torch.full_like(scale, 7)
    return QuantizedMatrix(values, scale, zeros, words=words_of(scale, zeros))


def time_us(gemm: Callable[[Any], Any], weights: list[Any]) -> float:
    """Median time of a call; each call uses the next weight."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights[:2]:
            gemm(weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                gemm(weight)
        seconds = replay_seconds(graph)
    return seconds * 1e6 / len(weights)


SLICES = [SliceTile(splits, 64, 4, programs) for splits in (1, 2, 4) for programs in (2, 3, 4)]


def candidates(rows: int, num_out: int, gate: str, is_streaming: bool) -> dict[str, Multiply]:
    """Kernels with other tiles, by their sizes."""
    if is_streaming:
        return {str(tuple(tile)): partial(streaming_gemm_low_bit, bias=None, gate=gate, tile=tile) for tile in SLICES}
    many = [GemmTile(*tile) for tile in MANY_TILES]
    if rows <= 64:
        padded = max(16, rows)
        wanted = [split for split in SPLITS if 100 <= num_out // 64 * split <= 600]
        many = [GemmTile(64, padded, width, split, 4, 4) for split in wanted for width in (128, 256)]
        many += [GemmTile(128, padded, 128, 2 * split, 4, 4) for split in wanted]
    return {str(tuple(tile)): partial(_gemm, gate=gate if rows <= 64 else "", tile=tile) for tile in many}


def _gemm(x: torch.Tensor, weight: QuantizedMatrix, gate: str, tile: GemmTile) -> torch.Tensor:
    if weight.values.dtype is torch.float8_e4m3fn:
        q, scales = quantize_rows(x)
        return quantized_gemm(q, weight, None, gate, tile, scales, x.dtype)
    return quantized_gemm(x, weight, None, gate, tile)


def attempt(run: Callable[[], Any]) -> Any:
    """None: the tile does not fit the machine."""
    try:
        return run()
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 4096])
    parser.add_argument("--kinds", nargs="+", default=["fp8", "int4"], choices=["fp8", "block", "int8", "int4"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    for name in args.shapes:
        num_out, num_in, gate = SHAPES[name]
        activation = silu_and_mul if gate else None
        count = 2 if args.compile else 8
        plain = [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        matrices = {kind: [make(kind, num_out, num_in) for _ in range(count)] for kind in args.kinds}
        for rows in args.rows:
            x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
            line = f"{name:<8} rows {rows:>4}"
            if not args.compile:
                line += f" | bf16 {time_us(lambda w: multiply(Gemm(x, w, None, activation)), plain):7.1f}"  # noqa: B023
            for kind, weights in matrices.items():
                is_fp8 = kind in ("fp8", "block")
                weights = [weight._replace(quantizes_inputs=is_fp8) for weight in weights]

                def run(weight: QuantizedMatrix) -> torch.Tensor:
                    return multiply(Gemm(x, weight, None, activation))  # noqa: B023

                exact = x.double() @ dequantize(weights[0], torch.float64).t()
                exact = activation(exact) if activation else exact
                off = (run(weights[0]).double() - exact).norm() / exact.norm()
                others = {}
                if args.tiles and (rows <= 64 or kind != "fp8"):
                    others = candidates(rows, num_out, gate, not is_fp8 and accepts_streaming(x, weights[0]))
                if args.compile:
                    for gemm in others.values():
                        attempt(partial(gemm, x, weights[0]))
                    continue
                line += f" | {kind} {time_us(run, weights):7.1f} off {off:.4f}"
                times = {tile: attempt(partial(time_us, partial(gemm, x), weights)) for tile, gemm in others.items()}
                fitting = sorted((time, tile) for tile, time in times.items() if time is not None)
                line += "".join(f" ; {tile} {time:.1f}" for time, tile in fitting[:4])
            if not args.compile:
                print(line, flush=True)


if __name__ == "__main__":
    main()
