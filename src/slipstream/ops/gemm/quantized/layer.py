"""The GEMMs from one attention to the next as one kernel, for a single row and FP8 weights on Hopper.

All programs of the kernel run at once and wait for each other at barriers. Two such kernels on two streams could each
hold half of the multiprocessors and wait forever, so one model per device uses it: the first that claims the barrier.
Other kernels end by themselves, and kernels of other processes do not run at the same time. Kernels of the same stream
cannot be in the way either: with programmatic dependent launch (`ops/platform/pdl.py`) the next kernel starts only
when all programs of this one have started.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache

import torch

from slipstream.ops.gemm.description import FUSED_ACTIVATIONS, Activation
from slipstream.ops.gemm.linear.dispatch import HAS_TRITON
from slipstream.ops.gemm.quantized.matrix import PROGRAMS, LayerGemms
from slipstream.ops.platform.dispatch import has_hopper_kernels


def joins_gemms(x: torch.Tensor, gemms: LayerGemms, activation: Activation | None) -> bool:
    """Whether `multiply_layer` takes them."""
    if not (x.is_cuda and x.dtype is torch.bfloat16 and len(x) == 1 and x.stride(1) == 1):
        return False
    return bool(FUSED_ACTIVATIONS.get(activation)) and has_programs(x.device) and gemms.fits and gemms.are_fp8


def multiply_layer(
    x: torch.Tensor, residual: torch.Tensor, gemms: LayerGemms, activation: Activation, barrier: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For x [1, in of o] and residual [1, hidden] that `joins_gemms` accepts: the product of the next qkv, or without
    one the normed hidden states; and the sum with the residual before the norm. `barrier`: of `claim_barrier`."""
    from slipstream.ops.gemm.quantized.layer_kernel import launch_layer

    return launch_layer(x, residual, gemms, FUSED_ACTIVATIONS[activation], barrier)


_lock = threading.Lock()  # engines may start in several threads
_barriers: dict[torch.device, tuple[weakref.ref[object], torch.Tensor]] = {}  # owner, and counter of the programs


def claim_barrier(device: torch.device, owner: object) -> torch.Tensor | None:
    """The counter of a device's barrier, which belongs to one owner until that is deleted; None: another has it, or the
    device has none."""
    if not has_programs(device):
        return None
    with _lock:
        entry = _barriers.get(device)
        if entry is None:
            counter = torch.zeros(1, dtype=torch.int32, device=device)
        elif entry[0]() in (None, owner):
            counter = entry[1]
        else:
            return None
        _barriers[device] = weakref.ref(owner), counter
        return counter


@cache
def has_programs(device: torch.device) -> bool:
    """Whether all programs can run at once on this device."""
    if not (HAS_TRITON and has_hopper_kernels(device)):
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count >= PROGRAMS
