"""QueryScaleTable: a factor of the queries by their position, looked up once per step for all layers."""

from __future__ import annotations

import torch

from slipstream.nn.layers.layer import Layer
from slipstream.nn.shapes import QueryScale


class QueryScaleTable(Layer):
    def __init__(self, shape: QueryScale, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("table", torch.empty(num_positions, 1, 1, dtype=dtype))

    table: torch.Tensor

    def fill(self) -> None:
        """Compute the table on the host, so that all devices have the same."""
        positions = torch.arange(len(self.table), dtype=torch.float32)
        factors = 1 + self.shape.beta * torch.log(1 + torch.floor(positions / self.shape.length))
        self.table = factors.view(-1, 1, 1).to(self.table.dtype).to(self.table.device)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] to [T, 1, 1]."""
        return self.table.index_select(0, positions)
