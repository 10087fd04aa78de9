"""Input projections of Gated DeltaNet on the GPU: two GEMMs in turn, on two streams, or one fused GEMM.

    python benchmarks/gdn_projections.py [--tokens 1 16 64] [--hidden 2048] [--outputs 12288] [--gates 64]

The defaults are Qwen3-Next's: q, k, v and z have 12,288 outputs, b and a have 64. Times are medians of replayed graphs
of all layers, each with its own weights, so that none is in the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from timing import replay_seconds

from slipstream.ops.delta_rule.projections import TWO_STREAMS, project_on_two_streams
from slipstream.ops.linear import linear

LAYERS = 36
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # all weights, and their two parts
Project = Callable[[torch.Tensor, Rows], object]


def in_turn(x: torch.Tensor, rows: Rows) -> object:
    return linear(x, rows[1], None), linear(x, rows[2], None)


def two_streams(x: torch.Tensor, rows: Rows) -> object:
    return project_on_two_streams(x, rows[1], rows[2])


def fused(x: torch.Tensor, rows: Rows) -> object:
    return linear(x, rows[0], None)


WAYS: dict[str, Project] = {"sequential": in_turn, "two streams": two_streams, "fused": fused}


def time_us(project: Project, x: torch.Tensor, layers: list[Rows]) -> float:
    """Median time of one layer's projections."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for rows in layers:  # compiles, and takes what may not be taken during capture
            project(x, rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for rows in layers:
                project(x, rows)
        seconds = replay_seconds(graph)
    return seconds * 1e6 / len(layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 1024, 4096])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=12288)
    parser.add_argument("--gates", type=int, default=64)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return
    layers = []
    for _ in range(LAYERS):
        whole = torch.randn(args.outputs + args.gates, args.hidden, device="cuda", dtype=torch.bfloat16) * 0.02
        layers.append((whole, whole[: args.outputs], whole[args.outputs :]))
    print(f"{torch.cuda.get_device_name()}, us per layer")
    print(f"{'tokens':>8}" + "".join(f"{way:>14}" for way in WAYS) + f"{'fastest':>14}{'default':>14}")
    for tokens in args.tokens:
        x = torch.randn(tokens, args.hidden, device="cuda", dtype=torch.bfloat16)
        times = {way: time_us(project, x, layers) for way, project in WAYS.items()}
        default = "two streams" if tokens in TWO_STREAMS else "fused"
        best = min(times, key=lambda way: times[way])
        print(f"{tokens:>8}" + "".join(f"{time:>14.2f}" for time in times.values()) + f"{best:>14}{default:>14}")


if __name__ == "__main__":
    main()
