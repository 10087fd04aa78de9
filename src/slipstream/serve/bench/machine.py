"""Measures a GPU's current GEMM and copy rates, by which GPUs of one type differ by some percent."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from slipstream.base.errors import InvalidOption

SIZE = 8192
"""m, n and k of the GEMM."""
COPIED = 1 << 28
"""Bytes of a copy: more than the L2 cache, and small enough to fit beside an engine."""
LOAD = 1.0
"""Seconds of GEMMs before the timing, since the clock follows the power draw."""
TIMED = 0.2
"""Seconds of each timing."""

Operation = Callable[[], object]
Clock = Callable[[Operation, int], float]
"""Returns the device seconds of `count` calls in a row."""


class GpuRates(msgspec.Struct, frozen=True):
    product_tflops: float  # sustained, bfloat16, random values
    copy_tbs: float  # TB/s, read and written together

    def __str__(self) -> str:
        return f"this GPU reaches {self.product_tflops:.0f} TFLOP/s and {self.copy_tbs:.2f} TB/s"


def check_gpu(device: str) -> None:
    """Raises if the device is not a CUDA GPU, before a model is loaded."""
    from slipstream.device.device import detect_machine  # imports torch

    if (kind := detect_machine(device).kind) != "cuda":
        raise InvalidOption(f"--machine is for CUDA GPUs, and this engine runs on {kind}; remove it")


def measure_gpu() -> GpuRates:
    """Runs the measurements, about 1.5 s, and waits for them."""
    import torch  # not needed for --help

    def clock(operation: Operation, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            operation()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    x, weight, out = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    source, target = (torch.zeros(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    product = sustained(lambda: torch.mm(x, weight.t(), out=out), LOAD, clock)
    copy = sustained(lambda: target.copy_(source), 0.0, clock)
    return rates(product, copy)


def rates(product: float, copy: float) -> GpuRates:
    """Computes the rates from the seconds of one GEMM and one copy."""
    return GpuRates(2 * SIZE**3 / product / 1e12, 2 * COPIED / copy / 1e12)


def sustained(operation: Operation, load: float, clock: Clock) -> float:
    """Returns the mean seconds of one call, over `TIMED` seconds after `load` seconds of calls."""
    clock(operation, 1)  # first-use costs: libraries are loaded
    once = clock(operation, 4) / 4
    clock(operation, math.ceil(load / once))
    count = math.ceil(TIMED / once)
    return clock(operation, count) / count
