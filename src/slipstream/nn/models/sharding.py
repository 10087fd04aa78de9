"""The part of a model's shape that one of several ranks has; refuses what is not sharded yet.

Tensor parallel: attention is divided by query heads, with the keys and values that these heads read; a key head is on
several ranks where there are fewer than ranks. MLPs and experts are divided by their inner size, or experts by their
number (expert parallel). Embedding, norms and the projection to tokens are whole on every rank. Engines that share
experts (data and expert parallel) have a part of the experts each, and all of the rest.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.config.model_info import ModelInfo
from slipstream.errors import InvalidOption, UnsupportedModel
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.models.registry import find_shape
from slipstream.nn.shapes import (
    AttentionShape,
    DeltaShape,
    DenseAndExpertsShape,
    ExpertShape,
    ExpertShard,
    FeedShape,
    LayerShape,
    MixerShape,
    MlpShape,
    Shard,
)


def find_local_shape(
    info: ModelInfo, rank: int, num_ranks: int, *, by_expert: bool = False, engine: int = 0, num_engines: int = 1
) -> DecoderShape | EncoderShape:
    """The shape of what one rank has; of the whole model where there is one rank. `by_expert`: ranks have whole
    experts; `engine`: of `num_engines` that share the experts."""
    shape = find_shape(info)
    if num_engines > 1:
        if info.backend_folder or isinstance(shape, EncoderShape):
            raise UnsupportedModel(
                f"enable_expert_parallel is set, and {info.architecture} is an encoder or runs by modules of the "
                "transformers library, whose experts are not divided among engines; leave it out"
            )
        return share_experts(shape, ExpertShard(engine, num_engines, "exchanged"))
    if num_ranks == 1:
        return shape
    shard = Shard(rank, num_ranks)
    if info.backend_folder:
        raise _unsupported("modules of the transformers library", shard)
    return shard_shape(shape, shard, by_expert=by_expert)


def share_experts(shape: DecoderShape, shard: ExpertShard) -> DecoderShape:
    """The shape with some of the experts. Raises InvalidOption if there are none, or if they cannot be divided."""
    layers = tuple(replace(layer, feed=_shared_feed(layer.feed, shard)) for layer in shape.layers)
    if layers == shape.layers:
        raise InvalidOption(
            "enable_expert_parallel is set, and the model has no experts; leave it out: data_parallel_size alone runs "
            "whole copies"
        )
    return replace(shape, layers=layers)


def _shared_feed(feed: FeedShape | None, shard: ExpertShard) -> FeedShape | None:
    if isinstance(feed, DenseAndExpertsShape):
        return replace(feed, experts=_experts(feed.experts, shard))
    return _experts(feed, shard) if isinstance(feed, ExpertShape) else feed


def _experts(feed: ExpertShape, shard: ExpertShard) -> ExpertShape:
    option = "data_parallel_size" if shard.kind == "exchanged" else "tensor_parallel_size"
    count, what = (
        (feed.size, f"experts of size {feed.size}")
        if shard.kind == "inner"
        else (feed.num_experts, f"{feed.num_experts} experts")
    )
    if count % shard.size:
        raise InvalidOption(f"{option} is {shard.size}, and the model has {what}; give a number that divides it")
    return replace(feed, shard=shard)


def shard_shape(shape: DecoderShape | EncoderShape, shard: Shard, *, by_expert: bool = False) -> DecoderShape:
    """Raises UnsupportedModel for parts that are not sharded, InvalidOption for sizes that cannot be divided."""
    if isinstance(shape, EncoderShape) or not shape.causal:
        raise _unsupported("encoders", shard)
    if shape.layer_inputs is not None:
        raise _unsupported("inputs per layer (Gemma 3n, Gemma 4)", shard)
    return replace(shape, layers=tuple(_layer(layer, shard, by_expert) for layer in shape.layers))


def _layer(layer: LayerShape, shard: Shard, by_expert: bool) -> LayerShape:
    if layer.altup is not None:
        raise _unsupported("several streams of hidden states (Gemma 3n)", shard)
    mixers = tuple(_mixer(mixer, shard) for mixer in layer.mixers)
    feed = layer.feed
    if isinstance(feed, ExpertShape):
        experts = _experts(feed, ExpertShard(shard.rank, shard.size, "experts" if by_expert else "inner"))
        feed = replace(experts, shared=None if feed.shared is None else _mlp(feed.shared, shard))
    elif isinstance(feed, MlpShape):
        feed = _mlp(feed, shard)
    elif feed is not None:
        raise _unsupported("an MLP beside experts (Gemma 4)", shard)
    return replace(layer, mixers=mixers, feed=feed)


def _mixer(mixer: MixerShape, shard: Shard) -> MixerShape:
    if isinstance(mixer, DeltaShape):
        if mixer.num_key_heads % shard.size:
            raise _indivisible(f"{mixer.num_key_heads} key heads of delta nets", shard)
        keys, values = mixer.num_key_heads // shard.size, mixer.num_value_heads // shard.size
        return replace(mixer, num_key_heads=keys, num_value_heads=values, shard=shard)
    if not isinstance(mixer, AttentionShape):
        raise _unsupported("recurrent mixers other than delta nets", shard)
    for is_there, what in (
        (mixer.qk_norm not in ("none", "heads"), "norms over the queries of all heads"),
        (mixer.kv_source is not None, "layers that share keys and values"),
    ):
        if is_there:
            raise _unsupported(what, shard)
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    if heads % shard.size:
        raise _indivisible(f"{heads} attention heads", shard)
    if mixer.latent is not None:  # one key head, which all query heads read
        return replace(mixer, num_heads=heads // shard.size, shard=shard)
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
