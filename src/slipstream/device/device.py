"""Device: what differs between the CPU and a CUDA GPU, and nothing else."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from slipstream.device.streams import InlineStream, Stream, ThreadedStream
from slipstream.errors import InvalidOption

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Device:
    """One device and its streams. `compute` runs steps; `copy` brings results out beside it."""

    kind = "cpu"
    can_pin = False
    can_graph = False

    def __init__(self, depth: int, num_threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self.depth = depth
        self.num_threads = num_threads
        self.compute: Stream
        self.copy: Stream
        if depth == 0:
            self._enter_thread()
            self.compute = self.copy = InlineStream()
        else:
            self.compute = self.copy = ThreadedStream("slipstream-device", self._enter_thread)

    def _enter_thread(self) -> None:
        # only this thread runs kernels from now on: two OpenMP pools on few cores starve each other
        torch.set_num_threads(self.num_threads)
        torch.set_grad_enabled(False)

    def host_buffer(self, num_bytes: int) -> tuple[Bytes, torch.Tensor]:
        """Host memory that copies to and from the device may use, as numpy and torch see it."""
        array = np.zeros(num_bytes, np.uint8)
        return array, torch.from_numpy(array)

    def handed_back(self, buffer: Bytes) -> None:
        """A buffer is about to be written anew; a test device poisons it."""

    def close(self) -> None:
        self.compute.close()
        if self.copy is not self.compute:
            self.copy.close()


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping, cgroup limits included."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
                    break
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            if text != "max":
                free = min(free, int(text) - int(used.read()))
    except OSError:
        pass
    return max(free, 0)


def default_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_device(kind: str, depth: int, num_threads: int) -> Device:
    if kind == "cpu":
        return Device(depth, num_threads)
    raise InvalidOption(f"there is no device {kind!r}; use cpu")
