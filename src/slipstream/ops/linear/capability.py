"""Whether the Hopper kernels of `linear` can take a call: device, Triton version, alignment of the operands."""

from __future__ import annotations

import torch

from slipstream.ops.hopper import has_hopper_kernels

SMALL_WEIGHT = 8 << 20  # elements; tile sizes and the choice of a kernel change here


def supports_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the Hopper kernels run on this device and TMA can load both operands: rows start at multiples of 16
    bytes (the element size is 2), and the elements of a row are contiguous."""
    aligned = (x.stride(0) | weight.stride(0)) % 8 == 0 and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return aligned and x.stride(1) == weight.stride(1) == 1 and has_hopper_kernels(x.device)
