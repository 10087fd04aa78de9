"""Mamba2, Mamba1 and ShortConv: mixers whose state is a ring of inputs of a convolution, and a matrix for a scan."""

from __future__ import annotations

import torch

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.conv_mixer import ConvMixer
from slipstream.nn.layers.layer import Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import RMSNorm
from slipstream.nn.layers.products import SplitProjection
from slipstream.nn.layers.sharded_linear import new_output
from slipstream.nn.layers.sharded_norm import ShardedGatedNorm
from slipstream.nn.shapes import NormShape, Shard
from slipstream.nn.ssm_shapes import Mamba1Shape, Mamba2Shape, ShortConvShape
from slipstream.nn.stored_part import even_part, joined_part
from slipstream.nn.weight_format import StoredPart, UnquantizedWeight, new_parameter
from slipstream.ops.conv1d import causal_conv1d
from slipstream.ops.gated_norm import gated_group_norm
from slipstream.ops.linear import linear
from slipstream.ops.ssm import SelectiveWeights, SsdWeights, selective_scan, ssd_scan


class Mamba2(ConvMixer):
    """The state of a row: "conv", a ring of inputs of the convolution, and "ssm", a matrix per head. One product makes
    the gate, x, b, c and dt."""

    shape: Mamba2Shape

    def __init__(self, name: str, shape: Mamba2Shape, norm: NormShape, site: int | None, layout: Layout) -> None:
        """`norm` gives the eps of the gated norm."""
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(site, shape.num_channels, shape.conv_width, shape.conv_bias, dtype)
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

    def __init__(self, name: str, shape: Mamba1Shape, norm: NormShape, site: int | None, layout: Layout) -> None:
        """`norm` gives the eps of the norms of dt, b and c."""
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(site, shape.size, shape.conv_width, shape.conv_bias, dtype)
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

    def __init__(self, name: str, shape: ShortConvShape, norm: NormShape, site: int | None, layout: Layout) -> None:
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(site, shape.size, shape.conv_width, shape.bias, dtype)
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
