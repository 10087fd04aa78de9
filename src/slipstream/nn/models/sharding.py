"""The part of a model's shape that one of several ranks has (tensor parallelism); refuses what is not sharded yet.

Attention is divided by query heads, with the keys and values that these heads read: a key head is on several ranks
where there are fewer than ranks. MLPs are divided by their inner size. Embedding, norms and the projection to tokens
are whole on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.config.model_info import ModelInfo
from slipstream.errors import InvalidOption, UnsupportedModel
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.models.registry import find_shape
from slipstream.nn.shapes import AttentionShape, LayerShape, MixerShape, MlpShape, Shard


def find_local_shape(info: ModelInfo, rank: int, num_ranks: int) -> DecoderShape | EncoderShape:
    """The shape of what one rank has; of the whole model where there is one rank."""
    shape = find_shape(info)
    if num_ranks == 1:
        return shape
    shard = Shard(rank, num_ranks)
    if info.backend_folder:
        raise _unsupported("modules of the transformers library", shard)
    return shard_shape(shape, shard)


def shard_shape(shape: DecoderShape | EncoderShape, shard: Shard) -> DecoderShape:
    """Raises UnsupportedModel for parts that are not sharded, InvalidOption for sizes that cannot be divided."""
    if isinstance(shape, EncoderShape) or not shape.causal:
        raise _unsupported("encoders", shard)
    if shape.layer_inputs is not None:
        raise _unsupported("inputs per layer (Gemma 3n, Gemma 4)", shard)
    return replace(shape, layers=tuple(_layer(layer, shard) for layer in shape.layers))


def _layer(layer: LayerShape, shard: Shard) -> LayerShape:
    if layer.altup is not None:
        raise _unsupported("several streams of hidden states (Gemma 3n)", shard)
    mixers = tuple(_mixer(mixer, shard) for mixer in layer.mixers)
    feed = layer.feed
    if feed is not None and not isinstance(feed, MlpShape):
        raise _unsupported("experts", shard)
    return replace(layer, mixers=mixers, feed=None if feed is None else _mlp(feed, shard))


def _mixer(mixer: MixerShape, shard: Shard) -> AttentionShape:
    if not isinstance(mixer, AttentionShape):
        raise _unsupported("recurrent mixers (delta nets, state spaces, convolutions)", shard)
    for is_there, what in (
        (mixer.latent is not None, "latents of attention (MLA)"),
        (mixer.gated, "gates of attention"),
        (mixer.fused or mixer.by_head, "checkpoints with q, k and v in one tensor"),
        (mixer.rotary_pairs > 0, "checkpoints that rotate neighbouring elements"),
        (mixer.qk_norm not in ("none", "heads"), "norms over the queries of all heads"),
        (mixer.sinks, "attention sinks"),
        (mixer.kv_source is not None, "layers that share keys and values"),
    ):
        if is_there:
            raise _unsupported(what, shard)
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    if heads % shard.size:
        raise _indivisible(f"{heads} attention heads", shard)
    if kv_heads % shard.size and shard.size % kv_heads:
        raise _indivisible(f"{kv_heads} key heads, which are neither a multiple nor a divisor of it", shard)
    return replace(
        mixer,
        num_heads=heads // shard.size,
        num_kv_heads=max(kv_heads // shard.size, 1),
        num_kv_heads_of_all=kv_heads,
        shard=shard,
    )


def _mlp(feed: MlpShape, shard: Shard) -> MlpShape:
    if feed.fused or feed.up_first:
        raise _unsupported("checkpoints with gate and up in one tensor", shard)
    if feed.sparsity:
        raise _unsupported("sparse gates (Gemma 3n)", shard)
    if feed.size % shard.size:
        raise _indivisible(f"an MLP of size {feed.size}", shard)
    return replace(feed, size=feed.size // shard.size, shard=shard)


def _unsupported(what: str, shard: Shard) -> UnsupportedModel:
    return UnsupportedModel(
        f"tensor_parallel_size is {shard.size}, and {what} are not divided among ranks yet; use 1, and "
        "data_parallel_size for several whole copies"
    )


def _indivisible(what: str, shard: Shard) -> InvalidOption:
    return InvalidOption(
        f"tensor_parallel_size is {shard.size}, and the model has {what}; give a number that divides it"
    )
