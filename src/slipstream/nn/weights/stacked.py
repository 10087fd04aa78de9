"""Experts that a checkpoint stores as one stacked tensor, as if each expert had tensors of its own.

Hub checkpoints have `experts.3.gate_proj.weight`; transformers 5 can also save `experts.gate_up_proj`
[experts, 2 * size, hidden] and `experts.down_proj` [experts, hidden, size].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from slipstream.nn.weights.source import SourceTensor, WeightSource

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class UnstackedSource:
    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def __iter__(self) -> Iterator[SourceTensor]:
        for tensor in self.source:
            if len(tensor.shape) == 3 and tensor.name.endswith((_GATE_UP, _DOWN)):
                yield from _experts(tensor)
            else:
                yield tensor


def _experts(tensor: SourceTensor) -> Iterator[SourceTensor]:
    root, _, _ = tensor.name.rpartition(".")
    num_experts, num_rows, num_columns = tensor.shape
    names = ("gate", "up") if tensor.name.endswith(_GATE_UP) else ("down",)
    size = num_rows // len(names)
    stack = _Stack(tensor, num_experts * len(names))
    for expert in range(num_experts):
        for part, name in enumerate(names):
            read = _Part(stack, expert, part * size, size)
            yield SourceTensor(f"{root}.{expert}.{name}_proj.weight", (size, num_columns), tensor.kind, read)


class _Stack:
    """The stacked tensor, which is read once and dropped after its last part."""

    def __init__(self, tensor: SourceTensor, num_parts: int) -> None:
        self.tensor, self.num_left = tensor, num_parts
        self.data: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
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
