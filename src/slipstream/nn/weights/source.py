"""WeightSource: the tensors of a checkpoint, in the order that is cheapest to read, none read before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

PART = 2**24  # numbers


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint, not read yet. `nn/weight_format.py` knows it as a `CheckpointTensor`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]
    blocks: Callable[[], torch.Tensor] | None = None
    make: Callable[[torch.Tensor], None] | None = None  # writes it, part by part, where nothing is to be read

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    def write_to(self, target: torch.Tensor) -> None:
        """Part by part: what is not of the target's dtype is brought to its device before it is changed."""
        if self.make is not None:
            self.make(target)
            return
        for own, part in zip(in_parts(target), in_parts(self.read()), strict=True):
            own.copy_(part)


def in_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Some of its lines at a time."""
    return tensor.split(max(1, PART // max(1, tensor[:1].numel()))) if tensor.dim() else (tensor,)


class WeightSource(Protocol):
    def __iter__(self) -> Iterator[SourceTensor]: ...
