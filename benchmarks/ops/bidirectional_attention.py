"""Bidirectional attention on the GPU: our kernel against torch's, at head sizes of encoders, with several tile sizes.

    python benchmarks/ops/bidirectional_attention.py [--tokens 16384]

Queries, keys and values are views of one merged projection; times are of replayed graphs. torch's kernel gets rows of
equal length, which it requires, without padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from slipstream.ops.attention.bidirectional_triton import Cut, attend_bidirectional, choose_cut, list_tiles

HEADS = {32: 12, 64: 16, 128: 16}
LENGTHS = (32, 128, 512, 2048)
CUTS = [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3), (32, 32, 2, 2)]


def time_us(work: Callable[[], torch.Tensor], times: int = 10) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(times):
                work()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=16_384)
    tokens = parser.parse_args().tokens
    for dim, heads in HEADS.items():
        for length in LENGTHS:
            rows = tokens // length
            merged = torch.randn(rows * length, 3 * heads, dim, device="cuda", dtype=torch.bfloat16)
            query, key, value = merged.split(heads, 1)
            starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * length
            flops = 4 * rows * heads * length * length * dim
            apart = [x.unflatten(0, (rows, length)).transpose(1, 2) for x in (query, key, value)]

            def theirs(apart: list[torch.Tensor] = apart) -> torch.Tensor:
                return F.scaled_dot_product_attention(*apart)

            expected = theirs().transpose(1, 2).flatten(0, 1).float()
            chosen = choose_cut(dim, torch.bfloat16)
            found = [("torch", time_us(theirs))]
            for cut in dict.fromkeys([chosen, *(Cut(*numbers) for numbers in CUTS)]):
                tiles = list_tiles(starts, len(query), cut)

                def ours(cut: Cut = cut, tiles=tiles, inputs=(query, key, value), scale: float = dim**-0.5):  # type: ignore[no-untyped-def]
                    return attend_bidirectional(*inputs, scale, tiles, cut)

                error = (ours().float() - expected).norm() / expected.norm()
                assert error < 5e-3, f"{cut} has an error of {error}"
                name = f"{cut.queries}x{cut.keys} {cut.warps}w {cut.stages}s" + (" (chosen)" if cut == chosen else "")
                found.append((name, time_us(ours)))
            print(f"head {dim}, {rows} rows of {length}, {heads} heads")
            for name, us in found:
                print(f"  {name:24} {us:8.1f} us {flops / us / 1e6:6.0f} TFLOP/s")


if __name__ == "__main__":
    main()
