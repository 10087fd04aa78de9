"""Whether a device runs our kernels in Gluon."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Gluon is an experimental language, so only the Triton version that was tested is used."""
    if device.type != "cuda":
        return False
    import triton

    return triton.__version__.startswith("3.6.") and torch.cuda.get_device_capability(device) == (9, 0)
