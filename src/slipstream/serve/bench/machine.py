"""What a GPU itself gives at this moment: those of one kind differ by some percent, and so do a benchmark's figures."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from slipstream.errors import InvalidOption

SIZE = 8192
"""Of a product: so many rows, outputs and inputs."""
COPIED = 1 << 28
"""Bytes of a copy: more than a GPU's cache holds, and little enough to find room beside an engine."""
LOAD = 1.0
"""Seconds of products before they are timed: the clock follows the power that they draw."""
TIMED = 0.2
"""Seconds, of either."""

Work = Callable[[], object]
Clock = Callable[[Work, int], float]
"""Seconds that so many in a row take the device."""


class GpuRates(msgspec.Struct, frozen=True):
    product_tflops: float  # sustained, bfloat16, random numbers
    copy_tbs: float  # TB/s, read and written together

    def __str__(self) -> str:
        return f"this GPU gives {self.product_tflops:.0f} TFLOP/s and {self.copy_tbs:.2f} TB/s"


def check_gpu(device: str) -> None:
    """Refuses what is not one, before anything is loaded for it."""
    from slipstream.device.device import device_facts  # brings torch

    if (kind := device_facts(device).kind) != "cuda":
        raise InvalidOption(f"--machine is for CUDA GPUs, and this engine runs on {kind}; leave it out")


def measure_gpu() -> GpuRates:
    """The host waits for it, about 1.5 s."""
    import torch  # not needed for help

    def clock(work: Work, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    x, weight, out = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    source, target = (torch.zeros(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    product = sustained(lambda: torch.mm(x, weight.t(), out=out), LOAD, clock)
    copy = sustained(lambda: target.copy_(source), 0.0, clock)
    return rates(product, copy)


def rates(product: float, copy: float) -> GpuRates:
    """From the seconds of one."""
    return GpuRates(2 * SIZE**3 / product / 1e12, 2 * COPIED / copy / 1e12)


def sustained(work: Work, load: float, clock: Clock) -> float:
    """Seconds of one, over `TIMED` seconds of them after `load` seconds of them."""
    clock(work, 1)  # what comes once: libraries are loaded
    once = clock(work, 4) / 4
    clock(work, math.ceil(load / once))
    count = math.ceil(TIMED / once)
    return clock(work, count) / count
