"""Mamba-2 kernels on a GPU: error against the reference and time per call, for several tiles.

    python benchmarks/ops/state_space.py [--heads 128] [--groups 8] [--head-dim 64] [--state 128] [--rows 8x1024 1x8192]

The defaults are Nemotron-H-8B's width in bfloat16. Times are medians of replayed graphs; calls alternate between copies
of the inputs, so that these are not in the L2 cache. The floor is the bytes that a kernel must move / the bandwidth of
a large copy. "default" is the tile that the launcher chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import numpy as np
import torch
from timing import replay_seconds

from slipstream.ops.recurrent_steps import RecurrentSteps, list_chunks, max_chunks
from slipstream.ops.ssm import SsdWeights, reference, ssd_scan

COPY_BANDWIDTH = 4.2e12  # bytes a second, read + written, of a large device copy on an H200
CHUNKED = "slipstream.ops.ssm.triton.ssd_chunked.choose_tile"
# BLOCK, num_warps, num_stages
TILES = ((64, 4, 2), (64, 8, 2), (64, 4, 1), (32, 4, 2), (32, 4, 3))


def make_steps(num_rows: int, length: int) -> RecurrentSteps:
    """`num_rows` rows of `length` tokens each, from position 0."""
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * length
    firsts = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    chunks = None, None
    if length > 1:
        chunks = list_chunks(starts, firsts, None, max_chunks(num_rows * length, num_rows))
    return RecurrentSteps(slots, starts, firsts, np.full(num_rows, length, np.int32), length == 1, *chunks)


def time_us(call: Callable[[int], object], copies: int) -> float:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    graph.replay()
    return replay_seconds(graph) * 1e6 / copies


def report(name: str, tile: str, us: float, num_bytes: float, error: float) -> None:
    print(f"{name:28}{tile:>16}{us:10.1f} us{num_bytes / COPY_BANDWIDTH * 1e6:10.1f} us floor{error:12.1e}", flush=True)


def distance(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made.float() - wanted.float()).norm() / wanted.float().norm())


def bench_scan(num_rows: int, length: int, args: argparse.Namespace) -> None:
    num_tokens, size, copies = num_rows * length, args.heads * args.head_dim, 3
    steps = make_steps(num_rows, length)
    width = size + 2 * args.groups * args.state + args.heads
    options = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = []
    for _ in range(copies):
        mixed = torch.randn(num_tokens, width, **options)
        x, b, c, dt = mixed.split([size, args.groups * args.state, args.groups * args.state, args.heads], 1)
        b, c = (part.unflatten(1, (args.groups, -1)) for part in (b, c))
        inputs.append((x.unflatten(1, (args.heads, -1)), dt, b, c))
    weights = SsdWeights(*(torch.rand(args.heads, device="cuda") for _ in range(3)))
    state = torch.zeros(num_rows, args.heads, args.head_dim, args.state, device="cuda")
    wanted_state = state.clone()
    wanted = reference.ssd_scan(*inputs[0], weights, wanted_state, steps)
    moved = 2 * (2 * num_tokens * size + num_tokens * (width - size)) + 4 * state.numel() * (1 if length > 1 else 2)
    tiles = [None, *TILES] if length > 1 else [None]
    for tile in tiles:
        chosen = tile and {"BLOCK": tile[0], "num_warps": tile[1], "num_stages": tile[2]}
        with mock.patch(CHUNKED, lambda *_, chosen=chosen: chosen) if tile else nullcontext():
            error = distance(ssd_scan(*inputs[0], weights, state, steps), wanted)
            error = max(error, distance(state, wanted_state))
            us = time_us(lambda i: ssd_scan(*inputs[i], weights, state, steps), copies)
        report(f"ssd_scan {num_rows} x {length}", str(tile or "default"), us, moved, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--state", type=int, default=128)
    parser.add_argument("--rows", nargs="+", default=["8x1024", "1x8192", "256x1"], help="rows x tokens of each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; the kernels are checked without one by tests/ops/test_ssm.py")
    torch.manual_seed(0)
    for shape in args.rows:
        num_rows, length = map(int, shape.split("x"))
        bench_scan(num_rows, length, args)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
