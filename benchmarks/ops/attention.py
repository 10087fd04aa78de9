"""Paged attention on a GPU: error against float64, and time against the floor.

    python benchmarks/ops/attention.py [--quick] [--drafts] [--page-size 16] [--json FILE]

Every variant is first compared with float64, then timed by replays of a captured graph (median). The floor of decode is
the bytes of keys and values, that of prefill the FLOPs below the diagonal. If the pages of a step are small compared
with the L2 cache, calls alternate between several copies. `--drafts` times only steps that verify drafts: all positions
of a row together, each position as a row of one token, and the step without drafts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import replay_seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.ops.attention.rope_triton import rope_and_write_cache
from slipstream.ops.attention.tile_list import (
    MAX_SPLITS,
    TileList,
    TileListHeads,
    TileListRows,
    TileListSplits,
    build_tile_list,
    num_distinct,
)
from slipstream.ops.attention.varlen import (
    DecodeRows,
    KernelShape,
    Partials,
    attend_splits,
    attend_tiles,
    make_partials,
    queries_at_once,
    query_tile,
)

COPY_BANDWIDTH = 4.2e12  # bytes a second, read + written, of a large device copy on an H200
COLD_BYTES = 1 << 30  # bytes of keys and values over all copies

HEADS = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}
EQUAL = [(64, 4096), (128, 4096), (256, 1024), (256, 384), (40, 1024), (16, 8192), (16, 1024)]
EQUAL += [(1, 32768), (1, 1024), (1, 256)]
DECODE = {f"{rows} x {length}": [length] * rows for rows, length in EQUAL}
DECODE["256 of 100 to 2000"] = [random.Random(0).randrange(100, 2000) for _ in range(256)]
PREFILL = [
    ([4096] * 8, [4096] * 8),
    ([4096] * 2, [4096] * 2),
    ([512] * 16, [512] * 16),
    ([8192], [8192]),
    ([8192] * 2, [2048] * 2),
]
# None: the engine's choice; a shape selects the portable kernel
DECODE_SHAPES = [
    None,
    KernelShape(keys=64, warps=4, stages=3, programs_per_sm=3),
    KernelShape(keys=64, warps=4, stages=2, programs_per_sm=4),
    KernelShape(keys=64, warps=4, stages=4, programs_per_sm=2),
    KernelShape(keys=32, warps=4, stages=4, programs_per_sm=4),
    KernelShape(keys=32, warps=2, stages=4, programs_per_sm=4),
    KernelShape(keys=128, warps=4, stages=2, programs_per_sm=2),
    KernelShape(keys=128, warps=8, stages=3, programs_per_sm=1),
]
PREFILL_SHAPES = [
    None,
    KernelShape(keys=64, warps=8, stages=3, programs_per_sm=1, tile=128),
    KernelShape(keys=64, warps=8, stages=2, programs_per_sm=1, tile=128),
    KernelShape(keys=128, warps=8, stages=2, programs_per_sm=1, tile=128),
    KernelShape(keys=64, warps=4, stages=3, programs_per_sm=2, tile=64),
    KernelShape(keys=64, warps=8, stages=4, programs_per_sm=1, tile=128),
    KernelShape(keys=32, warps=8, stages=4, programs_per_sm=1, tile=128),
]
# minimum keys per split (None: the engine's choice), maximum splits per row
SPLITS = [(None, MAX_SPLITS), (128, 64), (256, 32), (512, 32), (1024, 32)]


@dataclass
class Inputs:
    """Rows with shuffled pages, and several copies of the pages."""

    query: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor
    rows: list[tuple[int, int]]  # length, tokens
    scale: float

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that a call must read."""
        _, _, kv_heads, dim = self.caches[0][0].shape
        return sum(length for length, _ in self.rows) * kv_heads * dim * 2 * self.query.element_size()

    @property
    def flops(self) -> int:
        seen = sum(count * length - count * (count - 1) // 2 for length, count in self.rows)
        return 4 * seen * self.query.shape[1] * self.query.shape[2]


def make_inputs(heads: int, kv_heads: int, dim: int, page_size: int, rows: list[tuple[int, int]]) -> Inputs:
    widths = [-(-length // page_size) for length, _ in rows]
    pages = torch.randperm(sum(widths)) + 1
    table = torch.zeros(len(rows), max(widths), dtype=torch.int64)
    for row, mine in enumerate(pages.split(widths)):
        table[row, : len(mine)] = mine
    shape = (sum(widths) + 1, page_size, kv_heads, dim)
    counts = [count for _, count in rows]
    once = 2 * 2 * shape[0] * page_size * kv_heads * dim
    copies = max(1, min(16, COLD_BYTES // once)) if max(counts) == 1 else 1
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(sum(counts), heads, dim, **options)
    return Inputs(
        query,
        [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(copies)],
        table.cuda(),
        torch.tensor([length for length, _ in rows], device="cuda"),
        torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda"),
        torch.empty_like(query),
        rows,
        dim**-0.5,
    )


def list_inputs(
    inputs: Inputs, tile: int, splits: tuple[int | None, int] = SPLITS[0], shape: KernelShape | None = None
) -> TileList:
    heads = inputs.query.shape[1]
    _, page_size, kv_heads, dim = inputs.caches[0][0].shape
    device = inputs.query.device
    row_programs = False
    if shape is None:
        decoded = DecodeRows(device, inputs.query.dtype, heads, kv_heads, dim, page_size, len(inputs.rows))
        shares, row_programs = decoded.num_programs, decoded.has_row_programs
    else:
        shares = shape.programs_per_sm * torch.cuda.get_device_properties(device).multi_processor_count // kv_heads
    longest = max(length for length, _ in inputs.rows)
    starts = None if len(inputs.query) == len(inputs.rows) else inputs.starts
    return build_tile_list(
        TileListRows(inputs.lengths, starts, inputs.table, len(inputs.query), longest),
        TileListHeads(heads, kv_heads, page_size, tile),
        TileListSplits(shares, min_split=splits[0], max_splits=splits[1], row_programs=row_programs),
    )


def error(inputs: Inputs) -> float:
    """Relative error of `out` against float64, for the last tokens of the first, a middle and the last row."""
    keys, values = inputs.caches[-1]
    worst = 0.0
    for row in {0, len(inputs.rows) // 2, len(inputs.rows) - 1}:
        length, count = inputs.rows[row]
        some = min(count, 64)
        end = int(inputs.starts[row + 1])
        query = inputs.query[end - some : end].double()
        group = query.shape[1] // keys.shape[2]
        k, v = (
            x[inputs.table[row]].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query, k) * inputs.scale
        places = torch.arange(length, device="cuda")
        weights = scores.masked_fill(places > places[length - some :, None], -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        worst = max(worst, float((inputs.out[end - some : end].double() - expected).norm() / expected.norm()))
    return worst


def seconds(call: Callable[[], None], calls: int, replays: int) -> float:
    """Seconds per call: median over replays of a graph of `calls` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    return replay_seconds(graph, replays) / calls


def bench_decode(
    name: str, inputs: Inputs, shape: KernelShape | None, splits: tuple[int | None, int], replays: int
) -> dict:
    tile_list = list_inputs(inputs, tile=128, splits=splits, shape=shape)
    partials = make_partials(tile_list, inputs.query.shape[1], inputs.query.shape[2])

    def call() -> None:
        for keys, values in inputs.caches:
            attend_splits(
                inputs.out, inputs.query, keys, values, inputs.table, tile_list, partials, inputs.scale, shape=shape
            )

    return measure(name, inputs, shape, call, len(inputs.caches), replays) | {
        "splits": f"{splits[0] or ''}x{splits[1]}"
    }


def bench_drafts(rows: int, queries: int, length: int, page_size: int, replays: int) -> list[dict[str, Any]]:
    """Rows of `queries` positions each, at the heads of the 8B model."""
    heads, kv_heads, dim = HEADS["8B"]
    plain = make_inputs(heads, kv_heads, dim, page_size, [(length, 1)] * rows)
    offsets = torch.arange(rows * queries, device="cuda") % queries
    drafted = replace(
        plain,
        query=torch.randn(rows * queries, heads, dim, device="cuda", dtype=torch.bfloat16),
        out=torch.empty(rows * queries, heads, dim, device="cuda", dtype=torch.bfloat16),
        table=plain.table.repeat_interleave(queries, 0),
        lengths=length - queries + 1 + offsets,
        starts=torch.arange(rows * queries + 1, dtype=torch.int32, device="cuda"),
        rows=[(length - queries + 1 + each % queries, 1) for each in range(rows * queries)],
    )
    results = []
    for name, inputs, together in (("none", plain, 1), ("one by one", drafted, 1), ("together", drafted, queries)):
        together = queries_at_once(dim, heads // kv_heads, together, is_latent=False)
        num_rows = len(inputs.rows)
        distinct = num_distinct(num_rows, together)
        decoded = DecodeRows(inputs.query.device, torch.bfloat16, heads, kv_heads, dim, page_size, distinct)
        ids = -1 - offsets if inputs is drafted else torch.full((rows,), -1, device="cuda")
        tile_list = build_tile_list(
            TileListRows(inputs.lengths, None, inputs.table, num_rows, length, ids, together),
            TileListHeads(heads, kv_heads, page_size, 128),
            TileListSplits(decoded.num_programs, row_programs=decoded.has_row_programs),
        )
        partials = make_partials(tile_list, heads, dim)

        def call(inputs: Inputs = inputs, tile_list: TileList = tile_list, partials: Partials = partials) -> None:
            for keys, values in inputs.caches:
                attend_splits(inputs.out, inputs.query, keys, values, inputs.table, tile_list, partials, inputs.scale)

        results.append(
            measure(
                f"{rows} x {queries} queries, {length} keys: {name}", inputs, None, call, len(inputs.caches), replays
            )
        )
    return results


def bench_prefill(name: str, inputs: Inputs, shape: KernelShape | None, replays: int) -> dict:
    tile_list = list_inputs(inputs, tile=shape.tile if shape else query_tile(inputs.query.shape[2], 2))

    def call() -> None:
        for keys, values in inputs.caches:
            attend_tiles(inputs.out, inputs.query, keys, values, inputs.table, tile_list, inputs.scale, shape=shape)

    return measure(name, inputs, shape, call, len(inputs.caches), replays)


def measure(
    name: str, inputs: Inputs, shape: KernelShape | None, call: Callable[[], None], calls: int, replays: int
) -> dict[str, Any]:
    inputs.out.fill_(float("nan"))
    result: dict[str, Any] = {"case": name, **(asdict(shape) if shape else {})}
    try:
        call()
    except Exception as refused:  # a shape that needs too much shared memory
        return result | {"error": f"{type(refused).__name__}: {str(refused)[:60]}"}
    off = error(inputs)
    time = seconds(call, calls, replays)
    return result | {
        "off": off,
        "us": time * 1e6,
        "TB/s": inputs.bytes / time / 1e12,
        "of copy": inputs.bytes / time / COPY_BANDWIDTH,
        "TFLOP/s": inputs.flops / time / 1e12,
    }


def bench_library(name: str, inputs: Inputs, replays: int) -> list[dict[str, Any]]:
    """Time of torch's kernels for contiguous rows of equal length, without pages."""
    length, count = inputs.rows[0]
    if length != count:
        return []
    batch, (_, heads, dim) = len(inputs.rows), inputs.query.shape
    kv_heads = inputs.caches[0][0].shape[2]
    query = inputs.query.view(batch, length, heads, dim).transpose(1, 2)
    key, value = (
        torch.randn(batch, length, kv_heads, dim, device="cuda", dtype=query.dtype).transpose(1, 2) for _ in range(2)
    )
    results = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def call(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        try:
            time = seconds(call, 1, replays)
        except Exception as refused:
            results.append({"case": f"{name} torch {backend.name}", "error": str(refused)[:60]})
            continue
        results.append(
            {"case": f"{name} torch {backend.name}", "us": time * 1e6, "TFLOP/s": inputs.flops / time / 1e12}
        )
    return results


def bench_rest(page_size: int, replays: int) -> list[dict[str, Any]]:
    """The kernels around attention: the tile list, once per step, and the cache write, once per layer."""
    results = []
    for rows in (1, 256, 1024):
        inputs = make_inputs(32, 8, 128, page_size, [(256, 1)] * rows)
        time = seconds(lambda inputs=inputs: [list_inputs(inputs, 128) for _ in range(8)] and None, 8, replays)  # type: ignore[misc]
        results.append({"case": f"tile list of {rows} rows", "us": time * 1e6})
    for tokens in (1, 256, 8192):
        inputs = make_inputs(32, 8, 128, page_size, [(tokens, tokens)])
        heads = torch.randn(tokens, 48, 128, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(40, 128, device="cuda", dtype=torch.bfloat16)
        rotary = torch.randn(tokens, 2, 128, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(tokens, device="cuda") + page_size
        given = (heads[:, :40], heads[:, 40:], weight, 1e-6, rotary, *inputs.caches[0], slots)

        def call(given: tuple[Any, ...] = given) -> None:
            for _ in range(8):
                rope_and_write_cache(*given)

        time = seconds(call, 8, replays)
        # reads all heads; writes queries and keys, and keys and values to their pages
        moved = heads.nbytes * (48 + 40 + 16) / 48
        results.append(
            {"case": f"way into the cache of {tokens} tokens", "us": time * 1e6, "TB/s": moved / time / 1e12}
        )
    return results


COLUMNS = ["case", "tile", "keys", "warps", "stages", "programs_per_sm", "splits", "off", "us", "TB/s", "of copy"]
COLUMNS += ["TFLOP/s", "error"]


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        cells = []
        for column in COLUMNS:
            value = result.get(column)
            if value is None or (column == "tile" and value == 0):
                continue
            cells.append(
                f"{value}"
                if column == "case"
                else f"{column} {value:.4g}"
                if isinstance(value, float)
                else f"{column} {value}"
            )
        print(" | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the first variant of each")
    parser.add_argument("--drafts", action="store_true", help="only steps that verify drafts")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; the kernels are checked without one by tests/ops/test_triton_paged_attention.py")
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []

    def add(some: list[dict[str, Any]], rank: bool = True) -> None:
        show(some)
        results.extend(some)
        timed = [result for result in some if "us" in result]
        if rank and timed:
            best.append(min(timed, key=lambda result: result["us"]))

    for rows, length in [(rows, length) for rows in (1, 8, 16) for length in (1024, 4096, 8192)] + [(256, 1024)]:
        add(bench_drafts(rows, 5, length, args.page_size, args.replays), rank=False)
    for model, (heads, kv_heads, dim) in ({} if args.drafts else HEADS).items():
        for rows, lengths in DECODE.items():
            inputs = make_inputs(heads, kv_heads, dim, args.page_size, [(length, 1) for length in lengths])
            name = f"decode {model} {rows}"
            shapes = DECODE_SHAPES[:1] if args.quick else DECODE_SHAPES
            some = [bench_decode(name, inputs, shape, SPLITS[0], args.replays) for shape in shapes]
            if not args.quick:
                some += [bench_decode(name, inputs, shapes[0], splits, args.replays) for splits in SPLITS[1:]]
            add(some)
            del inputs
        for lengths, counts in PREFILL:
            inputs = make_inputs(heads, kv_heads, dim, args.page_size, list(zip(lengths, counts, strict=True)))
            name = f"prefill {model} {len(lengths)} x {counts[0]} of {lengths[0]}"
            shapes = PREFILL_SHAPES[:1] if args.quick else PREFILL_SHAPES
            add([bench_prefill(name, inputs, shape, args.replays) for shape in shapes])
            add(bench_library(name, inputs, args.replays), rank=False)
            del inputs
    if not args.drafts:
        add(bench_rest(args.page_size, args.replays), rank=False)
        print("\nbest variant of each")
    show(best)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
