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
class _Field:
    name: str
    start: int  # in bytes
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class ResultShape:
    """How one step's results lie in a slot."""

    fields: tuple[_Field, ...]
    num_bytes: int


NO_RESULTS = ResultShape((), 0)


@functools.lru_cache(4096)
def result_shape(
    num_samples: int,
    num_logprobs: int | None,
    logit_dtype: Any,  # numpy's
    given: tuple[int, int] | None = None,  # of the logprobs of given ids
    scores: tuple[int, int] | None = None,  # scored prompt tokens, and the likeliest reported of each
) -> ResultShape:
    wanted: list[tuple[str, tuple[int, ...], Any]] = [
        ("tokens", (num_samples,), np.int64),
        ("failed", (num_samples,), np.bool_),
    ]
    if num_logprobs is not None:
        wanted += _logprob_fields("", num_samples, num_logprobs, logit_dtype)
    if given is not None:
        wanted.append(("given", given, logit_dtype))
    if scores is not None:
        wanted += _logprob_fields(PROMPT, *scores, logit_dtype)
    fields, start = [], 0
    for name, dims, dtype in wanted:
        stop = start + math.prod(dims) * np.dtype(dtype).itemsize
        fields.append(_Field(name, start, stop, dims, np.dtype(dtype)))
        start = -(-stop // _ALIGN) * _ALIGN
    return ResultShape(tuple(fields), start)


PROMPT = "prompt_"
"""Begins the names of fields that are about prompt tokens."""


def _logprob_fields(prefix: str, num: int, k: int, real: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    return [
        (f"{prefix}chosen", (num,), real),
        (f"{prefix}rank", (num,), np.int64),
        (f"{prefix}top_ids", (num, k), np.int64),
        (f"{prefix}top", (num, k), real),
    ]


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
        shape = self._shape
        own = self._host[: shape.num_bytes].copy()  # the slot will be written again
        if len(shape.fields) == 2:  # mostly
            tokens, failed = shape.fields
            return StepResult(
                np.ndarray(tokens.shape, tokens.dtype, own),
                np.ndarray(failed.shape, failed.dtype, own, failed.start),
            )
        read = {field.name: np.ndarray(field.shape, field.dtype, own, field.start) for field in shape.fields}
        return StepResult(read["tokens"], read["failed"], _logprobs(read, ""), _logprobs(read, PROMPT))


def _logprobs(read: dict[str, np.ndarray[Any, Any]], prefix: str) -> StepLogprobs | None:
    if f"{prefix}chosen" not in read:
        return None
    chosen, rank, top_ids, top = (read[f"{prefix}{name}"] for name in ("chosen", "rank", "top_ids", "top"))
    return StepLogprobs(chosen, rank, top_ids, top, None if prefix else read.get("given"))


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
            if field.start == field.stop:
                continue
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
