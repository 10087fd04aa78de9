"""Time of a decoder layer on the GPU in decode steps, at the shapes of two models.

    python benchmarks/ops/layer.py [--model 0.6B] [--rows 16 256] [--keys 1024]

Calls alternate between the weights of all layers, so that none is in the L2 cache. Times are medians of replayed
graphs: as the engine runs the step, and with unfused layers.
"""

from __future__ import annotations

import argparse

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


def make_context(decoder: Decoder, rows: int, keys: int) -> ForwardContext:
    """Rows of `keys` keys with shuffled pages."""
    mixer, each = decoder.shape.mixers[0], -(-keys // PAGE)
    pages = (torch.randperm(rows * each, device="cuda") + 1).view(rows, each)
    cache = (rows * each + 1, PAGE, mixer.num_kv_heads, 128)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    caches = [(torch.randn(cache, **half), torch.randn(cache, **half)) for _ in decoder.layers]
    lengths = torch.full((rows,), keys, device="cuda")
    batch = BatchView(
        ids=torch.randint(256, (rows,), device="cuda"),
        positions=lengths - 1,
        lengths=lengths,
        slots=(pages[:, -1] * PAGE + (keys - 1) % PAGE,),
        page_tables=(pages,),
        num_tokens=np.ones(rows, np.int32),
        max_lengths=np.full(rows, keys, np.int32),
        num_single=rows,
    )
    attention = TritonAttention(group_sites(decoder.cache_specs(PAGE, "bfloat16")), torch.bfloat16)
    return ForwardContext(batch, attention, attention.make_metadata(batch), caches, (0,) * len(decoder.layers))


def time_us(decoder: Decoder, context: ForwardContext) -> float:
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
    return seconds * 1e6 / len(decoder.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--keys", type=int, default=384)
    args = parser.parse_args()
    for name in args.model:
        decoder = make_decoder(name)
        implementations = decoder.implementations
        for rows in args.rows:
            context = make_context(decoder, rows, args.keys)
            together = time_us(decoder, context)
            decoder.implementations = ()
            apart = time_us(decoder, context)
            decoder.implementations = implementations
            print(f"{name} {rows:>3} rows x {args.keys} keys: {together:.2f} us, unfused {apart:.2f}", flush=True)
            del context


if __name__ == "__main__":
    main()
