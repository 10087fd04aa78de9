"""Input projections of a delta net: one GEMM, or the small one for the gates on a second stream.

The GEMM for b and a has half a percent of the outputs. Together with the large one it costs nothing unless its columns
begin another wave of tiles.
"""

from __future__ import annotations

import torch

from slipstream.device.parallel import execute_in_parallel
from slipstream.ops.linear import linear

TWO_STREAMS = range(49, 65)
"""Numbers of tokens for which two streams are used. An earlier measurement at Qwen3-Next's width on the H200: 15.4 us
for 64 tokens, 16.2 with one GEMM, which was faster for other sizes. benchmarks/gdn_projections.py measures both."""


def takes_two_streams(x: torch.Tensor) -> bool:
    return x.is_cuda and len(x) in TWO_STREAMS


def project_on_two_streams(
    x: torch.Tensor, main: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, inputs] times main [outputs, inputs] and gates [gate outputs, inputs]."""
    return execute_in_parallel(lambda: linear(x, main, None), lambda: linear(x, gates, None))
