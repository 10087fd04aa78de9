"""Mamba-2 kernels on a GPU: error against the reference and time per call, for several tiles.

    python benchmarks/ops/state_space.py [--heads 128] [--groups 8] [--head-dim 64] [--state 128] [--rows 8x1024 1x8192]

The defaults are Nemotron-H-8B's width in bfloat16. Times are medians of replayed graphs; calls alternate between copies
of the inputs, so that these are not in the L2 cache. The floor is the bytes that a kernel must move / the bandwidth of
a large copy. "default" is the tile that the launcher chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from unittest import mock

import numpy as np
import torch
from timing import replay_seconds

from slipstream.ops.elementwise import gated_group_norm, relu2
from slipstream.ops.elementwise import reference as activation_reference
from slipstream.ops.elementwise import reference as norm_reference
from slipstream.ops.recurrent import RecurrentSteps, SsdWeights, causal_conv1d, list_chunks, max_chunks, ssd_scan, ssm
from slipstream.ops.recurrent import replay as conv_reference

Tile = dict[str, int]
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
COPIES = 3  # of the inputs
COPY_BANDWIDTH = 4.2e12  # bytes a second, read + written, of a large device copy on an H200
SCAN = "slipstream.ops.recurrent.ssm_chunked.choose_tile"
SCAN_TILES: tuple[Tile, ...] = (
    {"BLOCK": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
    {"BLOCK": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK": 32, "num_warps": 4, "num_stages": 2},
    {"BLOCK": 32, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
)
CONV = "slipstream.ops.recurrent.conv1d_triton.choose_tile"
CONV_TILES: tuple[Tile, ...] = tuple(
    {"TOKENS": tokens, "CHANNELS": channels, "num_warps": warps}
    for tokens, channels, warps in ((8, 1024, 4), (8, 512, 2), (4, 1024, 4), (16, 1024, 4), (8, 512, 4))
)
CONV_STEP_TILES: tuple[Tile, ...] = tuple(
    {"CHANNELS": channels, "num_warps": warps} for channels, warps in ((128, 1), (256, 2), (512, 4), (1024, 4))
)


def make_steps(num_rows: int, length: int) -> RecurrentSteps:
    """`num_rows` rows of `length` tokens each, from position 0; single tokens at position 8, with a state."""
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * length
    firsts = torch.full((num_rows,), 8 if length == 1 else 0, dtype=torch.int32, device="cuda")
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    chunks = None, None
    if length > 1:
        chunks = list_chunks(starts, firsts, None, max_chunks(num_rows * length, num_rows))
    return RecurrentSteps(slots, starts, firsts, firsts, np.full(num_rows, length, np.int32), length == 1, *chunks)


def time_us(call: Callable[[int], object], copies: int) -> float:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    graph.replay()
    return replay_seconds(graph) * 1e6 / copies


def measure(
    name: str,
    place: str,
    tiles: Sequence[Tile | None],
    num_bytes: float,
    call: Callable[[int], object],
    error: Callable[[], float],
) -> None:
    """Prints a line for each tile, which replaces the function `place`. None: the launcher's own choice."""
    for tile in tiles:
        with nullcontext() if tile is None else mock.patch(place, lambda *_, tile=tile: tile):
            off, us = error(), time_us(call, COPIES)
        shown = "default" if tile is None else " ".join(map(str, tile.values()))
        floor = num_bytes / COPY_BANDWIDTH * 1e6
        print(f"{name:26}{shown:>14}{us:10.1f} us{floor:10.1f} us floor{off:12.1e} off", flush=True)


def distance(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made.float() - wanted.float()).norm() / wanted.float().norm())


def bench_conv(num_rows: int, length: int, args: argparse.Namespace) -> None:
    num_tokens = num_rows * length
    channels = args.heads * args.head_dim + 2 * args.groups * args.state
    steps = make_steps(num_rows, length)
    inputs = [torch.randn(num_tokens, channels + 8320, **BF16)[:, :channels] for _ in range(COPIES)]
    weight, state = torch.randn(channels, 4, **BF16), torch.zeros(num_rows, channels, 4, **BF16)
    wanted = conv_reference.causal_conv1d(inputs[0], weight, None, state.clone(), steps, "silu")
    measure(
        f"causal_conv1d {num_rows} x {length}",
        CONV,
        [None, *(CONV_TILES if length > 1 else CONV_STEP_TILES)],
        2 * (2 * num_tokens * channels + channels * num_rows * (4 if length == 1 else 3)),
        lambda i: causal_conv1d(inputs[i], weight, None, state, steps, "silu"),
        lambda: distance(causal_conv1d(inputs[0], weight, None, state, steps, "silu"), wanted),
    )


def bench_elementwise(num_tokens: int, args: argparse.Namespace) -> None:
    size = args.heads * args.head_dim
    x = [torch.randn(num_tokens, size, **BF16) for _ in range(COPIES)]
    gates = [torch.randn(num_tokens, 2 * size + 2176, **BF16)[:, :size] for _ in range(COPIES)]
    weight = torch.randn(size, **BF16)
    measure(
        f"gated_group_norm {num_tokens}",
        "",
        [None],
        3 * 2 * num_tokens * size,
        lambda i: gated_group_norm(x[i], gates[i], weight, 1e-5, args.groups),
        lambda: distance(
            gated_group_norm(x[0], gates[0], weight, 1e-5, args.groups),
            norm_reference.gated_group_norm(x[0], gates[0], weight, 1e-5, args.groups),
        ),
    )
    wide = [torch.randn(num_tokens, args.mlp, **BF16) for _ in range(COPIES)]
    measure(
        f"relu2 {num_tokens}",
        "",
        [None],
        2 * 2 * num_tokens * args.mlp,
        lambda i: relu2(wide[i]),
        lambda: distance(relu2(wide[0]), activation_reference.relu2(wide[0])),
    )


def bench_scan(num_rows: int, length: int, args: argparse.Namespace) -> None:
    num_tokens, size = num_rows * length, args.heads * args.head_dim
    steps = make_steps(num_rows, length)
    width = size + 2 * args.groups * args.state + args.heads
    inputs = []
    for _ in range(COPIES):
        mixed = torch.randn(num_tokens, width, **BF16)
        x, b, c, dt = mixed.split([size, args.groups * args.state, args.groups * args.state, args.heads], 1)
        b, c = (part.unflatten(1, (args.groups, -1)) for part in (b, c))
        inputs.append((x.unflatten(1, (args.heads, -1)), dt, b, c))
    weights = SsdWeights(*(torch.rand(args.heads, device="cuda") for _ in range(3)))
    state = torch.zeros(num_rows, args.heads, args.head_dim, args.state, device="cuda")
    wanted_state = state.clone()
    wanted = ssm.ssd_scan(*inputs[0], weights, wanted_state, steps)

    def error() -> float:
        out = ssd_scan(*inputs[0], weights, state, steps)
        return max(distance(out, wanted), distance(state, wanted_state))

    measure(
        f"ssd_scan {num_rows} x {length}",
        SCAN,
        [None, *SCAN_TILES] if length > 1 else [None],
        2 * (num_tokens * width + num_tokens * size) + 4 * state.numel() * (1 if length > 1 else 2),
        lambda i: ssd_scan(*inputs[i], weights, state, steps),
        error,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--state", type=int, default=128)
    parser.add_argument("--mlp", type=int, default=21_504)
    parser.add_argument("--rows", nargs="+", default=["8x1024", "1x8192", "256x1"], help="rows x tokens of each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; the kernels are checked without one by tests/ops/test_ssm.py")
    torch.manual_seed(0)
    for shape in args.rows:
        num_rows, length = map(int, shape.split("x"))
        bench_scan(num_rows, length, args)
        bench_conv(num_rows, length, args)
        bench_elementwise(num_rows * length, args)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
