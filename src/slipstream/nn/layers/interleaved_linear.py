"""InterleavedLinear: a product whose checkpoint tensors hold rows of several parts in turn.

Qwen3-Next stores q, k, v and z of a key head next to each other, then those of the next key head; gated attention
stores the query and the gate of a head next to each other. In memory each part is one run of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from slipstream.nn.layers.linear import Linear
from slipstream.nn.stored_part import ordered_target
from slipstream.nn.weight_format import CheckpointTensor, StoredPart, WeightFormat, WeightTarget


class StoredRows(NamedTuple):
    """The rows of a checkpoint tensor: `num_groups` groups, each with an equal share of each part, in this order."""

    num_groups: int
    parts: tuple[str, ...]

    def of_parts(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """The tensor's row for each row of each part. `sizes`: rows of the parts."""
        counts = [size // self.num_groups for size in sizes]
        step, first = sum(counts), 0
        for count in counts:
            yield [group * step + first + row for group in range(self.num_groups) for row in range(count)]
            first += count


class InterleavedLinear(Linear):
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
        for name, rows in self.stored.items():
            own = [dict(self.targets_of(part, name)) for part in rows.parts]
            orders = list(rows.of_parts([self.outputs[part] for part in rows.parts]))
            num_rows = sum(map(len, orders))
            for kind in own[0]:
                parts = [
                    ordered_target(targets[kind], order, num_rows) for targets, order in zip(own, orders, strict=True)
                ]
                yield f"{name}.{kind}".removeprefix("."), _joined(parts)


def _joined(targets: Sequence[WeightTarget]) -> WeightTarget:
    """One target for a tensor that all of these read."""
    divides = targets[0].divide is not None
    divide = partial(_divide, targets) if divides else None
    return WeightTarget(targets[0].shape, partial(_fill, targets), partial(_num_bytes, targets), divide)


def _fill(targets: Sequence[WeightTarget], piece: CheckpointTensor) -> None:
    for target in targets:
        target.fill(piece)


def _num_bytes(targets: Sequence[WeightTarget], piece: CheckpointTensor) -> int:
    return sum(target.num_bytes(piece) for target in targets)


def _divide(targets: Sequence[WeightTarget], dim: int, part: StoredPart) -> WeightTarget:
    divided = []
    for target in targets:
        assert target.divide is not None
        divided.append(target.divide(dim, part))
    return _joined(divided)
