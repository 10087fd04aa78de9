"""Input projections of a delta net: one GEMM, or the small one for the gates on a second stream.

The GEMM for b and a has half a percent of the outputs. Together with the large one it costs nothing unless its columns
begin another wave of tiles.
"""

from __future__ import annotations

import torch

from slipstream.device.streams import execute_in_parallel
from slipstream.ops.linear import linear

TWO_STREAMS = range(33, 65)
"""Numbers of tokens for which two streams are used. Measured on the H200 at Qwen3-Next's width: 16.0 us for 48 and 64
tokens, 16.6 with one GEMM; for up to 32 tokens and from 96 on one GEMM is faster (benchmarks/gdn_projections.py)."""


def takes_two_streams(x: torch.Tensor) -> bool:
    return x.is_cuda and len(x) in TWO_STREAMS


def project_on_two_streams(
    x: torch.Tensor, main: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, inputs] times main [outputs, inputs] and gates [gate outputs, inputs]."""
    return execute_in_parallel(lambda: linear(x, main, None), lambda: linear(x, gates, None))
