"""DeltaNet: linear attention by the gated delta rule, with a short convolution before it and a gated norm after it."""

from __future__ import annotations

import torch

from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.conv_mixer import ConvMixer
from slipstream.nn.layers.interleaved_linear import InterleavedLinear, StoredRows
from slipstream.nn.layers.layer import Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import Norm
from slipstream.nn.layers.sharded_linear import new_output
from slipstream.nn.shapes import DeltaShape, NormShape, Shard
from slipstream.nn.stored_part import even_part, joined_part
from slipstream.nn.weight_format import StoredPart, UnquantizedWeight, new_parameter
from slipstream.ops.conv1d import causal_conv1d
from slipstream.ops.delta_rule import DeltaWeights, delta_decode, delta_gates, delta_replay_, gated_delta_rule
from slipstream.ops.delta_rule.projections import project_on_two_streams, takes_two_streams
from slipstream.ops.gated_norm import gated_rms_norm


class DeltaNet(ConvMixer):
    """The state of a row is a ring of the convolution's inputs ("conv") and a matrix per value head ("delta").

    One product makes q, k, v, the output gate z, and the inputs b and a of the gates.
    """

    shape: DeltaShape

    def __init__(self, name: str, shape: DeltaShape, norm: NormShape, site: int | None, layout: Layout) -> None:
        """`site`: the state site. `norm` gives the eps of the norm of outputs."""
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        super().__init__(site, shape.num_channels, shape.conv_width, False, dtype)
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
