"""WeightFormat: how a weight is stored and multiplied.

`Linear` and `Embedding` hold a `Weight` and know nothing of its format. The format is chosen per weight when the
checkpoint is opened, since a file may mix several. A format joins as one more `WeightFormat`: `Unquantized` is here,
and `nn/low_bit_weight.py` has one whose `Weight.fill` keeps the checkpoint's blocks instead of reading them as numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from slipstream.ops.linear import (
    Activation,
    activated_linear,
    add_product,
    chain_for,
    linear,
    norm_linear,
    normed_product,
)
from slipstream.ops.linear.unnormalized import Chain, Unnormalized
from slipstream.ops.norm import add_rms_norm, rms_norm
from slipstream.ops.weight_rows import WeightRows, dense_rows


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint that was not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """Its type by the file's own name: F32, BF16, Q4_1 ..."""

    def read(self) -> torch.Tensor:
        """As plain numbers, in whatever dtype and place the checkpoint has them; not to be written to."""

    def write_to(self, target: torch.Tensor) -> None:
        """Likewise, into a tensor of its shape, with little memory beside it."""

    @property
    def blocks(self) -> Callable[[], torch.Tensor] | None:
        """Reads the packed bytes of a GGUF kind instead, [rows, bytes of a row] uint8; None where there are none."""


class Weight(nn.Module, ABC):
    """A matrix [rows, columns] in some format, filled piece by piece."""

    @abstractmethod
    def fill(self, first_row: int, piece: CheckpointTensor) -> None:
        """Put a piece of the checkpoint at these rows."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, columns] to [T, rows]."""

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        activation: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product with the RMS norm of x + residual, through the activation if there is one, and that sum."""
        if residual is None:
            normed, total = rms_norm(x, norm, eps), x
        else:
            normed, total = add_rms_norm(x, residual, norm, eps)
        out = self.multiply(normed, bias)
        return out if activation is None else activation(out), total

    def multiply_activated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """The product, through an activation of each of its numbers."""
        return activation(self.multiply(x, bias))

    can_chain = False
    """Whether chains may use the three methods below. The defaults are right and not fast."""

    def chain_for(self, x: torch.Tensor) -> Chain:
        """The fastest kind of chain for inputs of as many rows as x has; "": products one by one are faster."""
        return ""

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float, chain: Chain
    ) -> Unnormalized:
        """residual + product, in the residual's memory, on its way through an RMS norm."""
        return Unnormalized(residual.add_(self.multiply(x, None)), norm, eps)

    def multiply_unnormalized(
        self, x: Unnormalized, bias: torch.Tensor | None, activation: Activation | None
    ) -> torch.Tensor:
        """The product with the norm of x, through the activation if there is one. x must have no `squares`: they come
        from the `add_to` of a "streamed" chain, which this weight did not offer."""
        assert x.squares is None, "a streamed chain holds a weight that does not stream"
        out = self.multiply(rms_norm(x.total, x.norm, x.eps), bias)
        return out if activation is None else activation(out)

    @abstractmethod
    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by their numbers: [T] to [T, columns]."""

    def num_bytes(self, piece: CheckpointTensor) -> int:
        """Memory that filling takes for this piece, beyond the parameters that are laid out already."""
        return 0

    def runs_for_kernels(self) -> list[WeightRows] | None:
        """Its rows as our C kernels read them; None if they do not take it."""
        return None


class WeightFormat(Protocol):
    @property
    def batch_invariant(self) -> bool:
        """Whether products of a row have the same bits in every batch."""

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        """An unfilled weight on torch's current default device."""


FormatOf = Callable[[str], WeightFormat]
"""The format of a weight by its name in the model."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one tensor of a checkpoint goes: a whole parameter, or some rows of a merged one."""

    shape: tuple[int, ...]
    fill: Callable[[CheckpointTensor], None]
    num_bytes: Callable[[CheckpointTensor], int] = lambda piece: 0  # as `Weight.num_bytes`


@dataclass(frozen=True, slots=True)
class Unquantized:
    """Numbers of one dtype, multiplied as they are."""

    dtype: torch.dtype
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return UnquantizedWeight(num_rows, num_columns, self.dtype)


class UnquantizedWeight(Weight):
    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.data = new_parameter(num_rows, num_columns, dtype=dtype)

    def fill(self, first_row: int, piece: CheckpointTensor) -> None:
        piece.write_to(self.data[first_row : first_row + piece.shape[0]])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, self.data, bias)

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        activation: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_linear(x, residual, norm, eps, self.data, bias, activation)

    def multiply_activated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        return activated_linear(x, self.data, bias, activation)

    can_chain = True

    def chain_for(self, x: torch.Tensor) -> Chain:
        return chain_for(x, self.data)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float, chain: Chain
    ) -> Unnormalized:
        return add_product(chain, x, self.data, residual, norm, eps)

    def multiply_unnormalized(
        self, x: Unnormalized, bias: torch.Tensor | None, activation: Activation | None
    ) -> torch.Tensor:
        return normed_product(x, self.data, bias, activation)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.data.index_select(0, ids)

    def runs_for_kernels(self) -> list[WeightRows] | None:
        run = dense_rows(self.data)
        return None if run is None else [run]


def new_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Unfilled, and never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def take_memory(model: nn.Module, device: torch.device) -> None:
    """Give a model that was laid out on the meta device memory that holds nothing yet.

    `Module.to_empty` does the same; it goes through torch's symbolic shapes, whose imports take over a second.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            with device:
                setattr(module, name, new_parameter(*parameter.shape, dtype=parameter.dtype))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
