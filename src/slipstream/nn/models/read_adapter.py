"""Reads the tensors of a PEFT LoRA folder into a flat buffer of an AdapterLayout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.base.errors import BadCheckpoint, InvalidAdapter
from slipstream.checkpoint.locate import WEIGHTS, AdapterSettings, read_adapter_settings
from slipstream.device.sync_check import sync_allowed
from slipstream.nn.models.adapter_layout import EMBEDDING, HEAD, AdaptedLayer, AdapterLayout
from slipstream.nn.stored_part import sliced
from slipstream.nn.weights.load import few
from slipstream.nn.weights.rules import Rules
from slipstream.nn.weights.safetensors import open_file
from slipstream.nn.weights.source import SourceTensor

_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")
"""Weights of the base model, which PEFT saves beside an adapter of the embedding or of the projection to tokens."""
_EMBEDDED = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<matrix>[AB])(\.default)?")


@dataclass(slots=True)
class _Pair:
    """The matrices of one module of the base model."""

    module: str
    layer: AdaptedLayer
    part: str  # the checkpoint's tensor among those of a product
    is_embedding: bool
    a: SourceTensor | None = None  # [rank, inputs]; of an embedding [rank, tokens]
    b: SourceTensor | None = None  # [outputs, rank]


def read_adapter(folder: Path, layout: AdapterLayout, rules: Rules, buffer: torch.Tensor) -> bool:
    """Fills buffer [elements], which the caller may reuse. Returns whether the adapter changes the projection to
    tokens. Raises InvalidAdapter, which names the fact and the limit."""
    settings = read_adapter_settings(folder)
    try:
        source = open_file(folder / WEIGHTS[0].removesuffix(".safetensors"))
        if source is None:
            raise InvalidAdapter(f"{folder} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}; download the rest of it")
        pairs = _match(folder, list(source), layout, rules)
        buffer.zero_()
        for pair in pairs:
            _fill(folder, pair, settings, layout, buffer)
    except BadCheckpoint as error:
        raise InvalidAdapter(str(error)) from None
    return any(pair.layer.path == HEAD for pair in pairs)


def _match(folder: Path, tensors: list[SourceTensor], layout: AdapterLayout, rules: Rules) -> list[_Pair]:
    pairs: dict[str, _Pair] = {}
    unknown: list[str] = []
    for tensor in tensors:
        name = tensor.name.removeprefix(_PREFIX)
        if base := _BASE.fullmatch(name):
            _check_base(folder, tensor, base["module"], layout, rules)
            continue
        embedded = _EMBEDDED.fullmatch(name)
        found = embedded or _NAME.fullmatch(name)
        if found is None:
            if "lora_magnitude_vector" in name:
                raise InvalidAdapter(f"{folder}: DoRA is not supported ({tensor.name}); merge the adapter")
            raise InvalidAdapter(
                f"{folder}: {tensor.name} is not a LoRA matrix of a module; fully trained modules and biases are not "
                "supported, merge the adapter"
            )
        module = found["module"]
        if module not in pairs:
            found_layer = _find_layer(module, layout, rules, is_embedding=embedded is not None)
            if found_layer is None:
                unknown.append(module)
                continue
            pairs[module] = _Pair(module, *found_layer, is_embedding=embedded is not None)
        setattr(pairs[module], found["matrix"].lower(), tensor)
    if unknown:
        raise InvalidAdapter(
            f"{folder}: {len(set(unknown))} modules have adapters and cannot have any in this model "
            f"({few(sorted(set(unknown)))}); adapters change linear layers, the embedding and, of a model that "
            "generates, lm_head"
        )
    if not pairs:
        raise InvalidAdapter(f"{folder} has no LoRA matrices; download it again")
    for pair in pairs.values():
        _check(folder, pair, layout)
    return list(pairs.values())


def _check_base(folder: Path, tensor: SourceTensor, module: str, layout: AdapterLayout, rules: Rules) -> None:
    """Raises for weights that this model cannot have: those of a vocabulary that was resized, or of another layer."""
    head, embedding = (_find_layer(module, layout, rules, is_embedding=each) for each in (False, True))
    if head is not None and head[0].path == HEAD:
        own = (head[0].b_shape[0], head[0].a_shape[1])
    elif embedding is not None:
        own = (embedding[0].a_shape[0], embedding[0].b_shape[0])
    else:
        raise InvalidAdapter(f"{folder}: {tensor.name} is a weight of the base model; merge the adapter")
    if tensor.shape != own:
        raise InvalidAdapter(
            f"{folder}: {tensor.name} is {list(tensor.shape)}, and this model has {list(own)}; the vocabulary was "
            "resized for the adapter, merge it"
        )


def _find_layer(
    module: str, layout: AdapterLayout, rules: Rules, *, is_embedding: bool
) -> tuple[AdaptedLayer, str] | None:
    """The layer of a module of the base model, and the tensor of it; None if there is none."""
    if module.rpartition(".")[2] == "lm_head":
        return (layout.layers[HEAD], "") if HEAD in layout.layers and not is_embedding else None
    try:
        ours = rules.rename(f"{module}.weight")
    except KeyError:
        return None
    path = (ours or "").removesuffix(".weight")
    if is_embedding or path == EMBEDDING:
        return (layout.layers[EMBEDDING], "") if is_embedding and path == EMBEDDING else None
    for own, part in ((path, ""), path.rpartition(".")[::2]):
        layer = layout.layers.get(own)
        if layer is not None and layer.rows is not None and part in layer.rows.index:
            return layer, part
    return None


def _check(folder: Path, pair: _Pair, layout: AdapterLayout) -> None:
    a, b, layer = pair.a, pair.b, pair.layer
    if a is None or b is None:
        missing = "A" if a is None else "B"
        raise InvalidAdapter(f"{folder}: {pair.module} has no matrix {missing}; download the adapter again")
    num_outputs = layer.b_shape[0] if layer.rows is None else layer.rows.num_rows[pair.part]
    num_inputs = layer.a_shape[0] if pair.is_embedding else layer.a_shape[1]
    if layer.columns is not None:
        num_inputs = layer.columns.total
    rank = a.shape[0] if a.shape else 0
    if a.shape != (rank, num_inputs) or b.shape != (num_outputs, rank):
        raise InvalidAdapter(
            f"{folder}: the matrices of {pair.module} are {list(a.shape)} and {list(b.shape)}, and this model needs "
            f"[rank, {num_inputs}] and [{num_outputs}, rank]; the adapter is for another model"
        )
    if not 0 < rank <= layout.max_rank:
        raise InvalidAdapter(
            f"{folder}: {pair.module} has rank {rank}, and the engine takes up to {layout.max_rank}; raise "
            "max_lora_rank"
        )


def _fill(folder: Path, pair: _Pair, settings: AdapterSettings, layout: AdapterLayout, buffer: torch.Tensor) -> None:
    assert pair.a is not None and pair.b is not None
    layer, rank = pair.layer, pair.a.shape[0]
    a = _read_floats(folder, pair.a).to(buffer.dtype)
    wide = _read_floats(folder, pair.b).to(torch.promote_types(buffer.dtype, torch.float32))
    b = wide * settings.scale(pair.module, rank)
    b = b.to(buffer.dtype)
    with sync_allowed("the adapter lies in host memory"):
        is_finite = bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())
    if not is_finite:
        raise InvalidAdapter(
            f"{folder}: the matrices of {pair.module} have values that are not finite in {buffer.dtype}; use another "
            "dtype, or another adapter"
        )
    own_a, own_b = layer.a_of(buffer), layer.b_of(buffer)
    if pair.is_embedding:
        own_a[:, :rank] = a.T
        own_b[:, :rank] = b
    elif layer.rows is None:
        own_a[:rank] = a
        own_b[:, :rank] = b
    else:
        first = layer.rows.index[pair.part] * layout.padded_rank
        own_a[first : first + rank] = a if layer.columns is None else sliced(a, 1, layer.columns)
        layer.rows.fill(own_b[:, :rank], pair.part, b)


def _read_floats(folder: Path, tensor: SourceTensor) -> torch.Tensor:
    values = tensor.read()
    if not values.is_floating_point():
        raise InvalidAdapter(
            f"{folder}: {tensor.name} has numbers of type {tensor.kind}, and a LoRA matrix has floating-point ones; "
            "convert the adapter"
        )
    return values
