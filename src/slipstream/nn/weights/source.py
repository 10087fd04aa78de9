"""WeightSource: the tensors of a checkpoint, in the order that is cheapest to read; each is read when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.base.errors import BadCheckpoint

PART = 2**24  # elements


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint that has not been read; a `CheckpointTensor` of `nn/weight_format.py`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]
    blocks: Callable[[], torch.Tensor] | None = None
    make: Callable[[torch.Tensor], None] | None = None  # generates the values in place of `read`

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    def write_to(self, target: torch.Tensor) -> None:
        """Copies in parts. A part of another dtype is moved to the device of the target and converted there. Raises for
        integers in place of floating-point numbers: a packed weight would be taken for its values."""
        if self.make is not None:
            self.make(target)
            return
        stored = self.read()
        if target.is_floating_point() and not stored.is_floating_point():
            raise BadCheckpoint(
                f"{self.name} has numbers of type {self.kind} and should have floating-point ones; if the checkpoint "
                "is quantised, its config.json lacks quantization_config"
            )
        for own, part in zip(in_parts(target), in_parts(stored), strict=True):
            own.copy_(part)


def in_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Splits along the first dimension into parts of about PART elements."""
    return tensor.split(max(1, PART // max(1, tensor[:1].numel()))) if tensor.dim() else (tensor,)


class WeightSource(Protocol):
    def __iter__(self) -> Iterator[SourceTensor]: ...
