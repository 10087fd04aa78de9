"""LayerGemms: the GEMMs from one attention to the next, and whether one kernel has their sizes (`layer.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream.ops.gemm.quantized.matrix import QuantizedMatrix

PROGRAMS = 128  # that run at once, one per multiprocessor
SPLITS = 2  # split-k of o and down: each program has one block of 64 outputs
MAX_IDLE = 0.1  # share of the programs that are idle in the last turn of gate and up


class LayerGemms(NamedTuple):
    """The GEMMs in their order, and the norms before the second and the fourth. After the last attention there is no
    fourth, and its norm is that of the hidden states."""

    o: QuantizedMatrix
    gate_up: QuantizedMatrix
    down: QuantizedMatrix
    next_qkv: QuantizedMatrix | None
    feed_norm: torch.Tensor
    feed_eps: float
    next_norm: torch.Tensor
    next_eps: float

    @property
    def fits(self) -> bool:
        """Whether the kernel has the sizes. It was measured with those of Qwen3-8B: others would need other splits, or
        leave programs idle."""
        hidden, feed = len(self.o.values), len(self.gate_up.values) // 2
        if hidden * SPLITS != 64 * PROGRAMS or len(self.down.values) != hidden:
            return False
        if self.next_qkv is not None and len(self.next_qkv.values) % 64:
            return False
        turns = -(-feed // (32 * PROGRAMS))
        is_busy = feed >= (1 - MAX_IDLE) * turns * 32 * PROGRAMS
        parts = (self.o.num_columns / SPLITS, feed / SPLITS)
        return is_busy and all(part % 1024 == 0 and part <= 8192 for part in parts)

    @property
    def are_fp8(self) -> bool:
        """Whether all weights are FP8 with a scale per row, as TMA loads them."""
        return all(
            weight.takes_fp8_inputs
            and weight.scale.shape[1] == 1
            and weight.values.is_contiguous()
            and weight.scale.is_contiguous()
            and weight.values.data_ptr() % 16 == 0
            for weight in self[:4]
            if weight is not None
        )
