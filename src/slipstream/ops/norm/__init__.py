"""Root mean square norm, alone or joined with the residual add before it."""

from slipstream.ops.norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
