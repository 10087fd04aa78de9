"""Chooses the low-bit kernel of this machine: the first kernel whose test GEMM is correct."""

from __future__ import annotations

import functools
import logging

import torch

from slipstream.ops import native
from slipstream.ops.dequant import BLOCK
from slipstream.ops.low_bit.aten import DynamicQuant, Int4Pack
from slipstream.ops.low_bit.interleaved import Interleaved
from slipstream.ops.low_bit.kernel import Kernel
from slipstream.ops.low_bit.planes import make_planes
from slipstream.ops.low_bit.reference import multiply

log = logging.getLogger(__name__)


@functools.cache
def find_kernel() -> Kernel | None:
    """The kernel for this machine: our C kernel, compiled if necessary; else a torch kernel or None, with a warning."""
    kernels: tuple[Kernel, ...] = (Interleaved(), DynamicQuant(), Int4Pack())
    for kernel in kernels:
        if kernel.suits_machine() and is_correct(kernel):
            if kernel.rounding:
                log.warning(
                    "the C kernels are not available (%s), so low-bit GEMMs round activations to %s and outputs differ "
                    "from those of the exact weights; install gcc, or use dequantize=True",
                    native.state(),
                    kernel.rounding,
                )
            return kernel
    log.warning("no low-bit kernel supports this machine; low-bit weights are dequantized")
    return None


def is_correct(kernel: Kernel) -> bool:
    """Runs the kernel on a small weight and compares with the reference."""
    rows, columns = torch.arange(BLOCK).unsqueeze(1), torch.arange(2 * BLOCK)
    raw = (rows * 37 + torch.arange(40) * 11).remainder(256).to(torch.uint8)
    heads = torch.tensor([0.25, -1.5], dtype=torch.float16).view(torch.uint8)
    raw[:, :4] = raw[:, 20:24] = heads  # scale and minimum of two blocks
    x = (0.4 + (columns * 0.7).sin()).expand(3, -1) * torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float32)
    try:
        found = kernel.pack("Q4_1", raw).multiply(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    expected = multiply(x, make_planes(raw, "Q4_1"))
    return bool((found - expected).norm() < 0.03 * expected.norm())
