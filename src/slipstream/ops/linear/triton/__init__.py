"""Products of few rows on CUDA: the weight is streamed once, and nothing else matters."""

from slipstream.ops.linear.triton.around import Norm, can_stream, streams_well
from slipstream.ops.linear.triton.few import FewTile, few_rows
from slipstream.ops.linear.triton.some import SomeTile, some_rows, some_rows_win

__all__ = ["FewTile", "Norm", "SomeTile", "can_stream", "few_rows", "some_rows", "some_rows_win", "streams_well"]
