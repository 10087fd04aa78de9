"""Limits of a device by which kernels are launched."""

from __future__ import annotations

from functools import cache

import torch


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and bytes of shared memory per program."""
    if device.type != "cuda":  # the interpreter
        return 2, 232448
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def multiprocessors(device: torch.device) -> int:
    return device_limits(device)[0]
