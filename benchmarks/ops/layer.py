"""Time of a decoder layer on the GPU in decode steps, at the shapes of three models.

    python benchmarks/ops/layer.py [--model 0.6B] [--rows 16 256] [--keys 1024] [--drafts 4] [--kernels]
                                   [--weights fp8] [--cache fp8] [--adapters 8] [--only-fused]

Calls alternate between the weights of all layers, so that none is in the L2 cache. Times are medians of replayed
graphs: as the engine runs the step, and with unfused layers. With --drafts every row has so many drafts beside its last
token; with --adapters the rows take turns with so many adapters of rank 16. Bytes are those of weights, cache and
adapters, their share that of 4.8 TB/s, the data sheet's bandwidth of an H200. --kernels lists the kernels of the fused
step: their time, and the time from the end of the kernel before, which is negative if they overlap.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from timing import replay_seconds

from slipstream.checkpoint.model_info import RopeInfo
from slipstream.checkpoint.quantization import ONLINE_FP8, Quantization
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.decoder import Decoder, DecoderShape, RopeShape
from slipstream.nn.layers.linear import Linear
from slipstream.nn.paged_attention import TritonAttention
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape
from slipstream.nn.weights.quantized_weight import Quantized, QuantizedWeight
from slipstream.nn.weights.weight_format import Unquantized, WeightFormat
from slipstream.ops.attention import new_fp8_cache
from slipstream.ops.attention.cache import scales_of
from slipstream.ops.gemm.lora import LoraTiles, LoraWeights
from slipstream.ops.gemm.lora.reference import make_blocks, make_tiles, num_counters, tile_size
from slipstream.ops.gemm.quantized import words_of
from slipstream.scheduler.cache.pages import group_sites

PAGE, RANK, BANDWIDTH = 16, 16, 4.8e12
METHODS = {
    "bfloat16": None,
    "fp8": ONLINE_FP8,
    "awq": Quantization(method="awq", layout="awq", bits=4, group=128, symmetric=False),
}
MODELS = {  # hidden size, heads, kv heads, size of a head, feed-forward size, layers
    "135M": (576, 9, 3, 64, 1536, 30),
    "0.6B": (1024, 16, 8, 128, 3072, 28),
    "8B": (4096, 32, 8, 128, 12288, 8),
}


def make_decoder(name: str, method: Quantization | None = None) -> Decoder:
    hidden, heads, kv_heads, dim, ffn, layers = MODELS[name]
    norm = NormShape(eps=1e-6)
    qk_norm: Literal["none", "heads"] = "none" if name == "135M" else "heads"
    attention = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, qk_norm=qk_norm)
    layer = LayerShape(mixers=(attention,), feed=MlpShape(size=ffn, activation="silu"), norm=norm)
    shape = DecoderShape(
        vocab_size=256,
        hidden_size=hidden,
        layers=(layer,) * layers,
        ropes=(RopeShape(RopeInfo(theta=1e6), dim),),
        norm=norm,
        max_positions=40960,
        tied=True,
    )

    def format_of(name: str) -> WeightFormat:
        if method is None or name == "embedding":
            return Unquantized(torch.bfloat16)
        return Quantized(method, name, torch.bfloat16)

    decoder = Decoder(shape, 8192, torch.bfloat16, format_of)
    decoder.materialize(torch.device("cuda"))
    for parameter in decoder.parameters():
        if parameter.dtype is torch.bfloat16:
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
    for weight in (part for part in decoder.modules() if isinstance(part, QuantizedWeight)):
        fill(weight)
    return decoder


def fill(weight: QuantizedWeight) -> None:
    """Random numbers."""
    values = weight.values
    if values.dtype is torch.uint8:
        values.random_(0, 256)
    else:
        values.copy_(torch.randn(values.shape, device="cuda").to(values.dtype))
    weight.scale.fill_(0.003 if values.dtype is torch.uint8 else 0.02)
    if weight.zeros is not None:
        weight.zeros.fill_(7.0)
    if weight.words is not None:
        weight.words.copy_(words_of(weight.scale, 8 if weight.zeros is None else weight.zeros))


def add_adapters(decoder: Decoder, num: int) -> None:
    """Adapters of every product of the layers, those of a slot in one row of a matrix as in the engine's store."""
    for linear in (part for part in decoder.layers.modules() if isinstance(part, Linear)):
        ends = np.cumsum(list(linear.outputs.values())).tolist()
        runs = tuple((first, end, index) for index, (first, end) in enumerate(pairwise([0, *ends])))
        shapes = (RANK * len(runs), linear.num_inputs), (linear.num_outputs, RANK)
        sizes = [rows * columns for rows, columns in shapes]
        store = torch.randn(num, sum(sizes), device="cuda", dtype=torch.bfloat16) * 0.02
        a, b = (part.unflatten(1, shape) for part, shape in zip(store.split(sizes, 1), shapes, strict=True))
        blocks = torch.from_numpy(make_blocks(runs)).cuda()
        arrived = torch.zeros(num_counters(a.shape[1], num), dtype=torch.int32, device="cuda")
        linear.lora = LoraWeights(a, b, runs, blocks, arrived)


def with_adapters(context: ForwardContext, num: int) -> ForwardContext:
    """Row i has adapter i % num."""
    rows = len(context.batch.ids)
    order, tiles = make_tiles(np.arange(rows, dtype=np.int32) % num, np.ones(rows, np.int32), rows, num)
    lora = LoraTiles(torch.from_numpy(order).cuda(), torch.from_numpy(tiles).cuda(), tile_size(rows))
    return replace(context, batch=replace(context.batch, lora=lora, last_lora=lora))


def bytes_per_layer(decoder: Decoder, rows: int, keys: int, cache_dtype: str) -> int:
    """Of weights, keys, values and adapters, each read once."""
    weights = sum(part.numel() * part.element_size() for part in decoder.layers.parameters())
    for part in decoder.layers.modules():
        if isinstance(part, QuantizedWeight) and part.words is not None:  # which kernels of few rows read instead
            weights -= 4 * part.scale.numel() * (1 if part.zeros is None else 2)
    loras = [part.lora for part in decoder.layers.modules() if isinstance(part, Linear) and part.lora is not None]
    adapters = sum(2 * (lora.a.numel() + lora.b.numel()) for lora in loras)
    mixer = decoder.shape.mixers[0]
    key_bytes = 2 * (mixer.head_dim + 4 if cache_dtype == "fp8" else 2 * mixer.head_dim)
    return (weights + adapters) // len(decoder.layers) + rows * keys * mixer.num_kv_heads * key_bytes


def make_cache(shape: tuple[int, int, int, int], dtype: str) -> torch.Tensor:
    """Random keys or values, [pages, page_size, kv heads, dim]."""
    if dtype == "bfloat16":
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cache = new_fp8_cache(*shape, lambda size, kind: torch.zeros(size, dtype=kind, device="cuda"))
    cache.copy_(torch.randn(shape, device="cuda") * 100)
    scales_of(cache).fill_(0.01)
    return cache


def make_context(
    decoder: Decoder, rows: int, keys: int, num_drafts: int = 0, cache_dtype: str = "bfloat16"
) -> ForwardContext:
    """Rows of `keys` keys with shuffled pages, the last of which are those of drafts."""
    mixer, each = decoder.shape.mixers[0], -(-keys // PAGE)
    pages = (torch.randperm(rows * each, device="cuda") + 1).view(rows, each)
    cache = (rows * each + 1, PAGE, mixer.num_kv_heads, mixer.head_dim)
    caches = [(make_cache(cache, cache_dtype), make_cache(cache, cache_dtype)) for _ in decoder.layers]
    queries = 1 + num_drafts
    tokens = rows * queries
    number = torch.arange(tokens, device="cuda") % queries
    positions = keys - queries + number
    pages = pages.repeat_interleave(queries, 0)
    batch = BatchView(
        ids=torch.randint(256, (tokens,), device="cuda"),
        positions=positions,
        lengths=positions + 1,
        slots=(pages.gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE,),
        page_tables=(pages,),
        num_tokens=np.ones(tokens, np.int32),
        max_lengths=np.full(tokens, keys, np.int32),
        num_single=tokens,
        host_ids=-1 - number,
        max_queries=queries,
    )
    attention = TritonAttention(group_sites(decoder.shape.cache_specs(PAGE, cache_dtype)), torch.bfloat16)
    return ForwardContext(batch, attention, attention.make_metadata(batch), caches, (0,) * len(decoder.layers))


def time_us(decoder: Decoder, context: ForwardContext, kernels: bool = False) -> float:
    """Microseconds per layer."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        decoder(context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            decoder(context)
        seconds = replay_seconds(graph)
        if kernels:
            list_kernels(graph, len(decoder.layers))
    return seconds * 1e6 / len(decoder.layers)


def list_kernels(graph: torch.cuda.CUDAGraph, num_layers: int) -> None:
    """Prints the kernels of a replay by name: number per layer, microseconds, microseconds since the kernel before."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(
        (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    end = None
    for event in events:
        entry = found[event.name[:60]]
        entry[0] += 1
        entry[1] += event.time_range.end - event.time_range.start
        entry[2] += 0 if end is None else event.time_range.start - end
        end = event.time_range.end
    for name, (number, took, gap) in sorted(found.items(), key=lambda item: -item[1][1]):
        print(f"    {number / num_layers:5.2f} x {took / number:7.2f} us, gap {gap / number:6.2f}  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--keys", type=int, default=384)
    parser.add_argument("--weights", nargs="+", choices=METHODS, default=["bfloat16"])
    parser.add_argument("--cache", choices=["bfloat16", "fp8"], default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--adapters", type=int, default=0, metavar="N", help="adapters of rank 16 (default: 0)")
    parser.add_argument("--drafts", type=int, default=0, metavar="K", help="drafts of each row (default: 0)")
    parser.add_argument("--only-fused", action="store_true", help="leave out the unfused layers")
    parser.add_argument("--kernels", action="store_true", help="list the kernels")
    args = parser.parse_args()
    for name, weights in ((name, weights) for name in args.model for weights in args.weights):
        decoder = make_decoder(name, METHODS[weights])
        if args.adapters:
            add_adapters(decoder, args.adapters)
        implementations = decoder.implementations
        for rows in args.rows:
            context = make_context(decoder, rows, args.keys, args.drafts, args.cache)
            if args.adapters:
                context = with_adapters(context, args.adapters)
            together = time_us(decoder, context, args.kernels)
            unfused = ""
            if not args.only_fused:
                decoder.implementations = ()
                unfused = f", unfused {time_us(decoder, context):.2f}"
                decoder.implementations = implementations
            drafts = f" and {args.drafts} drafts" if args.drafts else ""
            drafts += f" and {args.adapters} adapters" if args.adapters else ""
            drafts += " over an FP8 cache" if args.cache == "fp8" else ""
            num_bytes = bytes_per_layer(decoder, rows, args.keys, args.cache)
            share = num_bytes / (together * 1e-6) / BANDWIDTH
            print(
                f"{name} {weights} {rows:>3} rows{drafts} x {args.keys} keys: {together:.2f} us{unfused}; "
                f"{num_bytes / 1e6:.1f} MB, {share:.0%} of 4.8 TB/s",
                flush=True,
            )
            del context


if __name__ == "__main__":
    main()
