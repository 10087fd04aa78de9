"""Splits stacked expert tensors: a checkpoint that stores all experts in one tensor appears as one tensor per expert.

Hub checkpoints have `experts.3.gate_proj.weight`; transformers 5 can also save `experts.gate_up_proj`
[experts, 2 * size, hidden], or `experts.up_proj` [experts, size, hidden] if they have no gates, and `experts.down_proj`
[experts, hidden, size]. Qwen3-VL's are [experts, hidden, 2 * size], gate before up, and [experts, size, hidden] in the
checkpoints of the hub, and as above where transformers saved them. gpt-oss stores the transposed matrices,
[experts, hidden, 2 * size] with gate and up interleaved, and stacks the biases too (`experts.gate_up_proj_bias`). Its
MXFP4 tensors are not transposed: `experts.gate_up_proj_blocks` [experts, 2 * size, blocks, 16] and
`experts.gate_up_proj_scales` [experts, 2 * size, blocks], with rows of gate and up interleaved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.quantization import Quantization
from slipstream.nn.weights.quantized_layouts import ALSO_CALLED, NESTED, OPTIONAL, UNUSED, marker
from slipstream.nn.weights.source import Rules, SourceTensor, WeightSource, is_past_layers

_GATE_UP, _UP, _DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"
_PARTS = {_GATE_UP: ("gate", "up"), _UP: ("up",), _DOWN: ("down",)}
# of Granite: the same tensors under other names
_GRANITE = {".block_sparse_moe.input_linear.weight": _GATE_UP, ".block_sparse_moe.output_linear.weight": _DOWN}
_BIAS = "_bias"
Transposed = Literal["no", "interleaved", "halves"]
_MXFP4 = {"_blocks": 4, "_scales": 3}  # dimensions by suffix


class UnstackedSource:
    def __init__(self, source: WeightSource, transposed: Transposed = "no", hidden_size: int = 0) -> None:
        """`transposed`: how gate and up lie in transposed matrices; in halves only where the shape says so."""
        self.source, self.transposed, self.hidden_size = source, transposed, hidden_size
        self._loaded: list[_Stack] = []

    def __iter__(self) -> Iterator[SourceTensor]:
        for tensor in map(_renamed, self.source):
            suffix = next((suffix for suffix in _MXFP4 if tensor.name.endswith(suffix)), "")
            is_packed = bool(suffix) and tensor.name.removesuffix(suffix).endswith(tuple(_PARTS))
            if is_packed and len(tensor.shape) == _MXFP4[suffix]:
                yield from _packed_experts(tensor, suffix, self._loaded)
                continue
            is_bias = tensor.name.endswith(_BIAS)
            if not tensor.name.removesuffix(_BIAS).endswith(tuple(_PARTS)):
                yield tensor
            elif self._is_transposed(tensor, is_bias):
                yield from _transposed_experts(tensor, is_bias, self.transposed == "interleaved", self._loaded)
            elif len(tensor.shape) == 3 and not is_bias:
                yield from _experts(tensor, self._loaded)
            else:
                yield tensor

    def _is_transposed(self, tensor: SourceTensor, is_bias: bool) -> bool:
        if self.transposed == "no" or len(tensor.shape) != 3 - is_bias:
            return False
        is_down = tensor.name.endswith(_DOWN)
        return self.transposed == "interleaved" or tensor.shape[2 if is_down else 1] == self.hidden_size


def _renamed(tensor: SourceTensor) -> SourceTensor:
    for stored, own in _GRANITE.items():
        if tensor.name.endswith(stored):
            name = f"{tensor.name.removesuffix(stored)}.block_sparse_moe{own}"
            return replace(tensor, name=name)
    return tensor


def _packed_experts(tensor: SourceTensor, suffix: str, loaded: list[_Stack]) -> Iterator[SourceTensor]:
    root, _, last = tensor.name.rpartition(".")
    names = _PARTS[f".experts.{last.removesuffix(suffix)}"]
    num_experts, num_rows, *rest = tensor.shape
    stack = _Stack(tensor, num_experts * len(names), loaded)
    for expert in range(num_experts):
        for part, name in enumerate(names):
            read = _EveryRow(stack, expert, part, len(names))
            kind, shape = suffix.removeprefix("_"), (num_rows // len(names), *rest)
            yield SourceTensor(f"{root}.{expert}.{name}_proj.{kind}", shape, tensor.kind, read)


def _transposed_experts(
    tensor: SourceTensor, is_bias: bool, is_interleaved: bool, loaded: list[_Stack]
) -> Iterator[SourceTensor]:
    root, _, last = tensor.name.rpartition(".")
    names = _PARTS[f".experts.{last.removesuffix(_BIAS)}"]
    num_experts, *inputs, num_rows = tensor.shape
    kind = "bias" if is_bias else "weight"
    stack = _Stack(tensor, num_experts * len(names), loaded)
    for expert in range(num_experts):
        for part, name in enumerate(names):
            size = num_rows // len(names)
            columns = slice(part, None, len(names)) if is_interleaved else slice(part * size, (part + 1) * size)
            read = _Columns(stack, expert, columns)
            shape = (size, *inputs)
            yield SourceTensor(f"{root}.{expert}.{name}_proj.{kind}", shape, tensor.kind, read, make=read.write_to)


def _experts(tensor: SourceTensor, loaded: list[_Stack]) -> Iterator[SourceTensor]:
    root, _, last = tensor.name.rpartition(".")
    num_experts, num_rows, num_columns = tensor.shape
    names = _PARTS[f".experts.{last}"]
    size = num_rows // len(names)
    stack = _Stack(tensor, num_experts * len(names), loaded)
    for expert in range(num_experts):
        for part, name in enumerate(names):
            read = _Part(stack, expert, part * size, size)
            yield SourceTensor(f"{root}.{expert}.{name}_proj.weight", (size, num_columns), tensor.kind, read)


class _Stack:
    """A stacked tensor: read once, dropped after its last part was taken, or when the next one is read: parts of other
    ranks are not taken."""

    def __init__(self, tensor: SourceTensor, num_parts: int, loaded: list[_Stack]) -> None:
        """`loaded`: the stack of this source that was read last."""
        self.tensor, self.num_left = tensor, num_parts
        self.data: torch.Tensor | None = None
        self._loaded = loaded

    def take(self) -> torch.Tensor:
        if self.data is None:
            for other in self._loaded:
                other.data = None
            self._loaded[:] = [self]
        data = self.tensor.read() if self.data is None else self.data
        self.num_left -= 1
        self.data = data if self.num_left > 0 else None
        return data


@dataclass(frozen=True, slots=True)
class _Part:
    stack: _Stack
    expert: int
    first: int
    size: int

    def __call__(self) -> torch.Tensor:
        return self.stack.take()[self.expert, self.first : self.first + self.size]


@dataclass(frozen=True, slots=True)
class _EveryRow:
    """Every `step`th row of an expert."""

    stack: _Stack
    expert: int
    first: int
    step: int

    def __call__(self) -> torch.Tensor:
        return self.stack.take()[self.expert, self.first :: self.step]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Some columns of a transposed matrix, as rows; or some numbers of a bias."""

    stack: _Stack
    expert: int
    columns: slice

    def __call__(self) -> torch.Tensor:
        return self._select(self.stack.take()[self.expert])

    def write_to(self, target: torch.Tensor) -> None:
        """The whole matrix of the expert goes to the target's device and is transposed there."""
        target.copy_(self._select(self.stack.take()[self.expert].to(target.device)))

    def _select(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[..., self.columns].t()


# Tensors of quantised checkpoints: which weights of the model are quantised, and the shapes of their scales.
#
# A weight is quantised if the checkpoint has its scales (or packed numbers), whatever the lists of modules in
# quantization_config say.

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
