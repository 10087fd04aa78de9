"""State space mixers: the scans of Mamba-2 (SSD) and Mamba-1."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.ssm import reference
from slipstream.ops.ssm.reference import SelectiveWeights, SsdWeights

_KERNELS = "slipstream.ops.ssm.triton"
ssd_scan = by_device(reference.ssd_scan, _KERNELS)
selective_scan = by_device(reference.selective_scan, _KERNELS)

__all__ = ["SelectiveWeights", "SsdWeights", "selective_scan", "ssd_scan"]
