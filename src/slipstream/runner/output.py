"""The one way out: results leave the device through a ring, and the host looks only when it commits.

A step writes its few numbers into a device buffer of the ring; they are copied to host memory beside the next step.
A slot is written again only after its copy; if that must wait, the device's stream waits, never the host.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.device.device import Bytes, Device
from slipstream.device.streams import PASSED, Event
from slipstream.step import StepLogprobs, StepResult

_ALIGN = 8


@dataclass(frozen=True, slots=True)
class ResultShape:
    """How one step's results lie in a slot."""

    num_samples: int
    num_logprobs: int | None
    logit_dtype: Any  # numpy's

    @property
    def fields(self) -> tuple[_Field, ...]:
        return _lay_out(self)

    @property
    def num_bytes(self) -> int:
        return self.fields[-1].stop


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    start: int  # in bytes
    stop: int
    shape: tuple[int, ...]
    dtype: Any


@functools.lru_cache(4096)
def _lay_out(shape: ResultShape) -> tuple[_Field, ...]:
    rows, real = (shape.num_samples,), shape.logit_dtype
    wanted: list[tuple[str, tuple[int, ...], Any]] = [("tokens", rows, np.int64), ("failed", rows, np.bool_)]
    if shape.num_logprobs is not None:
        top = (shape.num_samples, shape.num_logprobs)
        wanted += [("chosen", rows, real), ("rank", rows, np.int64), ("top_ids", top, np.int64), ("top", top, real)]
    fields, start = [], 0
    for name, dims, dtype in wanted:
        stop = start + math.prod(dims) * np.dtype(dtype).itemsize
        fields.append(_Field(name, start, stop, dims, dtype))
        start = -(-stop // _ALIGN) * _ALIGN
    return tuple(fields)


class StepHandle:
    """A step on its way. `wait` is the one place where the host waits for the device."""

    def __init__(self, ready: Event, shape: ResultShape, host: Bytes | None) -> None:
        self._ready = ready
        self._shape = shape
        self._host = host

    def done(self) -> bool:
        return self._ready.done()

    def wait(self) -> StepResult:
        self._ready.wait()
        if self._host is None:
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.bool_))
        # copies: the slot will be written again
        read = {
            field.name: self._host[field.start : field.stop].view(field.dtype).reshape(field.shape).copy()
            for field in self._shape.fields
        }
        logprobs = None
        if self._shape.num_logprobs is not None:
            logprobs = StepLogprobs(read["chosen"], read["rank"], read["top_ids"], read["top"])
        return StepResult(read["tokens"], read["failed"], logprobs)


class _Slot:
    def __init__(self, capacity: int, device: Device) -> None:
        self.capacity = capacity
        self.host, self.host_tensor = device.host_buffer(capacity)
        self.on_device = torch.zeros(capacity, dtype=torch.uint8, device=device.torch_device)
        self.copied: Event = PASSED


class ResultRing:
    """`depth + 2` slots. A slot comes round again only after the step that used it was committed."""

    def __init__(self, num_slots: int, capacity: int, device: Device) -> None:
        self.device = device
        self.slots = [_Slot(capacity, device) for _ in range(num_slots)]
        self._next = 0

    def open(self, shape: ResultShape) -> ResultSlot:
        """Host: the next slot, larger than before if this step reports more than any did."""
        index = self._next
        self._next = (index + 1) % len(self.slots)
        slot = self.slots[index]
        if shape.num_bytes > slot.capacity:
            slot = self.slots[index] = _Slot(shape.num_bytes, self.device)
        self.device.compute.wait_for(slot.copied)
        self.device.handed_back(slot.host)
        return ResultSlot(slot, shape, self.device)


class ResultSlot:
    """Where one step's results go."""

    def __init__(self, slot: _Slot, shape: ResultShape, device: Device) -> None:
        self._slot = slot
        self._shape = shape
        self._device = device

    def write(self, results: dict[str, torch.Tensor]) -> None:
        """Device: put the results into the slot."""
        for field in self._shape.fields:
            value = results[field.name]
            self._slot.on_device[field.start : field.stop].view(value.dtype).copy_(value.reshape(-1))

    def leave(self) -> StepHandle:
        """Host: queue the copy out, beside what the device computes next."""
        slot, size = self._slot, self._shape.num_bytes
        copy = self._device.copy
        copy.wait_for(self._device.compute.record())

        def bring_out() -> None:
            slot.host_tensor[:size].copy_(slot.on_device[:size], non_blocking=True)

        copy.run(bring_out)
        slot.copied = copy.record()
        return StepHandle(slot.copied, self._shape, slot.host)
