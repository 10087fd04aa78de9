"""Gated delta rule on CUDA: factors of chunks, the pass over chunks, one fused kernel for decode, gates."""

from slipstream.ops.delta_rule.triton.chunked import gated_delta_rule
from slipstream.ops.delta_rule.triton.decode import delta_decode
from slipstream.ops.delta_rule.triton.elementwise import delta_gates
from slipstream.ops.delta_rule.triton.verify import delta_replay_

__all__ = ["delta_decode", "delta_gates", "delta_replay_", "gated_delta_rule"]
