"""Time of a decoder layer on the GPU in decode steps, at the shapes of two models.

    python benchmarks/ops/layer.py [--model 0.6B] [--rows 16 256] [--keys 1024] [--drafts 4] [--kernels]

Calls alternate between the weights of all layers, so that none is in the L2 cache. Times are medians of replayed
graphs: as the engine runs the step, and with unfused layers. With --drafts every row has so many drafts beside its last
token. --kernels lists the kernels of the fused step: their time, and the time from the end of the kernel before, which
is negative if they overlap.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
import torch
from timing import replay_seconds

from slipstream.config.model_info import RopeInfo
from slipstream.nn.attention.triton import TritonAttention
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.decoder_shape import DecoderShape, RopeShape
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape
from slipstream.nn.weight_format import Unquantized
from slipstream.scheduler.cache.layout import group_sites

PAGE = 16
MODELS = {  # hidden size, heads, kv heads, feed-forward size, layers
    "0.6B": (1024, 16, 8, 3072, 28),
    "8B": (4096, 32, 8, 12288, 8),
}


def make_decoder(name: str) -> Decoder:
    hidden, heads, kv_heads, ffn, layers = MODELS[name]
    norm = NormShape(eps=1e-6)
    attention = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=128, scale=128**-0.5, qk_norm="heads")
    layer = LayerShape(mixers=(attention,), feed=MlpShape(size=ffn, activation="silu"), norm=norm)
    shape = DecoderShape(
        vocab_size=256,
        hidden_size=hidden,
        layers=(layer,) * layers,
        ropes=(RopeShape(RopeInfo(theta=1e6), 128),),
        norm=norm,
        max_positions=40960,
        tied=True,
    )
    decoder = Decoder(shape, 8192, torch.bfloat16, lambda name: Unquantized(torch.bfloat16))
    decoder.materialize(torch.device("cuda"))
    for parameter in decoder.parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
    return decoder


def make_context(decoder: Decoder, rows: int, keys: int, num_drafts: int = 0) -> ForwardContext:
    """Rows of `keys` keys with shuffled pages, the last of which are those of drafts."""
    mixer, each = decoder.shape.mixers[0], -(-keys // PAGE)
    pages = (torch.randperm(rows * each, device="cuda") + 1).view(rows, each)
    cache = (rows * each + 1, PAGE, mixer.num_kv_heads, 128)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    caches = [(torch.randn(cache, **half), torch.randn(cache, **half)) for _ in decoder.layers]
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
    attention = TritonAttention(group_sites(decoder.cache_specs(PAGE, "bfloat16")), torch.bfloat16)
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
    parser.add_argument("--drafts", type=int, default=0, metavar="K", help="drafts of each row (default: 0)")
    parser.add_argument("--kernels", action="store_true", help="list the kernels")
    args = parser.parse_args()
    for name in args.model:
        decoder = make_decoder(name)
        implementations = decoder.implementations
        for rows in args.rows:
            context = make_context(decoder, rows, args.keys, args.drafts)
            together = time_us(decoder, context, args.kernels)
            decoder.implementations = ()
            apart = time_us(decoder, context)
            decoder.implementations = implementations
            drafts = f" and {args.drafts} drafts" if args.drafts else ""
            print(
                f"{name} {rows:>3} rows{drafts} x {args.keys} keys: {together:.2f} us, unfused {apart:.2f}", flush=True
            )
            del context


if __name__ == "__main__":
    main()
