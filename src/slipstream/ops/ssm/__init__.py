"""State space mixers: the scans of Mamba-2 (SSD) and Mamba-1, and the gated norm behind the first.

There are only references so far. They read no value on the host, so they run on CUDA and under graphs too, with many
small launches.
"""

from slipstream.ops.ssm.reference import SelectiveWeights, SsdWeights, gated_group_norm, selective_scan, ssd_scan

__all__ = ["SelectiveWeights", "SsdWeights", "gated_group_norm", "selective_scan", "ssd_scan"]
