"""PartReader: the targets of a quantised weight's tensors, which are read together when the last one has arrived.

A rank that has some rows or columns of a weight reads all of the tensors, since they are packed, and keeps its part of
the numbers. So every layout is divided by the same rule, and scales are those of the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.quantization import Quantization
from slipstream.nn.quantized.layouts import QuantizedPart, read_part, tensor_shapes
from slipstream.nn.stored_part import sliced
from slipstream.nn.weight_format import CheckpointTensor, StoredPart, WeightTarget


class PartReader:
    """`rows`, `columns`: what is kept of the weight; None: all of it."""

    def __init__(
        self,
        quantization: Quantization,
        name: str,
        optional: frozenset[str],
        size: tuple[int, int],
        device: Callable[[], torch.device],
        fill: Callable[[QuantizedPart, PartReader], None],
    ) -> None:
        """`name`: of the weight, for errors; `optional`: tensors of `layouts.OPTIONAL` that are there; `size`: rows and
        columns that are kept. `fill` is called with the whole part."""
        self.rows: StoredPart | None = None
        self.columns: StoredPart | None = None
        self._quantization, self._name, self._optional, self._size = quantization, name, optional, size
        self._device, self._fill = device, fill
        self._pieces: dict[str, CheckpointTensor] = {}

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for kind in self._shapes():
            yield kind, self._target(kind)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        num_rows = self._size[0] if self.rows is None else self.rows.total
        return tensor_shapes(self._quantization, num_rows, self._num_columns, self._optional)

    @property
    def _num_columns(self) -> int:
        return self._size[1] if self.columns is None else self.columns.total

    def _target(self, kind: str) -> WeightTarget:
        return WeightTarget(self._shapes()[kind], partial(self._arrive, kind), divide=partial(self._divide, kind))

    def _divide(self, kind: str, dim: int, part: StoredPart) -> WeightTarget:
        """All tensors of the weight are divided in the same way."""
        if dim == 0:
            self.rows = part
        else:
            self.columns = part
        return self._target(kind)

    def _arrive(self, kind: str, piece: CheckpointTensor) -> None:
        self._pieces[kind] = piece
        if len(self._pieces) == len(self._shapes()):
            self._fill(read_part(self._quantization, self._name, self._pieces, self._num_columns, self._device()), self)
            self._pieces.clear()

    def kept(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of a float weight that is kept."""
        weight = weight if self.rows is None else sliced(weight, 0, self.rows)
        return weight if self.columns is None else sliced(weight, 1, self.columns)

    def kept_part(self, part: QuantizedPart) -> QuantizedPart:
        """Columns are kept by whole groups."""
        if self.rows is not None:
            zeros = None if part.zeros is None else sliced(part.zeros, 0, self.rows)
            part = part._replace(
                values=sliced(part.values, 0, self.rows), scale=sliced(part.scale, 0, self.rows), zeros=zeros
            )
        if self.columns is None:
            return part
        if part.order is not None:
            raise UnsupportedModel(
                f"{self._name}: GPTQ with act-order (desc_act) is not divided among ranks by columns on a GPU; use "
                "tensor_parallel_size 1, or a checkpoint without act-order"
            )
        num_groups = part.scale.shape[1]
        scale, zeros = part.scale, part.zeros
        if num_groups > 1:
            size = self.columns.total // num_groups
            ranges = tuple((first // size, count // size) for first, count in self.columns.ranges)
            groups = StoredPart(ranges, num_groups)
            scale = sliced(scale, 1, groups)
            zeros = None if zeros is None else sliced(zeros, 1, groups)
        return part._replace(values=sliced(part.values, 1, self.columns), scale=scale, zeros=zeros)
