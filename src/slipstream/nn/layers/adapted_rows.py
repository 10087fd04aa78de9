"""AdaptedRows: how the rows of adapter matrices B follow the rows of a product's weight.

A product may store its outputs in another order than the checkpoint, or join tensors of the checkpoint. Its
`weight_targets` place the rows of each tensor; here the same targets place the rows of B. A rank that has some rows of
the product has the same rows of B.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch

from slipstream.device.sync_check import sync_allowed
from slipstream.nn.layers.linear import Linear
from slipstream.nn.stored_part import sharded_targets
from slipstream.nn.weight_format import CheckpointTensor, WeightTarget


class AdaptedRows:
    """The checkpoint's tensors that one GEMM is made of, each with an adapter of its own."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        targets = dict(_targets(linear, torch.empty(linear.num_outputs, 1, dtype=torch.float32)))
        # by tensor: "q", or "" for a single one; of all ranks
        self.num_rows = {name: own.shape[0] for name, own in targets.items()}
        self.index = {name: index for index, name in enumerate(targets)}
        self.runs = self._runs()

    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first output, end, index of the tensor) of adjacent outputs of one tensor."""
        owner = torch.empty(self._linear.num_outputs, 1, dtype=torch.float32)
        for name, own in _targets(self._linear, owner):
            own.fill(Piece(torch.full((self.num_rows[name], 1), float(self.index[name]), dtype=torch.float32)))
        with sync_allowed("at start, in host memory"):
            indices = [int(value) for value in owner.flatten().tolist()]
        borders = [at for at in range(1, len(indices)) if indices[at] != indices[at - 1]]
        return tuple(
            (first, end, indices[first]) for first, end in zip([0, *borders], [*borders, len(indices)], strict=True)
        )

    def fill(self, target: torch.Tensor, name: str, rows: torch.Tensor) -> None:
        """Write rows [rows of the tensor, rank] to their positions in target [outputs, rank], on the host."""
        dict(_targets(self._linear, target))[name].fill(Piece(rows))


class Piece:
    """A tensor in memory as a `CheckpointTensor`."""

    blocks = None
    kind = "F32"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self._tensor = tuple(tensor.shape), tensor

    def read(self) -> torch.Tensor:
        return self._tensor

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self._tensor)


class _Rows:
    """In place of a product's weight: rows of another matrix with as many rows."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def targets_in(self, part: str, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self._target.shape[1]), partial(self._fill, first_row))

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        piece.write_to(self._target[first_row : first_row + piece.shape[0]])


def _targets(linear: Linear, target: torch.Tensor) -> Iterator[tuple[str, WeightTarget]]:
    """The targets of a copy of the product whose weight is `target`, by the name of the tensor."""
    shadow = copy.copy(linear)
    shadow.__dict__["_modules"] = {}
    shadow.__dict__["_parameters"] = {}
    shadow.__dict__["weight"] = _Rows(target)
    shadow.__dict__["bias"] = None
    # rows of the whole product, also if the inputs are divided among ranks
    targets = Linear.weight_targets(shadow) if linear.input_part is not None else shadow.weight_targets()
    for name, own in sharded_targets(dict(targets), linear.stored_parts).items():
        yield name.removesuffix("weight").removesuffix("."), own
