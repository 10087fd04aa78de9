"""The one way out: results leave the device through a ring, and the host looks only when it commits.

A step writes its few numbers into a device buffer of the ring; they are copied to host memory beside the next step.
A slot is written again only after its copy; if that must wait, the device's stream waits, never the host.
"""

from __future__ import annotations

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

    def fields(self) -> list[tuple[str, tuple[int, ...], Any]]:
        rows = self.num_samples
        fields: list[tuple[str, tuple[int, ...], Any]] = [
            ("tokens", (rows,), np.int64),
            ("failed", (rows,), np.bool_),
        ]
        if self.num_logprobs is not None:
            fields += [
                ("chosen", (rows,), self.logit_dtype),
                ("rank", (rows,), np.int64),
                ("top_ids", (rows, self.num_logprobs), np.int64),
                ("top", (rows, self.num_logprobs), self.logit_dtype),
            ]
        return fields

    def places(self) -> list[tuple[str, int, int, tuple[int, ...], Any]]:
        """(name, start, stop, shape, dtype) of each field, in bytes."""
        places, start = [], 0
        for name, shape, dtype in self.fields():
            stop = start + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            places.append((name, start, stop, shape, dtype))
            start = -(-stop // _ALIGN) * _ALIGN
        return places

    @property
    def num_bytes(self) -> int:
        return self.places()[-1][2]


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
            name: self._host[start:stop].view(dtype).reshape(shape).copy()
            for name, start, stop, shape, dtype in self._shape.places()
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
        for name, start, stop, _, _ in self._shape.places():
            value = results[name]
            self._slot.on_device[start:stop].view(value.dtype).copy_(value.reshape(-1))

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
