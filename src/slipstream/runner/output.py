"""The one way out: results leave the device through a ring, and the host looks only when it commits.

A step writes its few numbers into a device buffer of the ring; they are copied to host memory beside the next step.
A slot is written again only after its copy; if that must wait, the device's stream waits, never the host.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.device.device import Bytes, Device
from slipstream.device.streams import PASSED, Event
from slipstream.device.sync_check import sync_allowed
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
    return lay_out(wanted)


def lay_out(wanted: list[tuple[str, tuple[int, ...], Any]]) -> ResultShape:
    """Fields of these names, dimensions and numpy dtypes, one after another."""
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


class StepSpan(NamedTuple):
    """A step's first and last point on the compute stream, both timed."""

    started: Event
    ended: Event


class StepHandle:
    """A step on its way. `wait` is the one place where the host waits for the device."""

    def __init__(self, ready: Event, shape: ResultShape, host: Bytes | None, count: int | None = None) -> None:
        """`count`: rows whose results count, where the shape has more of them; prompts are not scored then."""
        self.ready = ready
        self._shape = shape
        self._host = host
        self._count = count
        self.started: Event | None = None  # its first and last point on the compute stream, timed
        self.ended: Event | None = None

    @property
    def span(self) -> StepSpan | None:
        """Where it is among the device's work, if that was noted."""
        started, ended = self.started, self.ended
        return None if started is None or ended is None else StepSpan(started, ended)

    def done(self) -> bool:
        return self.ready.done()

    def wait(self) -> StepResult:
        with sync_allowed("the commit of the oldest step"):
            self.ready.wait()
        if self._host is None:
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.bool_))
        shape = self._shape
        own = self._host[: shape.num_bytes].copy()  # the slot will be written again
        count = self._count
        if len(shape.fields) == 2:  # mostly
            tokens, failed = shape.fields
            return StepResult(
                np.ndarray(tokens.shape, tokens.dtype, own)[:count],
                np.ndarray(failed.shape, failed.dtype, own, failed.start)[:count],
            )
        read = {field.name: np.ndarray(field.shape, field.dtype, own, field.start)[:count] for field in shape.fields}
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

    def open(self, shape: ResultShape, count: int | None = None) -> ResultSlot:
        """Host: the next slot, larger than before if this step reports more than any did.

        `count`: rows whose results count, where the shape has some that pad.
        """
        index = self._next
        self._next = (index + 1) % len(self.slots)
        slot = self.slots[index]
        if shape.num_bytes > slot.capacity:
            slot = self.slots[index] = _Slot(1 << (shape.num_bytes - 1).bit_length(), self.device)
        self.device.compute.wait_for(slot.copied)
        self.device.handed_back(slot.host)
        return ResultSlot(slot, shape, self.device, count)


class ResultSlot:
    """Where one step's results go."""

    def __init__(self, slot: _Slot, shape: ResultShape, device: Device, count: int | None) -> None:
        self._slot = slot
        self._shape = shape
        self._device = device
        self._count = count
        self.ended: Event = PASSED  # on the compute stream, once sent

    def write(self, results: dict[str, torch.Tensor]) -> None:
        """Device: put the results into the slot."""
        pack(results, self._shape, self._slot.on_device)

    def write_packed(self, packed: torch.Tensor) -> None:
        """Device: likewise, what `pack` made of them."""
        self._slot.on_device[: self._shape.num_bytes].copy_(packed)

    def leave(self) -> StepHandle:
        """Host: queue the copy out; what the handle then reads is the result."""
        handle = StepHandle(*self.send(), self._count)
        handle.ended = self.ended
        return handle

    def send(self) -> tuple[Event, ResultShape, Bytes]:
        """Host: queue the copy out, beside what the device computes next: when it is made, and where it will lie."""
        slot, size = self._slot, self._shape.num_bytes
        copy = self._device.copy
        self.ended = self._device.compute.record(timed=True)
        copy.wait_for(self.ended)

        def bring_out() -> None:
            slot.host_tensor[:size].copy_(slot.on_device[:size], non_blocking=True)

        copy.run(bring_out)
        slot.copied = copy.record()
        return slot.copied, self._shape, slot.host


def pack(results: dict[str, torch.Tensor], shape: ResultShape, buffer: torch.Tensor) -> torch.Tensor:
    """Device: results side by side in a buffer of bytes, as the host will read them."""
    for field in shape.fields:
        if field.start < field.stop:
            value = results[field.name]
            buffer[field.start : field.stop].view(value.dtype).copy_(value.reshape(-1))
    return buffer
