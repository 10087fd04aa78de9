"""Linear layers of which each rank has a part: some outputs, or some inputs.

A layer begins with products that are split by outputs and ends with one that is split by inputs, so its only collective
is the sum after the last product. The checkpoint has whole tensors; each rank reads its rows or columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.dist.group import Group
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.linear import Linear
from slipstream.nn.shapes import Shard
from slipstream.nn.weight_format import CheckpointTensor, WeightFormat, WeightTarget, require_row_wise


@dataclass(frozen=True, slots=True)
class OutputRange:
    """The outputs of one part that this rank has: `first` and as many as the layer has of it, out of `total`."""

    first: int
    total: int


def even_range(size: int, shard: Shard) -> OutputRange:
    """Of a part whose outputs are divided evenly; `size`: outputs of one rank."""
    return OutputRange(shard.rank * size, shard.size * size)


class ColumnParallelLinear(Linear):
    """Each rank has some outputs of each part; every rank has all inputs. No collective."""

    def __init__(
        self,
        num_inputs: int,
        outputs: Mapping[str, int],
        bias: bool,
        format: WeightFormat,
        dtype: torch.dtype,
        ranges: Mapping[str, OutputRange],
    ) -> None:
        super().__init__(num_inputs, outputs, bias, format, dtype)
        self._ranges = dict(ranges)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        require_row_wise(self.weight, "tensor parallelism")
        for name, target in super().weight_targets():
            part = self._ranges[name.rpartition(".")[0]]
            yield name, sliced_target(target, 0, part)


class RowParallelLinear(Linear):
    """Each rank has some inputs; the outputs are summed over all ranks, and the bias is added once."""

    group: Group | None = None  # set before the first forward

    def __init__(
        self,
        num_inputs: int,
        outputs: Mapping[str, int],
        bias: bool,
        format: WeightFormat,
        dtype: torch.dtype,
        shard: Shard,
    ) -> None:
        """`num_inputs`: of this rank."""
        super().__init__(num_inputs, outputs, bias, format, dtype)
        self._shard = shard

    def forward(self, x: torch.Tensor, context: ForwardContext | None = None) -> torch.Tensor:
        assert self.group is not None, "the ranks are not connected"
        out = self.group.all_reduce(self.weight.multiply(x, None))
        return out if self.bias is None else out + self.bias

    @property
    def can_chain(self) -> bool:
        return False

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        require_row_wise(self.weight, "tensor parallelism")
        columns = even_range(self.num_inputs, self._shard)
        for name, target in super().weight_targets():
            if name.rpartition(".")[2] == "bias":
                yield name, target
                continue
            yield name, sliced_target(target, 1, columns)


def new_output(
    num_inputs: int, num_outputs: int, bias: bool, format: WeightFormat, dtype: torch.dtype, shard: Shard | None
) -> Linear:
    """The last product of a layer."""
    if shard is None:
        return Linear(num_inputs, {"": num_outputs}, bias, format, dtype)
    return RowParallelLinear(num_inputs, {"": num_outputs}, bias, format, dtype, shard)


def sliced_target(target: WeightTarget, dim: int, part: OutputRange) -> WeightTarget:
    """A target for the whole tensor of a checkpoint, of which only a part along one dimension is read."""
    shape = (*target.shape[:dim], part.total, *target.shape[dim + 1 :])
    return WeightTarget(shape, partial(_fill_slice, target, dim, part.first), target.num_bytes)


def _fill_slice(target: WeightTarget, dim: int, first: int, piece: CheckpointTensor) -> None:
    target.fill(_Slice(piece, dim, first, target.shape[dim]))


class _Slice:
    """Some rows or columns of a checkpoint tensor."""

    blocks = None

    def __init__(self, piece: CheckpointTensor, dim: int, first: int, size: int) -> None:
        self.kind = piece.kind
        self._whole, self._dim, self._first, self._size = piece, dim, first, size

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self._whole.shape
        return (*whole[: self._dim], self._size, *whole[self._dim + 1 :])

    def read(self) -> torch.Tensor:
        return self._whole.read().narrow(self._dim, self._first, self._size)

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self.read())
