"""Products of few rows on the GPU: ours against the library's, at the shapes of two models.

    python benchmarks/ops/linear.py [--rows 1 2 4]

Weights of all layers take turns, so that none is found in the cache; times are medians of replayed graphs.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from slipstream.ops.linear.reference import linear
from slipstream.ops.linear.triton import few_rows, some_rows

SHAPES = {  # name: (out, in)
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "8B head": (151936, 4096),
}
FEW_TILES = [(4, 1024, 4), (4, 512, 4), (2, 1024, 4), (1, 1024, 4), (2, 2048, 8), (1, 4096, 4)]
SOME_TILES = [
    (16, 128, 4, 5),
    (16, 256, 4, 3),
    (16, 256, 4, 4),
    (16, 512, 4, 3),
    (32, 128, 4, 5),
    (32, 256, 4, 3),
    (64, 128, 4, 4),
    (16, 512, 8, 3),
]


def time_us(work, weights) -> float:
    """Median time of one call, each with the next weight."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights[:2]:
            work(weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                work(weight)
        times = []
        for _ in range(15):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times) * 1000 / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    args = parser.parse_args()
    for name, (num_out, num_in) in SHAPES.items():
        count = max(2, min(28, int(2e9 // (num_out * num_in * 2))))
        weights = [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        floor = num_out * num_in * 2 / 4.2e6
        for rows in args.rows:
            x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
            ours, tiles = (few_rows, FEW_TILES) if rows <= 2 else (some_rows, SOME_TILES)
            exact = linear(x.double(), weights[0].double())
            off = (ours(x, weights[0]).double() - exact).norm() / exact.norm()
            library = time_us(lambda w, x=x: linear(x, w), weights)
            own = time_us(lambda w, x=x, f=ours: f(x, w), weights)
            best = min((time_us(lambda w, x=x, t=t, f=ours: f(x, w, tile=t), weights), t) for t in tiles)
            print(
                f"{name:<14} rows {rows:>2} | floor {floor:6.2f} us | library {library:6.2f} | ours {own:6.2f} | "
                f"best tile {best[0]:6.2f} {best[1]} | off {off:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
