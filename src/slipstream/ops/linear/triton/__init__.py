"""GEMMs of few rows in Triton, bound by the time to read the weight."""

from slipstream.ops.linear.triton.epilogue import Norm
from slipstream.ops.linear.triton.gemv import GemvTile, gemv
from slipstream.ops.linear.triton.skinny_mma import SkinnyTile, skinny_mma

__all__ = ["GemvTile", "Norm", "SkinnyTile", "gemv", "skinny_mma"]
