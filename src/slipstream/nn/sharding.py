"""The part of a model's shape that one of several ranks has; refuses what is not sharded yet.

Tensor parallel: attention is divided by query heads, with the keys and values that these heads read; a key head is on
several ranks where there are fewer than ranks. Recurrent mixers are divided by heads or channels, MLPs and experts by
their inner size, or experts by their number (expert parallel), the vocabulary by tokens. Norms and routers are whole on
every rank. Engines that share experts (data and expert parallel) have a part of the experts each, and all of the rest.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import InvalidOption, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.encoder import EncoderShape
from slipstream.nn.registry import find_shape
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
from slipstream.nn.ssm_shapes import Mamba1Shape, Mamba2Shape, ShortConvShape


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
    if shape.vocab_size < shard.size**2:  # every rank has some tokens of parts that are rounded up
        raise _indivisible(f"{shape.vocab_size} tokens, too few for so many ranks", shard)
    layer_inputs = None if shape.layer_inputs is None else replace(shape.layer_inputs, shard=shard)
    layers = tuple(_layer(layer, shard, by_expert) for layer in shape.layers)
    return replace(shape, layers=layers, layer_inputs=layer_inputs, shard=shard)


def _layer(layer: LayerShape, shard: Shard, by_expert: bool) -> LayerShape:
    mixers = tuple(_mixer(mixer, shard) for mixer in layer.mixers)
    feed = layer.feed
    if isinstance(feed, DenseAndExpertsShape):
        experts = _divided_experts(feed.experts, shard, by_expert)
        return replace(layer, mixers=mixers, feed=replace(feed, mlp=_mlp(feed.mlp, shard), experts=experts))
    if isinstance(feed, ExpertShape):
        return replace(layer, mixers=mixers, feed=_divided_experts(feed, shard, by_expert))
    return replace(layer, mixers=mixers, feed=None if feed is None else _mlp(feed, shard))


def _divided_experts(feed: ExpertShape, shard: Shard, by_expert: bool) -> ExpertShape:
    experts = _experts(feed, ExpertShard(shard.rank, shard.size, "experts" if by_expert else "inner"))
    return replace(experts, shared=None if feed.shared is None else _mlp(feed.shared, shard))


def _mixer(mixer: MixerShape, shard: Shard) -> MixerShape:
    if isinstance(mixer, AttentionShape):
        return _attention(mixer, shard)
    if isinstance(mixer, DeltaShape):
        keys = _share(mixer.num_key_heads, "key heads of delta nets", shard)
        return replace(mixer, num_key_heads=keys, num_value_heads=mixer.num_value_heads // shard.size, shard=shard)
    if isinstance(mixer, Mamba2Shape):
        return _mamba2(mixer, shard)
    if isinstance(mixer, Mamba1Shape | ShortConvShape):
        return replace(mixer, size=_share(mixer.size, f"channels of {mixer.name}", shard), shard=shard)
    raise _unsupported(f"mixers of kind {type(mixer).__name__}", shard)


def _attention(mixer: AttentionShape, shard: Shard) -> AttentionShape:
    heads, kv_heads = _share(mixer.num_heads, "attention heads", shard), mixer.num_kv_heads
    if mixer.latent is not None:  # one key head, which all query heads read
        return replace(mixer, num_heads=heads, shard=shard)
    own_kv_heads = _share_or_copy(kv_heads, "key heads", shard)
    return replace(mixer, num_heads=heads, num_kv_heads=own_kv_heads, num_kv_heads_of_all=kv_heads, shard=shard)


def _mamba2(mixer: Mamba2Shape, shard: Shard) -> Mamba2Shape:
    """Heads are divided. A group of b and c is on several ranks where there are fewer groups than ranks."""
    groups, norm_groups = mixer.num_groups, mixer.norm_groups
    _share_or_copy(norm_groups, "groups of the norm of Mamba-2", shard)
    is_wide = mixer.norm != "none" and norm_groups % shard.size != 0
    return replace(
        mixer,
        num_heads=_share(mixer.num_heads, "heads of Mamba-2", shard),
        num_groups=_share_or_copy(groups, "groups of Mamba-2", shard),
        num_groups_of_all=groups,
        norm_groups=max(norm_groups // shard.size, 1),
        num_wide_norm_groups=norm_groups if is_wide else 0,
        shard=shard,
    )


def _mlp(feed: MlpShape, shard: Shard) -> MlpShape:
    if feed.size % shard.size:
        raise _indivisible(f"an MLP of size {feed.size}", shard)
    return replace(feed, size=feed.size // shard.size, shard=shard)


def _share(count: int, what: str, shard: Shard) -> int:
    """The part of one rank."""
    if count % shard.size:
        raise _indivisible(f"{count} {what}", shard)
    return count // shard.size


def _share_or_copy(count: int, what: str, shard: Shard) -> int:
    """The part of one rank, where several ranks may have the same one."""
    if count % shard.size and shard.size % count:
        raise _indivisible(f"{count} {what}, which are neither a multiple nor a divisor of it", shard)
    return max(count // shard.size, 1)


def _unsupported(what: str, shard: Shard) -> UnsupportedModel:
    return UnsupportedModel(
        f"tensor_parallel_size is {shard.size}, and {what} are not divided among ranks yet; use 1, and "
        "data_parallel_size for several whole copies"
    )


def _indivisible(what: str, shard: Shard) -> InvalidOption:
    return InvalidOption(
        f"tensor_parallel_size is {shard.size}, and the model has {what}; give a number that divides it"
    )
