"""Quantized: weights that stay quantised on a GPU, or are dequantised at load where no kernel exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from slipstream.base.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from slipstream.checkpoint.quantization import Quantization
from slipstream.nn.weights.kinds import BatchInvariantWeight
from slipstream.nn.weights.quantized_layouts import QuantizedPart, read_part, tensor_shapes
from slipstream.nn.weights.stored_part import sliced
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    StoredPart,
    Unquantized,
    UnquantizedWeight,
    Weight,
    WeightFormat,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize, pack_4_bit, words_of
from slipstream.ops.gemm.table import Run, Runs


@dataclass(frozen=True, slots=True)
class Quantized:
    """The format of one weight of the model."""

    quantization: Quantization
    name: str  # of the weight, for errors
    dtype: torch.dtype  # of activations
    optional: frozenset[str] = frozenset()  # tensors of `layouts.OPTIONAL` that the checkpoint has for this weight
    plain_parts: frozenset[str] = frozenset()  # parts of the weight that the checkpoint does not quantise
    stays_quantized: bool = True
    batch_invariant: bool = False
    num_ranks: int = 1  # that have a part of the weight each

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        """Kernels read whole groups of columns: other weights are dequantised at load."""
        self.check_rows(num_rows, num_columns)
        q = self.quantization
        unit = max(q.group, 32 if q.is_4_bit else 1)  # columns; both are powers of two
        if self.stays_quantized and not self.plain_parts:
            if num_columns % unit == 0:
                return QuantizedWeight(num_rows, num_columns, self)
            if self.num_ranks > 1:
                raise InvalidOption(
                    f"tensor_parallel_size is {self.num_ranks}, and a rank has {num_columns} columns of {self.name}, "
                    f"which are not whole groups of {unit}; give a smaller number"
                )
        kind = InvariantDequantizedWeight if self.batch_invariant else DequantizedWeight
        return kind(num_rows, num_columns, self)

    def check_rows(self, num_rows: int, num_columns: int) -> None:
        q = self.quantization
        if self.num_ranks == 1 and q.layout == "awq" and num_rows % 8:
            raise BadCheckpoint(
                f"{self.name} is {num_rows} x {num_columns}, and AWQ packs 8 rows together; its quantization_config "
                "belongs to another model"
            )


class FloatFormat(Protocol):
    def new_weight(self, num_rows: int, num_columns: int) -> UnquantizedWeight: ...


def dequantized_format(format: WeightFormat, dtype: torch.dtype) -> FloatFormat:
    """The format of the same tensors of a checkpoint for a weight that is multiplied in a way of its own."""
    if isinstance(format, Quantized) and format.quantization.layout != "online":
        return _Dequantized(format)
    return Unquantized(dtype)


@dataclass(frozen=True, slots=True)
class _Dequantized:
    format: Quantized

    def new_weight(self, num_rows: int, num_columns: int) -> UnquantizedWeight:
        self.format.check_rows(num_rows, num_columns)
        return DequantizedWeight(num_rows, num_columns, self.format)


class QuantizedWeight(Weight):
    def __init__(self, num_rows: int, num_columns: int, format: Quantized) -> None:
        super().__init__()
        q = format.quantization
        self.format, self.num_columns = format, num_columns
        groups = num_columns // q.group if q.group else 1
        if q.is_4_bit:
            self.values = new_parameter(num_rows, num_columns // 2, dtype=torch.uint8)
        else:
            self.values = new_parameter(num_rows, num_columns, dtype=storage_dtype(q))
        self.scale = new_parameter(num_rows, groups, dtype=torch.float32)
        self.zeros = None if q.symmetric else new_parameter(num_rows, groups, dtype=torch.float32)
        has_words = q.is_4_bit and not q.has_codebook and q.group == 128  # see `QuantizedMatrix`
        self.words = new_parameter(groups, num_rows, dtype=torch.int32) if has_words else None
        self.codebook = new_parameter(16, dtype=torch.float32) if q.has_codebook else None
        self.allows_order = True  # of columns
        # of static inputs: the largest of all parts
        self.input_scale = new_parameter(1, dtype=torch.float32) if "input_scale" in format.optional else None
        self._has_input_scale = False
        self._parts: dict[int, tuple[int, torch.Tensor | None]] = {}  # rows and column order by first row
        self._runs: list[_Run] = []  # if some part has an order of columns

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        fill = partial(self._fill, first_row)
        yield from _new_reader(self.format, (num_rows, self.num_columns), lambda: self.values.device, fill).targets()

    def _fill(self, first_row: int, part: QuantizedPart, reader: PartReader) -> None:
        part = reader.kept_part(part)
        if part.order is not None and not self.allows_order:
            raise UnsupportedModel(
                f"{self.format.name}: experts of GPTQ with act-order (desc_act) are not supported; give a checkpoint "
                "without act-order, or the unquantised one"
            )
        matrix = to_matrix(part, self.format.quantization)
        rows = slice(first_row, first_row + len(part.values))
        self.values[rows].copy_(matrix.values)
        self.scale[rows].copy_(matrix.scale)
        if self.zeros is not None:
            assert matrix.zeros is not None
            self.zeros[rows].copy_(matrix.zeros)
        if self.words is not None:
            self.words[:, rows].copy_(words_of(matrix.scale, matrix.zero if matrix.zeros is None else matrix.zeros))
        if self.codebook is not None:
            assert matrix.codebook is not None
            self.codebook.copy_(matrix.codebook)
        if self.input_scale is not None and part.input_scale is not None:
            known = self.input_scale if self._has_input_scale else part.input_scale
            self.input_scale.copy_(torch.maximum(known, part.input_scale))
            self._has_input_scale = True
        self._parts[first_row] = len(part.values), part.order
        if any(order is not None for _, order in self._parts.values()):
            self._runs = _join_runs(self._parts)

    @property
    def matrix(self) -> QuantizedMatrix | Runs:
        whole = self.whole
        if len(self._runs) < 2:
            return Runs([Run(whole, len(whole.values), run.order) for run in self._runs]) if self._runs else whole
        return Runs([Run(whole.rows(first, count), count, order) for first, count, order in self._runs])

    @property
    def whole(self) -> QuantizedMatrix:
        """All rows, as if no part had an order of columns."""
        q = self.format.quantization
        return QuantizedMatrix(
            self.values,
            self.scale,
            self.zeros,
            zero_of(q),
            codebook=self.codebook,
            is_fp4=q.method == "mxfp4",
            words=self.words,
            quantizes_inputs=q.quantizes_inputs,
            input_scale=self.input_scale,
            batch_invariant=self.format.batch_invariant,
        )

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        rows = dequantize(self.whole.select(lambda table: table.index_select(0, ids)), self.format.dtype)
        if not self._runs:
            return rows
        assert len(self._runs) == 1 and self._runs[0].order is not None, "a table of tokens is one part"
        ordered = torch.empty_like(rows)
        ordered[:, self._runs[0].order] = rows
        return ordered


class _Run(NamedTuple):
    """Adjacent rows whose columns have the same order."""

    first: int
    num_rows: int
    order: torch.Tensor | None


def _join_runs(parts: Mapping[int, tuple[int, torch.Tensor | None]]) -> list[_Run]:
    runs: list[_Run] = []
    for first in sorted(parts):
        count, order = parts[first]
        last = runs[-1] if runs else None
        if last is not None and last.first + last.num_rows == first and _are_equal(last.order, order):
            runs[-1] = last._replace(num_rows=last.num_rows + count)
        else:
            runs.append(_Run(first, count, order))
    return runs


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


class DequantizedWeight(UnquantizedWeight):
    """A quantised weight that is dequantised at load."""

    def __init__(self, num_rows: int, num_columns: int, format: Quantized) -> None:
        super().__init__(num_rows, num_columns, format.dtype)
        self.format = format

    def targets_in(self, part: str, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        is_plain = part in self.format.plain_parts
        return super().targets(first_row, num_rows) if is_plain else self.targets(first_row, num_rows)

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        fill = partial(self._fill_part, first_row)
        yield from _new_reader(self.format, (num_rows, self.data.shape[1]), lambda: self.data.device, fill).targets()

    def _fill_part(self, first_row: int, part: QuantizedPart, reader: PartReader) -> None:
        weight = dequantize(to_matrix(part, self.format.quantization, packs=False), self.data.dtype)
        if part.order is not None:
            ordered, weight = weight, torch.empty_like(weight)
            weight[:, part.order] = ordered
        weight = reader.kept(weight)
        self.data[first_row : first_row + len(weight)].copy_(weight)


class InvariantDequantizedWeight(DequantizedWeight, BatchInvariantWeight):
    """The same with products of `BatchInvariantWeight`."""


def storage_dtype(q: Quantization) -> torch.dtype:
    """The dtype of `QuantizedMatrix.values`."""
    if q.is_4_bit:
        return torch.uint8
    return torch.float8_e4m3fn if q.layout == "float8" or (q.layout == "online" and q.method == "fp8") else torch.int8


def zero_of(q: Quantization) -> int:
    """`QuantizedMatrix.zero`. Integers of 8 bits are stored around zero."""
    return 8 if q.is_4_bit and q.symmetric and not q.has_codebook else 0


def to_matrix(part: QuantizedPart, q: Quantization, packs: bool = True) -> QuantizedMatrix:
    """`packs`: 4-bit numbers as kernels read them, in multiples of 32 columns; else they are integers of 8 bits."""
    kind = storage_dtype(q)
    if kind is torch.float8_e4m3fn:
        return QuantizedMatrix(part.values, part.scale, None)
    zeros = part.zeros
    if kind is torch.int8:
        values = (part.values ^ 128).view(torch.int8)
        return QuantizedMatrix(values, part.scale, None if zeros is None else zeros - 128)
    values = pack_4_bit(part.values.contiguous()) if packs else part.values.view(torch.int8)
    return QuantizedMatrix(values, part.scale, zeros, zero_of(q), codebook=part.codebook)


def _new_reader(
    format: Quantized,
    size: tuple[int, int],
    device: Callable[[], torch.device],
    fill: Callable[[QuantizedPart, PartReader], None],
) -> PartReader:
    return PartReader(format.quantization, format.name, format.optional, size, device, fill)


# PartReader: the targets of a quantised weight's tensors, which are read together when the last one has arrived.
#
# A rank that has some rows or columns of a weight reads all of the tensors, since they are packed, and keeps its part
# of the numbers. So every layout is divided by the same rule, and scales are those of the whole weight.


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
