"""RMS norm of a mixer's output together with its gate: in groups (Mamba-2), or of each head (gated delta rule)."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.gated_norm import reference

_KERNELS = "slipstream.ops.gated_norm.triton"
gated_group_norm = by_device(reference.gated_group_norm, _KERNELS)
gated_rms_norm = by_device(reference.gated_rms_norm, _KERNELS)

__all__ = ["gated_group_norm", "gated_rms_norm"]
