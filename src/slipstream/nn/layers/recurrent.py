"""Mamba2, Mamba1 and ShortConv: mixers whose state is a ring of inputs of a convolution, and a matrix for a scan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import (
    InterleavedLinear,
    Linear,
    Products,
    SplitProjection,
    StoredRows,
    new_output,
)
from slipstream.nn.layers.norm import Norm, RMSNorm, ShardedGatedNorm
from slipstream.nn.shapes import DeltaShape, MixerShape, NormShape, Shard, has_only
from slipstream.nn.ssm_shapes import Mamba1Shape, Mamba2Shape, ShortConvShape
from slipstream.nn.weights.stored_part import even_part, joined_part
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    StoredPart,
    UnquantizedWeight,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.elementwise import gated_group_norm, gated_rms_norm
from slipstream.ops.gemm.linear import linear
from slipstream.ops.recurrent import (
    DeltaWeights,
    SelectiveWeights,
    SsdWeights,
    causal_conv1d,
    delta_decode,
    delta_gates,
    delta_replay_,
    gated_delta_rule,
    selective_scan,
    ssd_scan,
)
from slipstream.ops.recurrent.delta_rule import project_on_two_streams, takes_two_streams

# ConvMixer: what recurrent mixers with a short convolution share: two projections, the convolution, weight targets.


class ConvMixer(Layer):
    """One projection, a convolution and more between, and one projection to the hidden size."""

    shape: MixerShape
    input: Linear
    output: Linear
    stored_parts: Mapping[str, StoredPart] | None = None  # of a rank that has some channels; None: it has all

    known: set[str]  # fields of the shape that all its kernels implement, beside those of every mixer

    def __init__(
        self, shape: MixerShape, site: int | None, num_channels: int, width: int, bias: bool, dtype: torch.dtype
    ) -> None:
        """`site`: the state site; the arguments after it describe the convolution."""
        super().__init__()
        assert site is not None, "a recurrent mixer needs a state site"
        known = self.known | {"name", "output_scale", "shard", "conv_width"}
        assert has_only(shape, known), f"{type(self).__name__} does not implement all of {shape}"
        self.site = site
        self.conv = new_parameter(num_channels, width, dtype=dtype)
        self.conv_bias = new_parameter(num_channels, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor, context: ForwardContext, last: LastTokens | None = None) -> torch.Tensor:
        """x [T, hidden] to [T, hidden], or to [B, hidden] of the `last` tokens."""
        split = None if last is None else self.split(x, context, last)
        mixed = self.mix(self.input(x, context) if split is None else split, context, last)
        projected: torch.Tensor = self.output(mixed, context_of(context, last))
        return projected

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        if last is not None and self.can_split:
            normed, total = norm(x, residual)
            return self(normed, context, last), last.of(total)
        projected, total = self.input.after_norm(norm, x, residual, context)
        mixed = self.mix(projected, context, last)
        return self.output(mixed, context_of(context, last)), total if last is None else last.of(total)

    def products(self) -> Products | None:
        if self.shape.shard is not None:
            return None
        split = self.split if self.can_split else None
        return Products(self.shape, self.input, self.output, mix=self.mix, split=split)

    can_split = False
    """Whether `split` may return anything."""

    def split(self, normed: torch.Tensor, context: ForwardContext, last: LastTokens) -> SplitProjection | None:
        """The first product of all tokens where the state needs them, and of the last tokens elsewhere; None: not for
        this step or this weight."""
        return None

    def mix(
        self, projected: torch.Tensor | SplitProjection, context: ForwardContext, last: LastTokens | None = None
    ) -> torch.Tensor:
        """The part between the two projections. All tokens change the state, `last` or not."""
        raise NotImplementedError

    def own(self) -> dict[str, str]:
        """Parameters that the checkpoint stores as they are: name of the target to attribute."""
        return {}

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        num_channels, width = self.conv.shape
        yield "conv.weight", WeightTarget((num_channels, 1, width), self._fill_conv)
        names = self.own() | ({} if self.conv_bias is None else {"conv.bias": "conv_bias"})
        for name, attribute in names.items():
            yield name, WeightTarget(tuple(getattr(self, attribute).shape), partial(self._fill, attribute))

    def _fill_conv(self, piece: CheckpointTensor) -> None:
        self.conv.copy_(piece.read()[:, 0])

    def _fill(self, attribute: str, piece: CheckpointTensor) -> None:
        piece.write_to(getattr(self, attribute))


class Mamba2(ConvMixer):
    """The state of a row: "conv", a ring of inputs of the convolution, and "ssm", a matrix per head. One product makes
    the gate, x, b, c and dt."""

    shape: Mamba2Shape
    known = {"num_heads", "head_dim", "num_groups", "state_size", "conv_bias", "input_bias", "output_bias", "dt_min"}
    known |= {"dt_max", "norm", "norm_groups", "num_groups_of_all", "num_wide_norm_groups", "part_scales"}

    def __init__(self, name: str, shape: Mamba2Shape, norm: NormShape, site: int | None, layout: Layout) -> None:
        """`norm` gives the eps of the gated norm."""
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(shape, site, shape.num_channels, shape.conv_width, shape.conv_bias, dtype)
        self.shape = shape
        self.eps = norm.eps
        num_outputs = shape.size + shape.num_channels + shape.num_heads
        self.input = Linear(hidden, {"": num_outputs}, shape.input_bias, format_of(f"{name}.input"), dtype)
        output_format = format_of(f"{name}.output")
        self.output = new_output(shape.size, hidden, shape.output_bias, output_format, dtype, shape.shard)
        wide = torch.promote_types(dtype, torch.float32)
        self.a_log, self.dt_bias, self.d = (new_parameter(shape.num_heads, dtype=wide) for _ in range(3))
        self.norm = None if shape.norm == "none" else new_parameter(shape.size, dtype=dtype)
        self.wide_norm: ShardedGatedNorm | None = None
        if shape.shard is not None:
            self._divide(shape.shard)

    def _divide(self, shard: Shard) -> None:
        """Sets the parts of the checkpoint's tensors that a rank has: its heads, and the groups that these read."""
        shape = self.shape
        first = shard.rank * shape.num_groups_of_all // shard.size
        groups = StoredPart(((first, shape.num_groups),), shape.num_groups_of_all).times(shape.state_size)
        size, heads = even_part(shape.size, shard), even_part(shape.num_heads, shard)
        channels = joined_part([size, groups, groups])
        self.input.stored_parts = {"": joined_part([size, channels, heads])}
        self.stored_parts = {"conv": channels, "a_log": heads, "dt_bias": heads, "d": heads, "norm": size}
        if shape.num_wide_norm_groups and self.norm is not None:
            norm_first = shape.norm == "norm_first"
            self.wide_norm = ShardedGatedNorm(shape.size, shape.num_wide_norm_groups, self.eps, norm_first, shard)

    can_split = True

    def split(self, normed: torch.Tensor, context: ForwardContext, last: LastTokens) -> SplitProjection | None:
        """The gate of a token changes its own output only."""
        weight = self.input.weight
        if type(weight) is not UnquantizedWeight or context.batch.lora is not None:
            return None
        size, bias = self.shape.size, self.input.bias
        gate_bias, other_bias = (None, None) if bias is None else (bias[:size], bias[size:])
        kept = linear(normed, weight.rows(size, len(weight.data)), other_bias)
        return SplitProjection(kept, linear(last.of(normed), weight.rows(0, size), gate_bias))

    def mix(
        self, projected: torch.Tensor | SplitProjection, context: ForwardContext, last: LastTokens | None = None
    ) -> torch.Tensor:
        shape, steps, state = self.shape, context.recurrent, context.states[self.site]
        assert steps is not None
        if isinstance(projected, SplitProjection):
            rest, gate = projected
        else:
            gate, rest = projected.split([shape.size, shape.num_channels + shape.num_heads], 1)
        parts = [shape.size, shape.group_size, shape.group_size, shape.num_heads]
        for part, scale in zip((gate, *rest.split(parts, 1)), shape.part_scales, strict=True):
            if scale != 1.0:
                part.mul_(scale)
        inner, dt = rest.split([shape.num_channels, shape.num_heads], 1)
        mixed = causal_conv1d(inner, self.conv, self.conv_bias, state["conv"], steps, "silu")
        x, b, c = mixed.split([shape.size, shape.group_size, shape.group_size], 1)
        x = x.unflatten(1, (-1, shape.head_dim))
        b, c = (part.unflatten(1, (-1, shape.state_size)) for part in (b, c))
        weights = SsdWeights(self.a_log, self.dt_bias, self.d, shape.dt_min, shape.dt_max)
        out = ssd_scan(x, dt, b, c, weights, state["ssm"], steps, state.get("replay")).flatten(1)
        if last is not None:
            out = last.of(out)
            gate = gate if isinstance(projected, SplitProjection) else last.of(gate)
        if self.wide_norm is not None:
            normed: torch.Tensor = self.wide_norm(out, gate, self.norm)
            return normed
        return gated_group_norm(out, gate, self.norm, self.eps, shape.norm_groups, shape.norm == "norm_first")

    def own(self) -> dict[str, str]:
        names = {name: name for name in ("a_log", "dt_bias", "d")}
        return names if self.norm is None else names | {"norm.weight": "norm"}


class Mamba1(ConvMixer):
    """The state of a row: "conv", a ring of inputs of the convolution, and "ssm", a matrix. One product makes x and the
    gate z; dt, b and c are projections of x behind the convolution."""

    shape: Mamba1Shape
    known = {"size", "state_size", "dt_rank", "conv_bias", "bias", "norms"}

    def __init__(self, name: str, shape: Mamba1Shape, norm: NormShape, site: int | None, layout: Layout) -> None:
        """`norm` gives the eps of the norms of dt, b and c."""
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(shape, site, shape.size, shape.conv_width, shape.conv_bias, dtype)
        self.shape = shape
        sizes = {"dt": shape.dt_rank, "b": shape.state_size, "c": shape.state_size}
        self.input = Linear(hidden, {"": 2 * shape.size}, shape.bias, format_of(f"{name}.input"), dtype)
        self.output = new_output(shape.size, hidden, shape.bias, format_of(f"{name}.output"), dtype, shape.shard)
        selected_format = format_of(f"{name}.selected")
        self.selected = new_output(shape.size, sum(sizes.values()), False, selected_format, dtype, shape.shard)
        self.dt = Linear(shape.dt_rank, {"": shape.size}, False, format_of(f"{name}.dt"), dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.a_log = new_parameter(shape.size, shape.state_size, dtype=wide)
        self.dt_bias, self.d = (new_parameter(shape.size, dtype=wide) for _ in range(2))
        self.norms = torch.nn.ModuleDict(
            {part: RMSNorm(size, norm.eps, dtype) for part, size in sizes.items() if shape.norms}
        )
        if shape.shard is not None:  # each rank has some channels; dt, b and c are sums over all of them
            size_part = even_part(shape.size, shape.shard)
            self.input.stored_parts = {"": joined_part([size_part, size_part])}
            self.dt.stored_parts = {"": size_part}
            self.stored_parts = dict.fromkeys(("conv", "a_log", "dt_bias", "d"), size_part)

    def mix(self, projected: torch.Tensor, context: ForwardContext, last: LastTokens | None = None) -> torch.Tensor:
        shape, steps, state = self.shape, context.recurrent, context.states[self.site]
        assert steps is not None
        x, z = projected.split(shape.size, 1)
        x = causal_conv1d(x, self.conv, self.conv_bias, state["conv"], steps, "silu")
        parts = [shape.dt_rank, shape.state_size, shape.state_size]
        dt, b, c = self.selected(x, context).split(parts, 1)
        if shape.norms:
            dt, b, c = (self.norms[name](part.contiguous())[0] for name, part in (("dt", dt), ("b", b), ("c", c)))
        weights = SelectiveWeights(self.a_log, self.dt_bias, self.d)
        sizes = self.dt(dt.contiguous(), context)
        out = selective_scan(x, sizes, b, c, z, weights, state["ssm"], steps, state.get("replay"))
        return out if last is None else last.of(out)

    def own(self) -> dict[str, str]:
        return {name: name for name in ("a_log", "dt_bias", "d")}


class ShortConv(ConvMixer):
    """The state of a row is "conv", a ring of inputs of the convolution. One product makes b, c and x."""

    shape: ShortConvShape
    known = {"size", "bias"}

    def __init__(self, name: str, shape: ShortConvShape, norm: NormShape, site: int | None, layout: Layout) -> None:
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(shape, site, shape.size, shape.conv_width, shape.bias, dtype)
        self.shape = shape
        self.input = Linear(hidden, {"": 3 * shape.size}, shape.bias, format_of(f"{name}.input"), dtype)
        self.output = new_output(shape.size, hidden, shape.bias, format_of(f"{name}.output"), dtype, shape.shard)
        if shape.shard is not None:
            part = even_part(shape.size, shape.shard)
            self.input.stored_parts = {"": joined_part([part] * 3)}
            self.stored_parts = {"conv": part}

    def mix(self, projected: torch.Tensor, context: ForwardContext, last: LastTokens | None = None) -> torch.Tensor:
        steps, state = context.recurrent, context.states[self.site]
        assert steps is not None
        b, c, x = projected.chunk(3, 1)
        mixed = causal_conv1d(b * x, self.conv, self.conv_bias, state["conv"], steps)
        return c * mixed if last is None else last.of(c) * last.of(mixed)


# DeltaNet: linear attention by the gated delta rule, with a short convolution before it and a gated norm after it.


class DeltaNet(ConvMixer):
    """The state of a row is a ring of the convolution's inputs ("conv") and a matrix per value head ("delta").

    One product makes q, k, v, the output gate z, and the inputs b and a of the gates.
    """

    shape: DeltaShape
    known = {"num_key_heads", "num_value_heads", "key_dim", "value_dim", "interleaved"}

    def __init__(self, name: str, shape: DeltaShape, norm: NormShape, site: int | None, layout: Layout) -> None:
        """`site`: the state site. `norm` gives the eps of the norm of outputs."""
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(shape, site, shape.num_channels, shape.conv_width, False, dtype)
        self.shape = shape
        self.eps = norm.eps
        keys, values, heads = shape.key_size, shape.value_size, shape.num_value_heads
        parts = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
        self.input = InterleavedLinear(hidden, parts, _stored(shape), False, format_of(f"{name}.input"), dtype)
        self.output = new_output(values, hidden, False, format_of(f"{name}.output"), dtype, shape.shard)
        if shape.shard is not None:
            channels, of_heads = _shard_input(self.input, shape, shape.shard)
            self.stored_parts = {"conv": channels, "a_log": of_heads, "dt_bias": of_heads}
        wide = torch.promote_types(dtype, torch.float32)
        self.a_log = new_parameter(heads, dtype=wide)
        self.dt_bias = new_parameter(heads, dtype=wide)
        self.norm = new_parameter(shape.value_dim, dtype=dtype)

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        rows = self._weight_rows() if takes_two_streams(x) and context.batch.lora is None else None
        if rows is None:
            return super().after_norm(norm, x, residual, context, last)
        normed, total = norm(x, residual)
        mixed = self._mix(*project_on_two_streams(normed, *rows), context, last)
        return self.output(mixed, context_of(context, last)), total if last is None else last.of(total)

    def _weight_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The weights of q, k, v and z, and those of b and a; None if the format has no rows to take apart."""
        weight = self.input.weight
        if type(weight) is not UnquantizedWeight:
            return None
        num_rows = len(weight.data)
        first_gate = num_rows - 2 * self.shape.num_value_heads
        return weight.rows(0, first_gate), weight.rows(first_gate, num_rows)

    def mix(self, projected: torch.Tensor, context: ForwardContext, last: LastTokens | None = None) -> torch.Tensor:
        """The part between the two projections, to [T, value size]. All tokens change the state, `last` or not."""
        num_gates = 2 * self.shape.num_value_heads
        qkvz, gates = projected.split([projected.shape[1] - num_gates, num_gates], 1)
        return self._mix(qkvz, gates, context, last)

    def _mix(
        self, qkvz: torch.Tensor, gates: torch.Tensor, context: ForwardContext, last: LastTokens | None
    ) -> torch.Tensor:
        shape, steps, state = self.shape, context.recurrent, context.states[self.site]
        assert steps is not None
        qkv, z = qkvz.split([shape.num_channels, shape.value_size], 1)
        b, a = gates.split(shape.num_value_heads, 1)
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.norm, self.eps)
        deferred = state.get("deferred")
        if steps.is_single:
            replay = state.get("replay")
            out = delta_decode(qkv, z, b, a, weights, state["conv"], state["delta"], steps, replay, deferred)
            return out if last is None else last.of(out)
        if steps.drafts is not None:
            delta_replay_(state["delta"], state["conv"], state["replay"], weights, steps)
        mixed = causal_conv1d(qkv, self.conv, None, state["conv"], steps, "silu")
        q, k, v = mixed.split([shape.key_size, shape.key_size, shape.value_size], 1)
        q, k = (part.unflatten(1, (-1, shape.key_dim)) for part in (q, k))
        v, z = (part.unflatten(1, (-1, shape.value_dim)) for part in (v, z))
        g, beta = delta_gates(a, b, self.a_log, self.dt_bias)
        out = gated_delta_rule(q, k, v, g, beta, state["delta"], steps, shape.key_dim**-0.5, deferred=deferred)
        if last is not None:
            out, z = last.of(out), last.of(z)
        return gated_rms_norm(out, z, self.norm, self.eps).flatten(1)

    def own(self) -> dict[str, str]:
        return {"a_log": "a_log", "dt_bias": "dt_bias", "norm.weight": "norm"}


def _shard_input(linear: Linear, shape: DeltaShape, shard: Shard) -> tuple[StoredPart, StoredPart]:
    """Sets the rows of a rank's heads in the tensors of the first product. Returns those of the channels of the
    convolution, and of what has a number for each value head."""
    keys, values, heads = (even_part(n, shard) for n in (shape.key_size, shape.value_size, shape.num_value_heads))
    channels = joined_part([keys, keys, values])
    if shape.interleaved:
        qkvz = even_part(shape.num_channels + shape.value_size, shard)
        linear.stored_parts = {"qkvz": qkvz, "ba": even_part(2 * shape.num_value_heads, shard)}
    else:
        linear.stored_parts = {"qkv": channels, "z": values, "b": heads, "a": heads}
    return channels, heads


def _stored(shape: DeltaShape) -> dict[str, StoredRows]:
    if shape.interleaved:
        groups = shape.num_key_heads
        return {"qkvz": StoredRows(groups, ("q", "k", "v", "z")), "ba": StoredRows(groups, ("b", "a"))}
    plain = {"qkv": StoredRows(1, ("q", "k", "v"))}
    return plain | {part: StoredRows(1, (part,)) for part in ("z", "b", "a")}
