"""State space scans on CUDA: Mamba-2 in chunks for prefill and by recurrence for decode, Mamba-1 by recurrence."""

from slipstream.ops.ssm.triton.selective import selective_scan
from slipstream.ops.ssm.triton.ssd import ssd_scan

__all__ = ["selective_scan", "ssd_scan"]
