"""WeightSource: the tensors of a checkpoint, in the order that is cheapest to read, none read before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint, not read yet. `nn/quant.py` knows it as a `Piece`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]
    blocks: Callable[[], torch.Tensor] | None = None

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


class WeightSource(Protocol):
    def __iter__(self) -> Iterator[SourceTensor]: ...
