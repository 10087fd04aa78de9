"""Mlp: the feed-forward, gated or plain."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from slipstream.nn.layers.activations import find_activation, find_gated
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import NoNorm, RMSNorm
from slipstream.nn.weight_format import CheckpointTensor, FormatOf, WeightSlot


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
        up_first: bool = False,  # in that tensor
        down_bias: bool | None = None,  # where it is not `bias`
    ) -> None:
        super().__init__()
        self.activation = find_gated(activation)
        gate_up = {"": 2 * ffn_size} if fused else {"gate": ffn_size, "up": ffn_size}
        kind = _UpGate if up_first else Linear
        self.gate_up = kind(hidden_size, gate_up, bias, format_of(f"{name}.gate_up"), dtype)
        down_bias = bias if down_bias is None else down_bias
        self.down = Linear(ffn_size, {"": hidden_size}, down_bias, format_of(f"{name}.down"), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return hidden

    def after_norm(
        self, norm: RMSNorm | NoNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the norm of x + residual; and that sum."""
        hidden, total = norm.then(self.gate_up, x, residual, self.activation)
        return self.down(hidden), total


class PlainMlp(Layer):
    """down(activation(up(x)))."""

    def __init__(
        self, name: str, hidden_size: int, ffn_size: int, activation: str, format_of: FormatOf, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = find_activation(activation)
        self.up = Linear(hidden_size, {"": ffn_size}, True, format_of(f"{name}.up"), dtype)
        self.down = Linear(ffn_size, {"": hidden_size}, True, format_of(f"{name}.down"), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up.weight.multiply_activated(x, self.up.bias, self.activation))
        return hidden


class _UpGate(Linear):
    """Gate and up of a checkpoint that has them as one tensor in the other order."""

    def places(self) -> Iterator[tuple[str, WeightSlot]]:
        for name, place in super().places():
            yield name, WeightSlot(place.shape, partial(self._fill_swapped, place), place.num_bytes)

    def _fill_swapped(self, place: WeightSlot, piece: CheckpointTensor) -> None:
        place.fill(_Swapped(piece))


class _Swapped:
    """A piece whose halves have changed places."""

    blocks = None

    def __init__(self, piece: CheckpointTensor) -> None:
        self.shape, self.kind, self._whole = piece.shape, piece.kind, piece

    def read(self) -> torch.Tensor:
        return torch.cat(self._whole.read().chunk(2)[::-1])

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self.read())
