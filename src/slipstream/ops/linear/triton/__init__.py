"""Products of few rows on CUDA: the weight is streamed once, and nothing else matters."""

from slipstream.ops.linear.triton.epilogue import Norm, can_stream, streams_well
from slipstream.ops.linear.triton.gemv import GemvTile, gemv
from slipstream.ops.linear.triton.skinny_mma import SkinnyTile, skinny_mma, skinny_mma_wins

__all__ = ["GemvTile", "Norm", "SkinnyTile", "can_stream", "gemv", "skinny_mma", "skinny_mma_wins", "streams_well"]
