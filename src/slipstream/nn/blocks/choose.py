"""Which implementations of its blocks a decoder has on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from slipstream.nn.blocks.block import DecoderBlock
from slipstream.nn.blocks.cuda_chain import CudaChain
from slipstream.nn.blocks.fused_cpu import FusedCpu
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.norm import ResidualLayerNorm, RMSNorm


class Implementation(Protocol):
    """Another way to run all blocks of a decoder and its last norm. `tests/nn/blocks/test_contract.py` holds what each
    must do: write keys and values before any row reads them, rows in any order, with any number of threads."""

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        """Embedded tokens [T, hidden] to normed hidden states, as the blocks one by one give them; [B, hidden] if the
        context says `only_last`. x may be overwritten. None: not for this step, and x is unchanged."""


def choose_implementations(
    blocks: Sequence[DecoderBlock], norm: RMSNorm | ResidualLayerNorm, taps: Sequence[int] = ()
) -> tuple[Implementation, ...]:
    """The implementations that can run these blocks, by the parts that the blocks declare. The reference, which runs
    the blocks one by one, takes every step that no implementation takes. `taps`: blocks whose inputs are returned."""
    if not isinstance(norm, RMSNorm):
        return ()
    weight = norm.weight
    found: Implementation | None
    if weight.is_cuda:
        found = CudaChain.of(blocks, norm, taps) if weight.element_size() == 2 else None
    else:
        found = FusedCpu.of(blocks, norm) if weight.dtype is torch.float32 and not taps else None
    return () if found is None else (found,)
