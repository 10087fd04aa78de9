"""Linear: one product, whose parts the checkpoint may store as separate tensors.

Every form of the product takes the step's context, which says which tokens have an adapter (`ops/gemm/lora/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from slipstream.device.streams import execute_in_parallel
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
from slipstream.ops.gemm.linear import Activation
from slipstream.ops.gemm.linear.dispatch import FUSED_ACTIVATIONS
from slipstream.ops.gemm.linear.tiles import Chain, Unnormalized
from slipstream.ops.gemm.lora import (
    LoraTiles,
    LoraWeights,
    expand_lora,
    finish_lora,
    finish_lora_add,
    lora_delta,
    shrink_lora,
)
from slipstream.ops.gemm.lora.reference import FEW_TOKENS, has_paired_blocks


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

    def forward(self, x: torch.Tensor, context: ForwardContext | None = None) -> torch.Tensor:
        """x [T, inputs] to [T, outputs]. `context` is None for heads, which run outside the network."""
        return self._multiply(x, self.bias, context)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, context: ForwardContext | None) -> torch.Tensor:
        """The product with the adapters of the step."""
        tiles = self._tiles(context)
        if tiles is None or self.lora is None:
            return self.weight.multiply(x, bias)
        product, shrink = partial(self.weight.multiply, x, bias), partial(shrink_lora, x, self.lora, tiles)
        # many tokens fill the device with either
        out, inner = execute_in_parallel(product, shrink) if len(x) <= FEW_TOKENS else (product(), shrink())
        return expand_lora(out, inner, self.lora, tiles)

    def _tiles(self, context: ForwardContext | None) -> LoraTiles | None:
        """The tokens of the step whose adapter may change this product."""
        return None if context is None or self.lora is None else context.batch.lora

    def activated(self, x: torch.Tensor, activation: Activation, context: ForwardContext | None = None) -> torch.Tensor:
        """activation(product), elementwise."""
        if self._tiles(context) is not None:
            return activation(self.forward(x, context))
        return self.weight.multiply_activated(x, self.bias, activation)

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product with norm(x + residual), in one pass where the weight has one; and x + residual."""
        if type(norm) is RMSNorm and self._tiles(context) is None:
            return self.weight.multiply_normed(x, residual, norm.weight, norm.eps, self.bias, activation)
        normed, total = norm(x, residual)
        out = self.forward(normed, context)
        return out if activation is None else activation(out), total

    def takes_gated(self, x: torch.Tensor, activation: Activation, context: ForwardContext) -> bool:
        """Whether `after_gate` is faster than the activation in the product before. x: the input of that product."""
        return self._tiles(context) is None and self.weight.takes_gated(x, activation)

    def after_gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The product with a gated activation, in one pass where the weight has one. Not for steps with adapters."""
        return self.weight.multiply_gated(gate_up, activation, self.bias)

    @property
    def can_chain(self) -> bool:
        """Whether chains may use `add_to` and `after_unnormalized`."""
        return self.weight.can_chain

    def chain_for(self, x: torch.Tensor) -> Chain:
        """The fastest kind of chain for inputs of as many rows as x has; "": none."""
        return self.weight.chain_for(x)

    @property
    def takes_streaming(self) -> bool:
        """Whether the product can be streamed where `chain_for` says "library", if rows are few."""
        return self.weight.takes_streaming

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        norm: RMSNorm,
        chain: Chain,
        context: ForwardContext,
        gate: Activation | None = None,
    ) -> Unnormalized:
        """residual + product, in the residual's memory, on its way through the norm. Not for a product with a bias.
        `gate`: a gated activation of x, if `takes_gated`."""
        if gate is not None:
            return self.weight.add_gated_to(residual, x, gate, norm.weight, norm.eps)
        tiles = self._tiles(context)
        if tiles is not None and self.lora is not None:
            if chain == "streaming" and self._appends(x, self.lora):
                sums = self.weight.multiply_with_adapters(x, self.lora.a)
                return finish_lora_add(sums, self.lora, tiles, residual, norm.weight, norm.eps)
            # before the product, whose kernel computes the norm too; its weight is loaded meanwhile
            residual = expand_lora(residual, shrink_lora(x, self.lora, tiles), self.lora, tiles)
        return self.weight.add_to(residual, x, norm.weight, norm.eps, chain)

    def _appends(self, x: torch.Tensor | Unnormalized, lora: LoraWeights) -> bool:
        """Whether one GEMM multiplies x with the weight and with all matrices A."""
        return self.weight.can_append_adapters(x, lora.a)

    def after_unnormalized(
        self, x: Unnormalized, context: ForwardContext, activation: Activation | None = None
    ) -> torch.Tensor:
        """The GEMM with the normed x; the norm is not applied to x yet."""
        tiles = self._tiles(context)
        added = None
        if tiles is not None and self.lora is not None:
            if x.squares is not None and self._finishes(activation) and self._appends(x, self.lora):
                sums = self.weight.multiply_with_adapters(x, self.lora.a)
                return finish_lora(sums, self.lora, tiles, FUSED_ACTIVATIONS[activation])
            # before the product, which adds it before the activation; its weight is loaded meanwhile
            added = lora_delta(shrink_lora(x, self.lora, tiles), self.lora, tiles)
        return self.weight.multiply_unnormalized(x, self.bias, activation, added)

    def _finishes(self, activation: Activation | None) -> bool:
        """Whether `finish_lora` computes what follows the product."""
        assert self.lora is not None
        is_plain = self.bias is None and activation in FUSED_ACTIVATIONS
        return is_plain and (activation is None or has_paired_blocks(self.lora.runs))

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

    def forward(self, x: torch.Tensor, context: ForwardContext | None = None) -> torch.Tensor:
        out = self.ranks.all_reduce(self._multiply(x, None, context))
        return out if self.bias is None else out + self.bias

    def after_gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        out = self.ranks.all_reduce(self.weight.multiply_gated(gate_up, activation, None))
        return out if self.bias is None else out + self.bias

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
