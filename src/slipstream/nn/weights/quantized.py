"""Tensors of quantised checkpoints: which weights of the model are quantised, and the shapes of their scales.

A weight is quantised if the checkpoint has its scales (or packed numbers), whatever the lists of modules in
quantization_config say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.quantization import Quantization
from slipstream.nn.quantized.layouts import ALSO_CALLED, NESTED, OPTIONAL, UNUSED, marker
from slipstream.nn.weights.rules import Rules
from slipstream.nn.weights.source import SourceTensor, WeightSource
from slipstream.nn.weights.unused import is_past_layers

_FP8 = ("F8_E4M3", "float8_e4m3fn")


class QuantizedSource:
    """A source without tensors that say nothing more, with scales in the shapes of `layouts.tensor_shapes`."""

    def __init__(self, source: WeightSource, quantization: Quantization) -> None:
        self.source, self.quantization = source, quantization

    def __iter__(self) -> Iterator[SourceTensor]:
        q = self.quantization
        for tensor in self.source if q.layout != "bnb" else map(_bitsandbytes, self.source):
            module, dot, kind = tensor.name.rpartition(".")
            if q.layout == "float8" and kind in ALSO_CALLED:
                kind = ALSO_CALLED[kind]
                tensor = replace(tensor, name=f"{module}{dot}{kind}")
            if kind in UNUSED or (kind == "input_scale" and not q.static_inputs):
                continue
            if kind in ("weight_scale", "input_scale", "weight_zero_point") and tensor.num_elements == 1:
                yield _reshaped(tensor, (1,) if kind == "input_scale" or not q.block_rows else (1, 1))
            elif kind in ("weight_scale", "weight_zero_point") and len(tensor.shape) == 1:
                yield _reshaped(tensor, (*tensor.shape, 1))
            else:
                yield tensor


def _reshaped(tensor: SourceTensor, shape: tuple[int, ...]) -> SourceTensor:
    def read() -> torch.Tensor:
        return tensor.read().reshape(shape)

    return replace(tensor, shape=shape, read=read)


def _bitsandbytes(tensor: SourceTensor) -> SourceTensor:
    """`q_proj.weight.absmax` becomes `q_proj.absmax`. `q_proj.weight.quant_state.bitsandbytes__nf4`, a JSON object,
    becomes `q_proj.quant_state`: the offset of the scales, after a check of what it says."""
    module, middle, kind = tensor.name.rpartition(".weight.")
    if not middle:
        return tensor
    if not kind.startswith("quant_state."):
        return replace(tensor, name=f"{module}.{kind}")

    def read() -> torch.Tensor:
        try:
            state = json.loads(tensor.read().numpy().tobytes())
            found = int(state["blocksize"]), int(state.get("nested_blocksize", NESTED))
            offset = float(state.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadCheckpoint(f"{tensor.name} is not a description of a weight ({error!r})") from None
        if found != (64, NESTED):
            raise BadCheckpoint(
                f"{tensor.name} has blocks of {found[0]} weights and {found[1]} scales; only 64 and 256 are supported"
            )
        return torch.tensor([offset], dtype=torch.float32)

    return replace(tensor, name=f"{module}.quant_state", shape=(1,), read=read)


class StoredWeight(NamedTuple):
    optional: frozenset[str]  # tensors of `layouts.OPTIONAL` that are there
    plain_parts: frozenset[str]  # parts that are not quantised, as a projection to gates beside those to heads


def find_quantized(
    source: WeightSource, rules: Rules, quantization: Quantization, num_layers: int | None = None
) -> dict[str, StoredWeight]:
    """The quantised weights by their names in the model. Raises BadCheckpoint for a quantised module without a rule,
    unless its layer is beyond the `num_layers` of the model."""
    plain: list[str] = []
    found: dict[str, set[str]] = {}
    is_float8: dict[str, str] = {}
    sign = marker(quantization)
    for tensor in source:
        module, _, kind = tensor.name.rpartition(".")
        if kind not in (sign, "weight", *OPTIONAL):
            continue
        try:
            target = rules.rename(tensor.name)
        except KeyError:
            if kind == sign and (num_layers is None or not is_past_layers(tensor.name, num_layers)):
                raise BadCheckpoint(
                    f"{tensor.name}: {module} is quantised, which is not supported for this module; give the "
                    "unquantised checkpoint or one that leaves it out"
                ) from None
            continue
        if target is None:
            continue
        part = target.rpartition(".")[0]
        if kind == "weight":
            plain.append(part)
            if tensor.kind in _FP8:
                is_float8[part] = tensor.name
            continue
        kinds = found.setdefault(part, set())
        kinds.add(kind)
    quantized = {part: kinds for part, kinds in found.items() if sign in kinds}
    missing = [name for part, name in is_float8.items() if part not in quantized]
    if missing:
        raise BadCheckpoint(f"{missing[0]} is FP8 and has no {sign}; download the model again")
    weights: dict[str, frozenset[str]] = {}
    for part, kinds in quantized.items():
        optional = frozenset(kinds & set(OPTIONAL))
        # the weight is this part, or has it as one of several; all experts of a layer have one weight
        names = [part, part.rpartition(".")[0]]
        if ".experts." in part:
            names.append(f"{part.rpartition('.experts.')[0]}.experts")
        for name in names:
            weights[name] = weights.get(name, frozenset()) | optional
    plain_parts: dict[str, set[str]] = {}
    for part in plain:
        weight, _, own = part.rpartition(".")
        if part not in quantized:
            plain_parts.setdefault(weight, set()).add(own)
    return {name: StoredWeight(kinds, frozenset(plain_parts.get(name, ()))) for name, kinds in weights.items()}
