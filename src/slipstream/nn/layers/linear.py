"""Linear: one product, whose parts the checkpoint may store as separate tensors.

It takes the step's context, which says which tokens have an adapter (`ops/gemm/lora/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.layer import Layer, RankedLayer
from slipstream.nn.layers.norm import Norm, PerHeadNorm, RMSNorm
from slipstream.nn.shapes import FeedShape, MixerShape, Shard
from slipstream.nn.weights.stored_part import even_part, ordered_target, sliced_target
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    StoredPart,
    WeightFormat,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.gemm.chains import Unnormalized
from slipstream.ops.gemm.description import Activation, Gemm, NormBefore, ProductAdapters, activated
from slipstream.ops.gemm.lora import LoraWeights
from slipstream.ops.gemm.table import can_chain, multiply, multiply_normed, takes_gate


class Linear(Layer):
    """Several named projections of the same input in one product; their outputs lie side by side.

    A single unnamed projection is `{"": size}`.
    """

    stored_parts: Mapping[str, StoredPart] | None = None  # of a rank that has some outputs; None: it has all
    input_part: StoredPart | None = None  # of a rank that has some inputs; None: it has all
    lora: LoraWeights | None = None  # adapters by slot, set by `nn/adapters.py`; None: it has none

    def __init__(
        self, num_inputs: int, outputs: Mapping[str, int], bias: bool, format: WeightFormat, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.outputs = dict(outputs)
        self.num_outputs = sum(self.outputs.values())
        self.weight = format.new_weight(self.num_outputs, num_inputs)
        self.bias = new_parameter(self.num_outputs, dtype=dtype) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        context: ForwardContext | None = None,
        activation: Activation | None = None,
        gate: Activation | None = None,
    ) -> torch.Tensor:
        """x [T, inputs] to [T, outputs], then the activation if given. `context` is None for heads, which run outside
        the network. `gate`: a gated activation of x, if `takes_gate`."""
        return self.multiply(self.gemm(x, context, activation=activation, gate=gate))

    def multiply(self, gemm: Gemm) -> torch.Tensor:
        return multiply(gemm)

    def gemm(self, x: torch.Tensor | Unnormalized, context: ForwardContext | None, **around: Any) -> Gemm:
        """The description of the product with the adapters of the step. `around`: other fields."""
        tiles = None if context is None or self.lora is None else context.batch.lora
        adapters = None if tiles is None or self.lora is None else ProductAdapters(self.lora, tiles)
        return Gemm(x, self.weight.matrix, self.bias, adapters=adapters, **around)

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product with norm(x + residual), in one pass where the weight has one; and x + residual."""
        if type(norm) is RMSNorm:
            before = NormBefore(norm.weight, norm.eps, residual)
            return multiply_normed(self.gemm(x, context, activation=activation, norm=before))[:2]
        normed, total = norm(x, residual)
        return self.forward(normed, context, activation), total

    def takes_gate(self, x: torch.Tensor, activation: Activation, context: ForwardContext) -> bool:
        """Whether a gated activation is faster as the `gate` of this product than as the activation of the product
        before, whose input is x."""
        if self.lora is not None and context.batch.lora is not None:
            return False
        return takes_gate(x, activation, self.weight.matrix)

    @property
    def can_chain(self) -> bool:
        """Whether the product may be part of a chain."""
        return can_chain(self.weight.matrix)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Targets of the checkpoint's tensors, by part and kind: "q.weight", "q.bias". The format names the kinds."""
        for part in self.outputs:
            prefix = f"{part}." if part else ""
            for kind, target in self.targets_of(part, part):
                yield f"{prefix}{kind}", target

    def targets_of(self, part: str, stored: str) -> Iterator[tuple[str, WeightTarget]]:
        """Targets of one part, by kind. `stored`: the checkpoint's tensor that has it, by the name of its target."""
        names = list(self.outputs)
        first, size = sum(self.outputs[name] for name in names[: names.index(part)]), self.outputs[part]
        yield from self.weight.targets_in(stored, first, size)
        if self.bias is not None:
            yield "bias", WeightTarget((size,), partial(self._fill_bias, first))

    def _fill_bias(self, first: int, piece: CheckpointTensor) -> None:
        assert self.bias is not None
        self.bias[first : first + piece.shape[0]].copy_(piece.read())


# Products: the two products of a sublayer and what is computed between them, as its module declares them to chains.


class SplitProjection(NamedTuple):
    """The first product of a mixer that returns last tokens only: what its state needs of all tokens, and the rest."""

    kept: torch.Tensor  # [T, outputs that change the state]
    last: torch.Tensor  # [B, other outputs], of the last tokens


Mix = Callable[[Any, ForwardContext, LastTokens | None], torch.Tensor]
"""Its first argument is the first product, [T, outputs]; or a `SplitProjection`, if `Products.split` made it."""
Split = Callable[[torch.Tensor, ForwardContext, LastTokens], SplitProjection | None]


@dataclass(frozen=True, slots=True)
class Products:
    """The module of a sublayer computes last(mix(activation(first(x)))), where mix and activation are optional."""

    shape: MixerShape | FeedShape
    first: Linear
    last: Linear
    activation: Activation | None = None
    mix: Mix | None = None  # of a mixer
    head_norm: PerHeadNorm | None = None  # inside the mix, of queries and keys
    site: int | None = None  # of the cache that the mix writes and reads
    split: Split | None = None  # the first product of normed tokens, if only last tokens are returned; it may make None


# InterleavedLinear: a product whose checkpoint tensors hold rows of several parts in turn.
#
# Qwen3-Next stores q, k, v and z of a key head next to each other, then those of the next key head; gated attention
# stores the query and the gate of a head next to each other. In memory each part is one run of rows.


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
        names = [part for rows in stored.values() for part in rows.parts]
        assert sorted(names) == sorted(outputs), f"the checkpoint stores {names}, the product has {list(outputs)}"
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


# ReorderedLinear: a product some of whose rows are in another order than in the checkpoint.
#
# Our rope rotates number i of a head with number i + half. Some checkpoints rotate neighbouring numbers together; the
# rows of their projections to queries and keys are reordered when they are loaded.


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


# RowParallelLinear: the last product of a layer that is divided among ranks.
#
# A layer begins with products of which each rank has some outputs (their `stored_parts`) and ends with one of which
# each rank has some inputs, so its only collective is the sum after the last product.


class RowParallelLinear(RankedLayer, Linear):
    """Each rank has some inputs; the outputs are summed over all ranks, and the bias is added once."""

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
        self.input_part = even_part(num_inputs, shard)

    def multiply(self, gemm: Gemm) -> torch.Tensor:
        out = self.ranks.all_reduce(multiply(gemm._replace(bias=None, activation=None)))
        return activated(out if self.bias is None else out + self.bias, gemm.activation)

    @property
    def can_chain(self) -> bool:
        return False

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        columns = self.input_part
        assert columns is not None
        for name, target in super().weight_targets():
            is_bias = name.rpartition(".")[2] == "bias"
            yield name, target if is_bias else sliced_target(target, 1, columns)


def new_output(
    num_inputs: int, num_outputs: int, bias: bool, format: WeightFormat, dtype: torch.dtype, shard: Shard | None
) -> Linear:
    """The last product of a layer."""
    if shard is None:
        return Linear(num_inputs, {"": num_outputs}, bias, format, dtype)
    return RowParallelLinear(num_inputs, {"": num_outputs}, bias, format, dtype, shard)
