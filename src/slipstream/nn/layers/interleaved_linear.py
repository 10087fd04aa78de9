"""InterleavedLinear: a product whose checkpoint tensors hold rows of several parts in turn.

Qwen3-Next stores q, k, v and z of a key head next to each other, then those of the next key head; gated attention
stores the query and the gate of a head next to each other. In memory each part is one run of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from slipstream.nn.layers.linear import Linear
from slipstream.nn.weight_format import CheckpointTensor, WeightFormat, WeightTarget, require_row_wise


class StoredRows(NamedTuple):
    """The rows of a checkpoint tensor: `num_groups` groups, each with an equal share of each part, in this order."""

    num_groups: int
    parts: tuple[str, ...]


class InterleavedLinear(Linear):
    """Every tensor of the weight's format must have a row per output."""

    def __init__(
        self,
        num_inputs: int,
        outputs: Mapping[str, int],
        stored: Mapping[str, StoredRows],
        bias: bool,
        format: WeightFormat,
        dtype: torch.dtype,
    ) -> None:
        """`outputs` are the parts in memory, `stored` the checkpoint's tensors by name, which hold each part once."""
        super().__init__(num_inputs, outputs, bias, format, dtype)
        held = [part for rows in stored.values() for part in rows.parts]
        assert sorted(held) == sorted(outputs), f"the checkpoint stores {held}, the product has {list(outputs)}"
        self.stored = dict(stored)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yields the targets by the checkpoint's tensor and kind: "qkvz.weight"."""
        require_row_wise(self.weight, "projections that the checkpoint interleaves")
        own = dict(super().weight_targets())
        for name, rows in self.stored.items():
            first = rows.parts[0]
            kinds = [parameter.removeprefix(f"{first}.") for parameter in own if parameter.startswith(f"{first}.")]
            for kind in kinds:
                targets = [own[f"{part}.{kind}"] for part in rows.parts]
                num_rows = sum(target.shape[0] for target in targets)
                shape = (num_rows, *targets[0].shape[1:])
                fill = partial(_fill, targets, rows.num_groups)
                yield f"{name}.{kind}".removeprefix("."), WeightTarget(shape, fill)


def _fill(targets: list[WeightTarget], num_groups: int, piece: CheckpointTensor) -> None:
    first = 0
    for target in targets:
        count = target.shape[0] // num_groups
        target.fill(_Part(piece, num_groups, first, count))
        first += count


class _Part:
    """Rows [first, first + count) of each group of a checkpoint tensor."""

    blocks = None

    def __init__(self, piece: CheckpointTensor, num_groups: int, first: int, count: int) -> None:
        self.shape, self.kind = (num_groups * count, *piece.shape[1:]), piece.kind
        self._piece, self._num_groups, self._first, self._count = piece, num_groups, first, count

    def read(self) -> torch.Tensor:
        grouped = self._piece.read().unflatten(0, (self._num_groups, -1))
        return grouped.narrow(1, self._first, self._count).flatten(0, 1)

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self.read())
