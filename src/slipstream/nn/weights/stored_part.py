"""The part of a checkpoint tensor that a rank reads (`StoredPart`).

A sharded layer is built with the sizes of its rank, and its targets are those of a layer of that size. Its attribute
`stored_parts` says, by name of a target or of its first part, which rows of the whole tensor they get; `find_targets`
(`nn/weights/load.py`) applies it. So every layout of a checkpoint (q, k and v apart, fused or interleaved) is sharded
by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from slipstream.nn.shapes import Shard
from slipstream.nn.weights.weight_format import CheckpointTensor, StoredPart, WeightTarget
from slipstream.ops.gemm.dequant import BLOCK, K_KINDS, SUPERBLOCK


def even_part(size: int, shard: Shard) -> StoredPart:
    """A tensor that is divided evenly; `size`: of one rank."""
    return StoredPart(((shard.rank * size, size),), shard.size * size)


def joined_part(parts: Sequence[StoredPart]) -> StoredPart:
    """Parts of tensors that the checkpoint stores as one."""
    ranges, first = [], 0
    for part in parts:
        ranges += [(first + begin, size) for begin, size in part.ranges]
        first += part.total
    return StoredPart(tuple(ranges), first)


def sharded_targets(
    targets: Mapping[str, WeightTarget], stored_parts: Mapping[str, StoredPart] | None
) -> dict[str, WeightTarget]:
    """Targets for the tensors of the whole layer."""
    if stored_parts is None:
        return dict(targets)
    found = {}
    for name, target in targets.items():
        part = stored_parts.get(name, stored_parts.get(name.rpartition(".")[0]))
        found[name] = target if part is None else sliced_target(target, 0, part)
    return found


def sliced_target(target: WeightTarget, dim: int, part: StoredPart) -> WeightTarget:
    """A target for the whole tensor of a checkpoint, of which only a part along one dimension is read."""
    if target.divide is not None:
        return target.divide(dim, part)
    size = sum(size for _, size in part.ranges)
    assert size == target.shape[dim], f"a part of {size} for a target of {target.shape} along {dim}"
    shape = (*target.shape[:dim], part.total, *target.shape[dim + 1 :])
    return WeightTarget(shape, partial(_fill_part, target, dim, part), partial(_part_bytes, target, dim, part))


def ordered_target(target: WeightTarget, order: Sequence[int], num_rows: int | None = None) -> WeightTarget:
    """A target for a tensor of a checkpoint whose rows are in another order, or some of whose rows are read.

    `order`: the tensor's row for each row; `num_rows`: of the tensor, if it has more.
    """
    num_rows = len(order) if num_rows is None else num_rows
    if list(order) == list(range(num_rows)):
        return target
    if target.divide is None:
        shape = (num_rows, *target.shape[1:])
        return WeightTarget(shape, partial(_fill_ordered, target, order), partial(_ordered_bytes, target, order))
    own = target.divide(0, _in_order(even_part(num_rows, Shard(0, 1)), order))
    return WeightTarget(own.shape, own.fill, own.num_bytes, partial(_divide_ordered, target.divide, order))


def _fill_ordered(target: WeightTarget, order: Sequence[int], piece: CheckpointTensor) -> None:
    target.fill(_Ordered(piece, order))


def _ordered_bytes(target: WeightTarget, order: Sequence[int], piece: CheckpointTensor) -> int:
    return target.num_bytes(_Ordered(piece, order))


def _divide_ordered(
    divide: Callable[[int, StoredPart], WeightTarget], order: Sequence[int], dim: int, part: StoredPart
) -> WeightTarget:
    assert dim == 0, "a product whose rows have an order is divided by rows"
    return divide(0, _in_order(part, order))


def _in_order(part: StoredPart, order: Sequence[int]) -> StoredPart:
    """The same part with its rows in this order, adjacent rows together."""
    rows = [first + number for first, size in part.ranges for number in range(size)]
    ranges: list[tuple[int, int]] = []
    for row in (rows[number] for number in order):
        if ranges and sum(ranges[-1]) == row:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((row, 1))
    return StoredPart(tuple(ranges), part.total)


class _Ordered:
    """A checkpoint tensor with its rows in another order."""

    def __init__(self, piece: CheckpointTensor, order: Sequence[int]) -> None:
        self.shape, self.kind, self._whole = (len(order), *piece.shape[1:]), piece.kind, piece
        self._order = order

    @property
    def blocks(self) -> Callable[[], torch.Tensor] | None:
        packed = self._whole.blocks
        return None if packed is None else lambda: packed()[self._order]

    def read(self) -> torch.Tensor:
        return self._whole.read()[self._order]

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self.read())


def _fill_part(target: WeightTarget, dim: int, part: StoredPart, piece: CheckpointTensor) -> None:
    target.fill(_Sliced(piece, dim, part, target.shape[dim]))


def _part_bytes(target: WeightTarget, dim: int, part: StoredPart, piece: CheckpointTensor) -> int:
    return target.num_bytes(_Sliced(piece, dim, part, target.shape[dim]))


def sliced(whole: torch.Tensor, dim: int, part: StoredPart) -> torch.Tensor:
    pieces = [whole.narrow(dim, first, size) for first, size in part.ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


class _Sliced:
    """Some rows or columns of a checkpoint tensor."""

    def __init__(self, piece: CheckpointTensor, dim: int, part: StoredPart, size: int) -> None:
        self.kind = piece.kind
        self.shape = (*piece.shape[:dim], size, *piece.shape[dim + 1 :])
        self._whole, self._dim, self._part = piece, dim, part

    def read(self) -> torch.Tensor:
        return sliced(self._whole.read(), self._dim, self._part)

    @property
    def blocks(self) -> Callable[[], torch.Tensor] | None:
        """None also for columns that are not whole blocks."""
        packed, part = self._whole.blocks, self._part
        if packed is None or self._dim == 0:
            return None if packed is None else lambda: sliced(packed(), 0, part)
        size = SUPERBLOCK if self.kind in K_KINDS else BLOCK  # columns of a block
        if any(first % size or count % size for first, count in part.ranges):
            return None
        blocks = StoredPart(tuple((first // size, count // size) for first, count in part.ranges), part.total // size)

        def read() -> torch.Tensor:
            rows = packed()
            return sliced(rows, 1, blocks.times(rows.shape[1] // blocks.total)).contiguous()

        return read

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self.read())


def reshaped_target(target: WeightTarget, shape: tuple[int, ...]) -> WeightTarget:
    """A target for a tensor of a checkpoint that has the same values in another shape."""
    assert target.divide is None, "only plain weights are stored in another shape"
    return WeightTarget(shape, partial(_fill_reshaped, target), target.num_bytes)


def _fill_reshaped(target: WeightTarget, piece: CheckpointTensor) -> None:
    target.fill(_Reshaped(piece, target.shape))


class _Reshaped:
    """A checkpoint tensor in another shape."""

    blocks = None

    def __init__(self, piece: CheckpointTensor, shape: tuple[int, ...]) -> None:
        self.shape, self.kind, self._whole = shape, piece.kind, piece

    def read(self) -> torch.Tensor:
        return self._whole.read().reshape(self.shape)

    def write_to(self, target: torch.Tensor) -> None:
        self._whole.write_to(target.view(self._whole.shape))
