"""The model of a drafter, by its method: what it looks like, how much memory it takes, and how its weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from slipstream.base.errors import BadCheckpoint, InvalidOption, NotEnoughMemory
from slipstream.checkpoint.model_info import ModelInfo, family_name
from slipstream.config.config import DraftModelConfig, ModelConfig
from slipstream.nn.decoder import Decoder, DecoderShape
from slipstream.nn.drafters.dflash import DFlashModel, DFlashShape, dflash_rules, dflash_shape
from slipstream.nn.drafters.draft_head import MTP, AttachedModel, HeadRules, MtpHead
from slipstream.nn.drafters.eagle import (
    Eagle3Head,
    Eagle3Shape,
    EagleHead,
    EagleShape,
    eagle3_rules,
    eagle3_shape,
    eagle_rules,
    eagle_shape,
)
from slipstream.nn.load import choose_formats, open_model, open_stored, weight_bytes
from slipstream.nn.registry import find_rules, find_shape
from slipstream.nn.shapes import AttentionShape, Shard
from slipstream.nn.sharding import shard_shape
from slipstream.nn.weights.load import fill_targets, find_targets, match_targets
from slipstream.nn.weights.source import DummySource, Rules, WeightSource, open_folder
from slipstream.nn.weights.stacked import UnstackedSource
from slipstream.nn.weights.weight_format import FormatOf


def local_draft_shape(model: ModelConfig, shape: DecoderShape) -> DecoderShape:
    """The part of a drafter's shape that one rank has. Raises InvalidOption for sizes that cannot be divided."""
    if model.num_ranks == 1:
        return shape
    return shard_shape(shape, Shard(model.rank, model.num_ranks), by_expert=model.by_expert)


def mtp_shape(info: ModelInfo) -> DecoderShape:
    """A decoder of the MTP layer alone. Raises InvalidOption if the model has none."""
    shape, family = find_shape(info), MTP.get(family_name(info.architecture))
    if family is None or not isinstance(shape, DecoderShape):
        raise InvalidOption(
            f"{info.architecture} has no MTP layer that runs here; drafts by mtp are for {', '.join(MTP)}: choose "
            "another method"
        )
    if not info.extra.get(family.count, 1):
        raise InvalidOption(
            f"{family.count} of config.json is 0: the checkpoint has no MTP layer; choose another method"
        )
    with_attention = (layer for layer in reversed(shape.layers) if isinstance(layer.mixers[0], AttentionShape))
    return replace(shape, layers=(next(with_attention),))


def check_mtp_tensors(model: ModelConfig) -> None:
    """Raises BadCheckpoint if the checkpoint has no tensor of the MTP layer that its config.json describes."""
    family = MTP[family_name(model.info.architecture)]
    root = family.root(model.info.num_layers)
    if not any(tensor.name.startswith(root) for tensor in open_folder(Path(model.path))):
        raise BadCheckpoint(
            f"{model.name} has no tensor of its MTP layer ({root}*), which quantised checkpoints often leave out; "
            "choose another method, or a checkpoint that has it"
        )


def eagle3_shape_of(model: ModelConfig, target: DecoderShape) -> Eagle3Shape:
    """The shape of an EAGLE-3 head, by its config and by which tensors it has. Raises InvalidOption if it cannot draft
    for the target, BadCheckpoint if it has a tensor that no such head has."""
    try:
        return eagle3_shape(model.info, target, _stored_names(model))
    except KeyError as name:
        raise BadCheckpoint(f"{model.path} has a tensor {name}, which no EAGLE-3 head has; give another head") from None


def eagle_shape_of(model: ModelConfig, target: DecoderShape) -> EagleShape:
    """The same for an EAGLE head of version 1 or 2."""
    try:
        return eagle_shape(model.info, target, _stored_names(model))
    except KeyError as name:
        raise BadCheckpoint(f"{model.path} has a tensor {name}, which no EAGLE head has; give another head") from None


def dflash_shape_of(model: ModelConfig, target: DecoderShape) -> DFlashShape:
    """The same for a DFlash drafter."""
    try:
        return dflash_shape(model.info, target, _stored_names(model))
    except KeyError as name:
        raise BadCheckpoint(
            f"{model.path} has a tensor {name}, which no DFlash drafter has; give another drafter"
        ) from None


def _stored_names(model: ModelConfig) -> list[str] | None:
    """The names of a head's tensors; None: they are random."""
    return None if model.load_format == "dummy" else [tensor.name for tensor in open_stored(model)]


def lay_out_attached(config: DraftModelConfig, target: DecoderShape, device: torch.device) -> AttachedModel:
    """The drafter's model with every tensor's shape and dtype, and no memory yet."""
    model = config.model
    num_positions, dtype = model.max_model_len, getattr(torch, model.dtype)
    if config.method == "eagle3":
        eagle3 = eagle3_shape_of(model, target)
        eagle3 = replace(eagle3, decoder=local_draft_shape(model, eagle3.decoder))
        return Eagle3Head(eagle3, num_positions, dtype, _formats(config, eagle3.decoder, device))
    if config.method == "eagle":
        eagle = eagle_shape_of(model, target)
        eagle = replace(eagle, decoder=local_draft_shape(model, eagle.decoder))
        return EagleHead(eagle, num_positions, dtype, _formats(config, eagle.decoder, device))
    if config.method == "dflash":
        dflash = dflash_shape_of(model, target)
        dflash = replace(dflash, decoder=local_draft_shape(model, dflash.decoder))
        return DFlashModel(dflash, num_positions, dtype, _formats(config, dflash.decoder, device))
    family = MTP[family_name(model.info.architecture)]
    shape = local_draft_shape(model, mtp_shape(model.info))
    return MtpHead(shape, num_positions, dtype, _formats(config, shape, device), feeds_normed=family.feeds_normed)


def _formats(config: DraftModelConfig, shape: DecoderShape, device: torch.device) -> FormatOf:
    return choose_formats(config.model, device, is_encoder=False, stored=lambda: _source(config, shape))


def draft_weight_bytes(config: DraftModelConfig, info: ModelInfo, device_kind: str) -> int:
    """Bytes of the weights of a drafter. `info`: of the engine's model."""
    if not config.reads_hidden:
        return weight_bytes(config.model, device_kind)
    target = find_shape(info)
    assert isinstance(target, DecoderShape)
    model = lay_out_attached(config, target, torch.device(device_kind))
    return sum(tensor.numel() * tensor.element_size() for tensor in chain(model.parameters(), model.buffers()))


def open_draft(
    config: DraftModelConfig, target: Decoder, device: torch.device
) -> tuple[Decoder | AttachedModel, Callable[[bool], None]]:
    """The model of the drafter with allocated, unfilled weights, and a function that reads them and takes whether to
    show progress."""
    if not config.reads_hidden:
        model, fill = open_model(config.model, device)
        assert isinstance(model, Decoder), "a model that drafts is a decoder"
        return model, fill
    attached = lay_out_attached(config, target.shape, device)
    targets = find_targets(attached)
    if config.model.load_format == "dummy":
        tensors, _ = match_targets(DummySource(targets, config.model.seed, device), None, targets)
    else:
        tensors, _ = match_targets(*_source(config, attached.shape), targets)
    try:
        attached.materialize(device)
    except (MemoryError, RuntimeError) as error:
        raise NotEnoughMemory(f"the drafter does not fit the memory of {device}; remove speculative_config") from error
    attached.attach(target)
    if config.taps:
        target.tap(config.taps)
    return attached, lambda progress: fill_targets(tensors, targets, progress)


def _source(config: DraftModelConfig, shape: DecoderShape) -> tuple[WeightSource, Rules]:
    info, source = config.model.info, open_stored(config.model)
    if config.method == "eagle3":
        return source, eagle3_rules()
    if config.method == "eagle":
        return source, eagle_rules()
    if config.method == "dflash":
        return source, dflash_rules()
    source, family = UnstackedSource(source, shape.transposed_experts), MTP[family_name(info.architecture)]
    return source, HeadRules(family.root(info.num_layers), family.layer, family.names, find_rules(info, shape))
