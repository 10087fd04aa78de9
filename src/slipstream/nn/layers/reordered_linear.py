"""ReorderedLinear: a product some of whose rows are in another order than in the checkpoint.

Our rope rotates number i of a head with number i + half. Some checkpoints rotate neighbouring numbers together; the
rows of their projections to queries and keys are reordered when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from slipstream.nn.layers.linear import Linear
from slipstream.nn.stored_part import ordered_target
from slipstream.nn.weight_format import WeightFormat, WeightTarget


class ReorderedLinear(Linear):
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
        for name, target in super().weight_targets():
            order = self.orders.get(name.rpartition(".")[0])
            yield name, target if order is None else ordered_target(target, order)


def pairs_as_halves(head_dim: int, num_rotary: int) -> list[int]:
    """The checkpoint's number for each number of a head whose first `num_rotary` numbers it rotates in pairs: the first
    of all pairs, the second of all pairs, then the numbers that do not rotate."""
    return [*range(0, num_rotary, 2), *range(1, num_rotary, 2), *range(num_rotary, head_dim)]


def rows_of_heads(num_heads: int, order: list[int]) -> list[int]:
    """The rows of a projection to `num_heads` heads, each in this order."""
    return [head * len(order) + number for head in range(num_heads) for number in order]
