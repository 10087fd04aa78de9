"""Experts of one layer on a GPU: routing, sorting and both grouped GEMMs in a graph, compared with the floor.

    python benchmarks/ops/moe.py [--hidden 2048] [--inner 768] [--experts 128] [--top-k 8] [--tokens 1 16 64 256 8192]
    python benchmarks/ops/moe.py --tiles          # every tile size for every number of tokens

The floor is the larger of the touched experts' bytes at 4.2 TB/s and the FLOPs at 750 TFLOP/s. Calls
alternate between the weights of several layers, so that they are not in the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from timing import replay_seconds

from slipstream.ops.gemm.moe import RouterRule, expert_mlp, route, triton
from slipstream.ops.gemm.moe.sort import GroupedTile

BANDWIDTH, FLOPS = 4.2e12, 750e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 8192])
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    rule = RouterRule(args.top_k)
    layers = [
        (
            torch.randn(args.experts, 2 * args.inner, args.hidden, device="cuda", dtype=torch.bfloat16) / 45,
            torch.randn(args.experts, args.hidden, args.inner, device="cuda", dtype=torch.bfloat16) / 28,
        )
        for _ in range(4)
    ]
    print(f"{'tokens':>7}{'touched':>9}{'all us':>10}{'floor us':>10}  parts us / tile")
    for tokens in args.tokens:
        measure(args, tokens, rule, layers)


def measure(
    args: argparse.Namespace, tokens: int, rule: RouterRule, layers: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    x = torch.randn(tokens, args.hidden, device="cuda", dtype=torch.bfloat16)
    logits = [torch.randn(tokens, args.experts, device="cuda", dtype=torch.bfloat16) for _ in layers]
    routings = [route(each, rule) for each in logits]
    touched = sum(routing.ids.unique().numel() for routing in routings) / len(layers)
    floor = max(
        touched * 3 * args.hidden * args.inner * 2 / BANDWIDTH,
        tokens * args.top_k * 6 * args.hidden * args.inner / FLOPS,
    )

    def time(run) -> float:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return replay_seconds(graph) / len(layers) * 1e6

    def whole() -> None:
        for each, (gate_up, down) in zip(logits, layers, strict=True):
            expert_mlp(x, route(each, rule), gate_up, down)

    def routed() -> None:
        for each in logits:
            route(each, rule)

    def sorted_() -> None:
        for routing in routings:
            triton.sort_by_expert(routing.ids, args.experts, triton.grouped_tile(1, True).pairs)

    parts = f"route {time(routed):.1f}, sort {time(sorted_):.1f}"
    print(f"{tokens:>7}{touched:>9.1f}{time(whole):>10.1f}{floor * 1e6:>10.1f}  {parts}", flush=True)
    if args.tiles:
        results = []
        sizes = itertools.product((16, 32, 64, 128), (32, 64, 128), (64, 128, 256), (4, 8), (3, 4))
        chosen = triton.grouped_tile
        for size in sizes:
            tile = GroupedTile(*size)
            if (tile.pairs + 2 * tile.outputs) * tile.inputs * 2 * tile.stages > 220_000:
                continue
            if tile.pairs > 4 * max(16, tokens * args.top_k / args.experts) or (tile.pairs < 64 and tokens > 2048):
                continue
            triton.grouped_tile = lambda each, inward, itemsize, tile=tile: tile
            try:
                results.append((time(whole), tile))
            except Exception as error:  # a tile that does not compile
                print("    ", tile, type(error).__name__)
        triton.grouped_tile = chosen
        for spent, tile in sorted(results)[:4]:
            print(f"      {spent:8.1f} us  {tuple(tile)}", flush=True)


if __name__ == "__main__":
    main()
