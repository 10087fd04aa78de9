"""Splits stacked expert tensors: a checkpoint that stores all experts in one tensor appears as one tensor per expert.

Hub checkpoints have `experts.3.gate_proj.weight`; transformers 5 can also save `experts.gate_up_proj`
[experts, 2 * size, hidden], or `experts.up_proj` [experts, size, hidden] if they have no gates, and `experts.down_proj`
[experts, hidden, size]. gpt-oss stores the transposed matrices, [experts, hidden, 2 * size] with gate and up
interleaved, and stacks the biases too (`experts.gate_up_proj_bias`). Its MXFP4 tensors are not transposed:
`experts.gate_up_proj_blocks` [experts, 2 * size, blocks, 16] and `experts.gate_up_proj_scales`
[experts, 2 * size, blocks], with rows of gate and up interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from slipstream.nn.weights.source import SourceTensor, WeightSource

_GATE_UP, _UP, _DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"
_PARTS = {_GATE_UP: ("gate", "up"), _UP: ("up",), _DOWN: ("down",)}
# of Granite: the same tensors under other names
_GRANITE = {".block_sparse_moe.input_linear.weight": _GATE_UP, ".block_sparse_moe.output_linear.weight": _DOWN}
_BIAS = "_bias"
_MXFP4 = {"_blocks": 4, "_scales": 3}  # dimensions by suffix


class UnstackedSource:
    def __init__(self, source: WeightSource, transposed: bool = False) -> None:
        """`transposed`: the layout of gpt-oss."""
        self.source, self.transposed = source, transposed
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
            elif self.transposed and len(tensor.shape) == 3 - is_bias:
                yield from _transposed_experts(tensor, is_bias, self._loaded)
            elif len(tensor.shape) == 3 and not is_bias:
                yield from _experts(tensor, self._loaded)
            else:
                yield tensor


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


def _transposed_experts(tensor: SourceTensor, is_bias: bool, loaded: list[_Stack]) -> Iterator[SourceTensor]:
    root, _, last = tensor.name.rpartition(".")
    names = _PARTS[f".experts.{last.removesuffix(_BIAS)}"]
    num_experts, *inputs, num_rows = tensor.shape
    kind = "bias" if is_bias else "weight"
    stack = _Stack(tensor, num_experts * len(names), loaded)
    for expert in range(num_experts):
        for part, name in enumerate(names):
            read = _Interleaved(stack, expert, part, len(names))
            shape = (num_rows // len(names), *inputs)
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
class _Interleaved:
    """Every `step`th column of a transposed matrix, as rows; or every `step`th number of a bias."""

    stack: _Stack
    expert: int
    first: int
    step: int

    def __call__(self) -> torch.Tensor:
        return self._select(self.stack.take()[self.expert])

    def write_to(self, target: torch.Tensor) -> None:
        """The whole matrix of the expert goes to the target's device and is transposed there."""
        target.copy_(self._select(self.stack.take()[self.expert].to(target.device)))

    def _select(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[..., self.first :: self.step].t()
