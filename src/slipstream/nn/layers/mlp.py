"""Mlp: the gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.errors import UnsupportedModel
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.quant import FormatOf
from slipstream.ops.activation import gelu_tanh_and_mul, silu_and_mul

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
    "gelu_new": gelu_tanh_and_mul,
}


class Mlp(Layer):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        ffn_size: int,
        activation: str,
        bias: bool,
        fused: bool,  # the checkpoint has gate and up as one tensor
        format_of: FormatOf,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(f"the activation {activation} is not one we have: {', '.join(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[activation]
        gate_up = {"": 2 * ffn_size} if fused else {"gate": ffn_size, "up": ffn_size}
        self.gate_up = Linear(hidden_size, gate_up, bias, format_of(f"{name}.gate_up"), dtype)
        self.down = Linear(ffn_size, {"": hidden_size}, bias, format_of(f"{name}.down"), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return hidden
