"""Experts: a feed of several MLPs of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.device.collectives import Group
from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.layer import Layer, Layout, RankedLayer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import Mlp, PlainMlp, of_last
from slipstream.nn.layers.norm import Norm, RMSNorm
from slipstream.nn.shapes import DenseAndExpertsShape, ExpertShape, ExpertShard, MlpShape, Shard, has_only
from slipstream.nn.weights.kinds import BatchInvariant
from slipstream.nn.weights.quantized_weight import Quantized, QuantizedWeight
from slipstream.nn.weights.stored_part import even_part, sliced_target
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    Unquantized,
    UnquantizedWeight,
    Weight,
    WeightFormat,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.gemm.description import NormBefore
from slipstream.ops.gemm.moe import (
    ExpertBiases,
    ExpertMatrices,
    Gate,
    Routing,
    SharedMatrices,
    SharedOutput,
    expert_mlp,
    route,
    unsummed_experts,
)
from slipstream.ops.gemm.quantized import QuantizedExperts
from slipstream.ops.gemm.table import multiply_normed

# fields that all kernels of experts and routers implement
_KNOWN = {"num_experts", "size", "router", "name", "gate", "bias", "router_bias", "correction_bias", "shared"}
_KNOWN |= {"shared_gate", "latent_size", "latent_bias", "shard"}
_KNOWN_OF_ROUTER = {"top_k", "scores", "renormalize", "scale", "num_groups", "kept_groups", "group_score", "epsilon"}


class Experts(RankedLayer):
    """sum of weight * down(gate and up of x, combined) over a token's experts, plus the shared expert if there is one.

    Weights of all experts are stacked: [experts, 2 * size, hidden] and [experts, hidden, size], in the model's dtype or
    quantised.
    Experts without gates have half as many rows in the first. With a shard, they are those of this rank. With a latent
    size, it is their hidden size: they run between two projections, which are whole on every rank.
    """

    leaves_sum = False  # whether `after_norm` may return `UnsummedExperts`

    def __init__(self, name: str, shape: ExpertShape, layout: Layout) -> None:
        super().__init__()
        assert has_only(shape, _KNOWN), f"experts do not implement all of {shape}"
        assert has_only(shape.router, _KNOWN_OF_ROUTER), f"routers do not implement all of {shape.router}"
        self.shape = shape
        hidden, dtype = layout.hidden_size, layout.dtype
        width = self.width = shape.latent_size or hidden
        format = layout.format_of(f"{name}.experts")
        self.batch_invariant = format.batch_invariant
        plain: WeightFormat = BatchInvariant(dtype) if self.batch_invariant else Unquantized(dtype)
        self.router = Linear(hidden, {"": shape.num_experts}, shape.router_bias, plain, dtype)
        self.correction_bias = new_parameter(shape.num_experts, dtype=_wide(dtype)) if shape.correction_bias else None
        self.parts = ("up",) if shape.gate == "relu2" else ("gate", "up")
        self.first, count = (0, shape.num_experts) if shape.shard is None else shape.shard.range_of(shape.num_experts)
        self.num_own = count
        self.size = shape.size
        if shape.shard is not None and shape.shard.kind == "inner":
            self.size //= shape.shard.size
        num_rows = len(self.parts) * self.size
        self.gate_up = self._new_matrices(format, count, num_rows, width, dtype)
        self.down = self._new_matrices(format, count, width, self.size, dtype)
        self.gate_up_bias = new_parameter(count, num_rows, dtype=dtype) if shape.bias else None
        self.down_bias = new_parameter(count, width, dtype=dtype) if shape.bias else None
        self.into_latent: Linear | None = None
        self.from_latent: Linear | None = None
        if shape.latent_size:
            into, back = (layout.format_of(f"{name}.{part}") for part in ("into_latent", "from_latent"))
            self.into_latent = Linear(hidden, {"": width}, shape.latent_bias, into, dtype)
            self.from_latent = Linear(width, {"": hidden}, shape.latent_bias, back, dtype)
        self.shared: Mlp | PlainMlp | None = None
        if shape.shared is not None:
            self.shared = (Mlp if shape.shared.gated else PlainMlp)(f"{name}.shared", shape.shared, layout)
        self.shared_gate = Linear(hidden, {"": 1}, False, plain, dtype) if shape.shared_gate else None

    def _new_matrices(
        self, format: WeightFormat, count: int, num_rows: int, num_columns: int, dtype: torch.dtype
    ) -> nn.Parameter | Weight:
        if not isinstance(format, Quantized):
            return new_parameter(count, num_rows, num_columns, dtype=dtype)
        return new_expert_weight(format, count, num_rows, num_columns)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self._run_all(x, self.router(x, context), context)

    def _run_all(self, x: torch.Tensor, logits: torch.Tensor, context: ForwardContext) -> Any:
        """The routed experts by router logits [T, experts], and the shared one: their sum, [T, hidden], or
        `UnsummedExperts`."""
        routing = self.choose(logits, context)
        shared = None if self.shared is None else partial(self._run_shared, x, context)
        if self.leaves_sum and self.shape.shard is None and self.from_latent is None:
            unsummed = unsummed_experts(x, routing, *self._matrices(), shared)
            if unsummed is not None:
                return unsummed
        return self.run(x, routing, context, shared)

    def _shared_matrices(self, context: ForwardContext) -> SharedMatrices | None:
        """The weights of the shared expert; None if it is unlike the routed ones."""
        shape, shared, gate = self.shape, self.shared, self.shared_gate
        if not isinstance(shared, Mlp) or shape.shared is None or context.batch.lora is not None:
            return None
        plain = MlpShape(size=self.size, activation=shape.gate, name="")
        if replace(shape.shared, name="", fused=False, up_first=False) != plain:
            return None
        weights = [linear.weight for linear in (shared.gate_up, shared.down, *(() if gate is None else (gate,)))]
        if any(type(weight) is not UnquantizedWeight for weight in weights):
            return None
        return SharedMatrices(weights[0].data, weights[1].data, None if gate is None else weights[2].data)

    def _run_shared(self, x: torch.Tensor, context: ForwardContext) -> SharedOutput:
        assert self.shared is not None
        gate = None if self.shared_gate is None else self.shared_gate(x, context)
        return SharedOutput(self.shared(x, context), gate)

    def choose(self, logits: torch.Tensor, context: ForwardContext) -> Routing:
        """Experts of each token from router logits [T, experts]. In steps of one token per row, which may be padded to
        the size of a graph, padding has none: it would have weights read for nothing."""
        batch, slots, page_size = context.batch, None, 0
        if batch.slots and context.caches and batch.num_single == len(logits):
            slots, page_size = batch.slots[0], context.caches[0][0].shape[1]
        return route(logits, self.shape.router, self.correction_bias, slots, page_size)

    def run(
        self,
        x: torch.Tensor,
        routing: Routing,
        context: ForwardContext,
        shared: Callable[[], SharedOutput] | None = None,
    ) -> torch.Tensor:
        """The routed experts, and the shared one if given."""
        if self.shape.shard is None and self.from_latent is None:
            return self._compute(x, routing, shared, None if shared is None else self._shared_matrices(context))
        if self.into_latent is None or self.from_latent is None:
            routed = self._run_routed(x, routing, context)
        else:
            routed = self.from_latent(self._run_routed(self.into_latent(x, context), routing, context), context)
        return routed if shared is None else shared().added_to(routed)

    def _run_routed(self, x: torch.Tensor, routing: Routing, context: ForwardContext) -> torch.Tensor:
        shard, num_experts, num_exchanged = self.shape.shard, self.shape.num_experts, context.exchanged_tokens
        if shard is None:
            return self._compute(x, routing)
        return run_on_ranks(x, routing, self._compute, shard, num_experts, self.ranks, num_exchanged)

    def _compute(
        self,
        x: torch.Tensor,
        routing: Routing,
        shared: Callable[[], SharedOutput] | None = None,
        shared_matrices: SharedMatrices | None = None,
    ) -> torch.Tensor:
        """The experts of this rank."""
        return expert_mlp(x, routing, *self._matrices(), shared, shared_matrices)

    def _matrices(self) -> tuple[ExpertMatrices, ExpertMatrices, bool, ExpertBiases | None, Gate]:
        """The arguments of `expert_mlp` that are the same in every step."""
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = ExpertBiases(self.gate_up_bias, self.down_bias)
        gate_up, down = (
            expert_matrices(matrices, self.num_own) if isinstance(matrices, Weight) else matrices
            for matrices in (self.gate_up, self.down)
        )
        return gate_up, down, self.batch_invariant, biases, self.shape.gate

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        (x, residual), context = of_last(x, residual, last), context_of(context, last)
        if type(norm) is not RMSNorm:
            normed, total = norm(x, residual)
            return self(normed, context), total
        before = NormBefore(norm.weight, norm.eps, residual, is_kept=True)
        logits, total, kept = multiply_normed(self.router.gemm(x, context, norm=before))
        assert kept is not None
        return self._run_all(kept, logits, context), total

    def products(self) -> None:
        return None

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Per expert "experts.3.gate.weight", "experts.3.up.weight", "experts.3.down.weight", and biases likewise; or
        the tensors of a quantised format ("experts.3.gate.scales")."""
        kinds = {"bias": ("gate_up_bias", "down_bias")} if self.shape.bias else {}
        if isinstance(self.gate_up, Weight) and isinstance(self.down, Weight):
            yield from self._quantized_targets(self.gate_up, self.down)
        else:
            kinds["weight"] = ("gate_up", "down")
        for expert in range(self.shape.num_experts):
            for kind, (gate_up, down) in kinds.items():
                for index, part in enumerate(self.parts):
                    first = index * self.size
                    yield f"experts.{expert}.{part}.{kind}", self._target(gate_up, expert, first, self.size)
                yield f"experts.{expert}.down.{kind}", self._target(down, expert)
        if self.correction_bias is not None:
            yield "correction_bias", WeightTarget((self.shape.num_experts,), self._fill_correction)

    def _quantized_targets(self, gate_up: Weight, down: Weight) -> Iterator[tuple[str, WeightTarget]]:
        num_rows = len(self.parts) * self.size
        for expert in range(self.shape.num_experts):
            own = expert - self.first
            for index, part in enumerate(self.parts):
                for kind, target in gate_up.targets(own * num_rows + index * self.size, self.size):
                    yield f"experts.{expert}.{part}.{kind}", self._divided(target, own, 0)
            for kind, target in down.targets(own * self.width, self.width):
                yield f"experts.{expert}.down.{kind}", self._divided(target, own, 1)

    def _divided(self, target: WeightTarget, own: int, dim: int) -> WeightTarget:
        """The target of a quantised expert's tensor; `own`: its number on this rank."""
        shard = self.shape.shard
        if not 0 <= own < self.num_own:
            return WeightTarget(target.shape, _skip)
        if shard is None or shard.kind != "inner":
            return target
        return sliced_target(target, dim, even_part(self.size, Shard(shard.rank, shard.size)))

    def _target(self, name: str, expert: int, first: int = 0, num_rows: int | None = None) -> WeightTarget:
        """Some rows, or all, of one expert's part of a stacked parameter. The tensors of experts of other ranks are not
        read."""
        whole: torch.Tensor = getattr(self, name)
        shape = tuple(whole.shape[1:])
        rows = shape[0] if num_rows is None else num_rows
        if not self.first <= expert < self.first + len(whole):
            return WeightTarget((rows, *shape[1:]), _skip)
        target = WeightTarget((rows, *shape[1:]), partial(self._fill, name, expert - self.first, first, rows))
        shard = self.shape.shard
        if shard is None or shard.kind != "inner":
            return target
        if name == "down_bias":  # added once, by the first rank
            return target if shard.rank == 0 else WeightTarget(target.shape, partial(self._clear, name, expert))
        inner = even_part(self.size, Shard(shard.rank, shard.size))
        return sliced_target(target, 1 if name == "down" else 0, inner)

    def _fill(self, name: str, expert: int, first: int, num_rows: int, piece: CheckpointTensor) -> None:
        whole: torch.Tensor = getattr(self, name)  # read now: the parameter is replaced when it gets memory
        piece.write_to(whole[expert, first : first + num_rows])

    def _clear(self, name: str, expert: int, piece: CheckpointTensor) -> None:
        whole: torch.Tensor = getattr(self, name)
        whole[expert].zero_()

    def _fill_correction(self, piece: CheckpointTensor) -> None:
        assert self.correction_bias is not None
        piece.write_to(self.correction_bias)


def _skip(piece: CheckpointTensor) -> None:
    """Ignore a tensor of an expert that another rank has."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Routers compute in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


# Experts of which each rank has a part: whole experts, or a part of each expert's inner size.
#
# Ranks of one engine (tensor parallel) have the same tokens: each computes its part, and the parts are summed. Engines
# that share experts (data parallel) have tokens of their own. Each gathers the tokens of all, computes its experts for
# them, and gets back the sums of its own tokens. Tokens are padded to the most that an engine has, so all shapes follow
# from the step's joint sizes, no count is read from the device, and the step can be captured.

Compute = Callable[[torch.Tensor, Routing], torch.Tensor]
"""The experts of this rank, for tokens [T, hidden] and their routing to experts of this rank."""


def run_on_ranks(
    x: torch.Tensor,
    routing: Routing,
    compute: Compute,
    shard: ExpertShard,
    num_experts: int,
    group: Group,
    num_exchanged: int,
) -> torch.Tensor:
    """The output of all experts for the tokens x [T, hidden] of this rank. `num_experts`: of all ranks;
    `num_exchanged`: tokens that each engine exchanges, at least T."""
    first, count = shard.range_of(num_experts)
    if shard.kind == "inner":
        return group.all_reduce(compute(x, routing))
    if shard.kind == "experts":
        return group.all_reduce(compute(x, _own_experts(routing, first, count)))
    assert len(x) <= num_exchanged, f"{len(x)} tokens, and engines exchange {num_exchanged}"
    all_x, all_routing = _gather(x, routing, num_experts, group, num_exchanged)
    return group.reduce_scatter(compute(all_x, _own_experts(all_routing, first, count)))[: len(x)]


def _own_experts(routing: Routing, first: int, count: int) -> Routing:
    """The same routing by the numbers of this rank's experts. Choices of other experts become `count`, with weight
    0."""
    ids = routing.ids - first
    is_own = (ids >= 0) & (ids < count)
    return Routing(ids.where(is_own, count), routing.weights.where(is_own, 0.0), has_padding=True)


def _gather(
    x: torch.Tensor, routing: Routing, num_experts: int, group: Group, num_tokens: int
) -> tuple[torch.Tensor, Routing]:
    """Tokens and routing of all engines, in the order of ranks, by one collective over their bytes."""
    missing = num_tokens - len(x)
    ids, weights = routing.ids, routing.weights
    if missing:
        x, weights = F.pad(x, (0, 0, 0, missing)), F.pad(weights, (0, 0, 0, missing))
        ids = F.pad(ids, (0, 0, 0, missing), value=num_experts)  # padding has no expert
    parts = [part.contiguous().view(torch.uint8) for part in (x, weights, ids)]
    gathered = group.all_gather(torch.cat(parts, 1)).split([part.shape[1] for part in parts], 1)
    all_x, all_weights, all_ids = (
        part.contiguous().view(like.dtype) for part, like in zip(gathered, (x, weights, ids), strict=True)
    )
    return all_x, Routing(all_ids, all_weights, has_padding=True)


# DenseAndExperts: the feed-forward of Gemma 4 with experts: an MLP beside experts, each with norms of its own.


class DenseAndExperts(Layer):
    """norm(mlp(normed x)) + norm(experts(norm(x))). The router has a norm of its own, and a scale for each expert."""

    def __init__(self, name: str, shape: DenseAndExpertsShape, layout: Layout) -> None:
        super().__init__()
        hidden, dtype, norm = layout.hidden_size, layout.dtype, shape.norm

        def new_norm() -> RMSNorm:
            return RMSNorm(hidden, norm.eps, dtype, norm.offset)

        self.dense = Mlp(f"{name}.dense", shape.mlp, layout)
        self.dense_out_norm = new_norm()
        self.routed = Experts(f"{name}.routed", shape.experts, layout)
        self.routed_norm = new_norm()
        self.routed_out_norm = new_norm()
        self.router_norm = new_norm()
        self.expert_scale = new_parameter(shape.experts.num_experts, dtype=dtype)
        self.router_scale = hidden**-0.5

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        normed, total = norm(*of_last(x, residual, last))
        context = context_of(context, last)
        dense, _ = self.dense_out_norm(self.dense(normed, context))
        logits = self.routed.router(self.router_norm(total)[0], context) * self.router_scale
        ids, weights, has_padding = self.routed.choose(logits, context)
        known = ids.flatten().clamp(max=len(self.expert_scale) - 1)  # padding has no expert
        scales = self.expert_scale.index_select(0, known).view(ids.shape)
        routed = self.routed.run(self.routed_norm(total)[0], Routing(ids, weights * scales, has_padding), context)
        return dense + self.routed_out_norm(routed)[0], total

    def products(self) -> None:
        return None

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "expert_scale", WeightTarget(tuple(self.expert_scale.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        piece.write_to(self.expert_scale)


# The matrices of quantised experts: one `Weight` whose rows are those of all experts, one below the other.


def new_expert_weight(format: Quantized, num_experts: int, num_rows: int, num_columns: int) -> Weight:
    """`num_rows`: of one expert."""
    weight = format.new_weight(num_experts * num_rows, num_columns)
    if isinstance(weight, QuantizedWeight):
        weight.words = None  # kernels of experts read scales by rows
        weight.allows_order = False  # each expert would need inputs in an order of its own
    return weight


def expert_matrices(weight: Weight, num_experts: int) -> ExpertMatrices:
    """The form that `expert_mlp` reads."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedExperts(weight.whole, num_experts)
    assert isinstance(weight, UnquantizedWeight), "dequantised at load"
    return weight.data.unflatten(0, (num_experts, -1))
