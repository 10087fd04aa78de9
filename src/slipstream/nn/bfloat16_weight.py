"""Bfloat16: weights of a bfloat16 checkpoint stay bfloat16 in a float32 model on a CPU.

Activations and sums are float32, and the results are those of float32 weights. A step with few tokens is limited by the
time to read the weights, which are half as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from slipstream.base.errors import BadCheckpoint
from slipstream.config.config import ModelConfig
from slipstream.nn.weight_format import CheckpointTensor, Weight, WeightTarget, new_parameter
from slipstream.nn.weights.safetensors import open_folder
from slipstream.ops.linear.bfloat16 import linear_bfloat16
from slipstream.ops.linear.measured import bfloat16_is_faster
from slipstream.ops.weight_rows import WeightRows, dense_rows

KINDS = ("BF16", "bfloat16", "torch.bfloat16")
"""As safetensors and GGUF files, torch files, and tensors in memory name it."""


def stays_bfloat16(config: ModelConfig, device: torch.device) -> bool:
    """Whether every matrix of the checkpoint is bfloat16, and this machine computes at least as fast with them as with
    float32 weights. The C kernels are compiled if necessary."""
    if not config.keeps_bfloat16 or device.type != "cpu" or config.dtype != "float32" or config.deterministic:
        return False
    if config.info.dtype != "bfloat16" or config.load_format != "safetensors" or config.num_ranks > 1:
        return False
    matrices = {tensor.kind for tensor in open_folder(Path(config.path)) if len(tensor.shape) > 1}
    return bool(matrices) and matrices <= set(KINDS) and bfloat16_is_faster()


@dataclass(frozen=True, slots=True)
class Bfloat16:
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return Bfloat16Weight(num_rows, num_columns)


class Bfloat16Weight(Weight):
    refills = True

    def __init__(self, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.data = new_parameter(num_rows, num_columns, dtype=torch.bfloat16)

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self.data.shape[1]), partial(self._fill, first_row))

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        if piece.kind not in KINDS:
            raise BadCheckpoint(
                f"the weights of this model are stored as bfloat16, which would round new ones of {piece.kind}; give "
                'bfloat16 tensors, or start with dtype="float32"'
            )
        piece.write_to(self.data[first_row : first_row + piece.shape[0]])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_bfloat16(x, self.data, bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.data.index_select(0, ids).float()

    def runs_for_kernels(self) -> list[WeightRows] | None:
        run = dense_rows(self.data)
        return None if run is None else [run]
