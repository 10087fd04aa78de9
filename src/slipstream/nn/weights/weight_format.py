"""WeightFormat: how a weight is stored.

`Linear` and `Embedding` hold a `Weight` and do not depend on its format. A model may mix formats: `FormatOf` gives one
per weight, by name. A new format is a `WeightFormat` whose `Weight` names the checkpoint tensors it needs (`targets`):
`Unquantized` is here, `nn/weights/kinds.py` keeps the packed blocks of GGUF files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from slipstream.ops.gemm.table import Matrix


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint that has not been read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """The type in the file's words: F32, BF16, Q4_1 ..."""

    def read(self) -> torch.Tensor:
        """The values, in the checkpoint's dtype and memory; read-only."""

    def write_to(self, target: torch.Tensor) -> None:
        """Copies the values into a tensor of the same shape, with little extra memory."""

    @property
    def blocks(self) -> Callable[[], torch.Tensor] | None:
        """Reads the packed bytes of a GGUF kind instead, [rows, bytes of a row] uint8; None for other kinds."""


class Weight(nn.Module, ABC):
    """A matrix [rows, columns] in some format, filled from the tensors of a checkpoint."""

    refills = False  # whether its targets can be filled again at any time, in place
    allocates_when_filled = False  # whether its tensors exist only after the last of its targets is filled

    @abstractmethod
    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint tensors that hold these rows, by the last part of their names: "weight", and other tensors of
        the format (scales, zeros, packed weights)."""

    def targets_in(self, part: str, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        """The same for a part with this name, where a format stores some parts in another way."""
        return self.targets(first_row, num_rows)

    @property
    @abstractmethod
    def matrix(self) -> Matrix:
        """The form that GEMMs read (`ops/gemm/table.py`)."""

    @abstractmethod
    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by index: [T] to [T, columns]."""


class WeightFormat(Protocol):
    @property
    def batch_invariant(self) -> bool:
        """Whether the GEMM of a row has the same bits in every batch."""

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        """An unfilled weight on torch's current default device."""


FormatOf = Callable[[str], WeightFormat]
"""The format of a weight by its name in the model."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The part of a tensor along one dimension that a rank reads, see `nn/weights/stored_part.py`."""

    ranges: tuple[tuple[int, int], ...]  # (first, size), in the order of the checkpoint
    total: int  # size of the whole tensor along this dimension

    def times(self, size: int) -> StoredPart:
        """The same part of a tensor with `size` numbers in place of each."""
        return StoredPart(tuple((first * size, count * size) for first, count in self.ranges), self.total * size)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The target of one checkpoint tensor: a whole parameter, or some rows of a merged one."""

    shape: tuple[int, ...]
    fill: Callable[[CheckpointTensor], None]
    # memory that filling allocates for this tensor, beyond the parameters that exist already
    num_bytes: Callable[[CheckpointTensor], int] = lambda piece: 0
    # of a tensor that is not divided like the weight (packed numbers, scales): the target for the whole tensor of a
    # weight of which some rows (0) or columns (1) are read; None: the tensor itself has these rows or columns
    divide: Callable[[int, StoredPart], WeightTarget] | None = None


@dataclass(frozen=True, slots=True)
class Unquantized:
    """Float weights of one dtype."""

    dtype: torch.dtype
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> UnquantizedWeight:
        return UnquantizedWeight(num_rows, num_columns, self.dtype)


class UnquantizedWeight(Weight):
    refills = True

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.data = new_parameter(num_rows, num_columns, dtype=dtype)
        self._parts: dict[tuple[int, int], torch.Tensor] = {}

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Some rows: the same tensor in every step, since kernels keep counters by weight, until the weight gets other
        memory."""
        part = self._parts.get((first, end))
        if part is None or part.untyped_storage()._cdata != self.data.untyped_storage()._cdata:
            part = self._parts[first, end] = self.data[first:end]
        return part

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self.data.shape[1]), partial(self._fill, first_row))

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        piece.write_to(self.data[first_row : first_row + piece.shape[0]])

    @property
    def matrix(self) -> Matrix:
        return self.data

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.data.index_select(0, ids)


def new_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialised, without gradients."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def take_memory(model: nn.Module, device: torch.device) -> None:
    """Allocates uninitialized memory for a model that was built on the meta device. Parameters that have memory keep
    it.

    `Module.to_empty` does the same, but imports torch's symbolic shapes, which takes over a second.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            with device:
                setattr(module, name, new_parameter(*parameter.shape, dtype=parameter.dtype))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def allocate_parameters(model: nn.Module, empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
    """Gives the parameters of a model on the meta device memory of `empty`."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            data = empty(tuple(parameter.shape), parameter.dtype)
            setattr(module, name, nn.Parameter(data, requires_grad=False))
