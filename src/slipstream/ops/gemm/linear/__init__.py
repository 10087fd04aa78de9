"""GEMM with float weights: x [rows, in] times the transpose of weight [out, in]. `dispatch.py` lists the kernels."""

from slipstream.ops.gemm.linear.dispatch import linear, reserve_counters

__all__ = ["linear", "reserve_counters"]
