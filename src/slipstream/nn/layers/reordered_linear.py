"""ReorderedLinear: a product some of whose rows are in another order than in the checkpoint.

Our rope rotates number i of a head with number i + half. Some checkpoints rotate neighbouring numbers together; the
rows of their projections to queries and keys are reordered when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from slipstream.nn.layers.linear import Linear
from slipstream.nn.weight_format import CheckpointTensor, WeightFormat, WeightTarget, require_row_wise


class ReorderedLinear(Linear):
    """Every tensor of the weight's format must have a row per output."""

    def __init__(
        self,
        num_inputs: int,
        outputs: Mapping[str, int],
        bias: bool,
        format: WeightFormat,
        dtype: torch.dtype,
        orders: Mapping[str, list[int]],
    ) -> None:
        """`orders`: of a part, the checkpoint's row for each row."""
        super().__init__(num_inputs, outputs, bias, format, dtype)
        self.orders = dict(orders)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        require_row_wise(self.weight, "projections whose rows are reordered at load")
        for name, target in super().weight_targets():
            order = self.orders.get(name.rpartition(".")[0])
            fill = target.fill if order is None else partial(self._fill_reordered, target, order)
            yield name, WeightTarget(target.shape, fill, target.num_bytes)

    def _fill_reordered(self, target: WeightTarget, order: list[int], piece: CheckpointTensor) -> None:
        target.fill(_Rows(piece, order))


class _Rows:
    """A checkpoint tensor with its rows in another order."""

    def __init__(self, piece: CheckpointTensor, order: list[int]) -> None:
        self.shape, self.kind, self._whole, self._order = piece.shape, piece.kind, piece, order

    @property
    def blocks(self) -> Callable[[], torch.Tensor] | None:
        packed = self._whole.blocks
        return None if packed is None else lambda: packed()[self._order]

    def read(self) -> torch.Tensor:
        return self._whole.read()[self._order]

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self.read())


def pairs_as_halves(head_dim: int, num_rotary: int) -> list[int]:
    """The checkpoint's number for each number of a head whose first `num_rotary` numbers it rotates in pairs: the first
    of all pairs, the second of all pairs, then the numbers that do not rotate."""
    return [*range(0, num_rotary, 2), *range(1, num_rotary, 2), *range(num_rotary, head_dim)]


def rows_of_heads(num_heads: int, order: list[int]) -> list[int]:
    """The rows of a projection to `num_heads` heads, each in this order."""
    return [head * len(order) + number for head in range(num_heads) for number in order]
