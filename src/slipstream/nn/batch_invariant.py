"""BatchInvariant: weights whose GEMMs give a row the same bits in every batch, for `--deterministic`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.nn.weight_format import UnquantizedWeight, Weight
from slipstream.ops.linear import Activation


@dataclass(frozen=True, slots=True)
class BatchInvariant:
    dtype: torch.dtype
    batch_invariant: bool = True

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return BatchInvariantWeight(num_rows, num_columns, self.dtype)


class BatchInvariantWeight(UnquantizedWeight):
    can_chain = False  # which kernels a chain uses depends on the number of rows

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from slipstream.ops.linear.triton.batch_invariant import (
            batch_invariant_linear,  # needs triton; attention/choose.py checks that it is installed
        )

        return batch_invariant_linear(x, self.data, bias)

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        activation: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # not fused: which kernel fuses the norm depends on the number of rows
        return Weight.multiply_normed(self, x, residual, norm, eps, bias, activation)

    def multiply_activated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        return Weight.multiply_activated(self, x, bias, activation)
