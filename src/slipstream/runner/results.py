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
from slipstream.step import NO_INTS, StepLogprobs, StepResult

_ALIGN = 16


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
    long: tuple[int, int] | None = None,  # rows with long reports, and the likeliest reported of each
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
    if long is not None:
        wanted += _logprob_fields(LONG, *long, logit_dtype)
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
LONG = "long_"
"""Likewise, about rows with long reports."""


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

    def __init__(self, ready: Event | None, shape: ResultShape, host: Bytes | None, count: int | None = None) -> None:
        """`ready` is None where nothing of the step is copied, so there is nothing to wait for.

        `count`: rows whose results count, where the shape has more of them; prompts are not scored then.
        """
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

    @property
    def is_silent(self) -> bool:
        """Whether it is told without being waited for: then it may not have ended when its result is taken."""
        return self.ready is None

    def done(self) -> bool:
        point = self.ended if self.ready is None else self.ready
        return point is None or point.done()

    def wait(self) -> StepResult:
        if self.ready is None or self._host is None:
            return StepResult(NO_INTS, np.zeros(0, np.bool_))
        self._wait_until_copied()
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

    def end(self) -> None:
        """Sleep until a silent step has left the device, for whoever has run as far ahead as he may."""
        assert self.ended is not None
        with sync_allowed("the end of the oldest step"):
            self.ended.wait()

    def _wait_until_copied(self) -> None:
        assert self.ready is not None
        with sync_allowed("the commit of the oldest step"):
            self.ready.wait()


def _logprobs(read: dict[str, np.ndarray[Any, Any]], prefix: str) -> StepLogprobs | None:
    if f"{prefix}chosen" not in read:
        return None
    chosen, rank, top_ids, top = (read[f"{prefix}{name}"] for name in ("chosen", "rank", "top_ids", "top"))
    if prefix:
        return StepLogprobs(chosen, rank, top_ids, top)
    return StepLogprobs(chosen, rank, top_ids, top, read.get("given"), _logprobs(read, LONG))


class _Slot:
    def __init__(self, capacity: int, device: Device) -> None:
        self.copied: Event = PASSED
        self.used = 0  # bytes that the step being prepared writes
        self.grow(capacity, device)

    def grow(self, capacity: int, device: Device) -> None:
        """Host: whoever used it before has been committed, and nobody has written to it since."""
        self.capacity = capacity
        self.host, self.host_tensor = device.host_buffer(capacity)
        # not zeros: they would be written on the host's own stream, perhaps after what the step writes
        self.on_device = torch.empty(capacity, dtype=torch.uint8, device=device.torch_device)


class Sent(NamedTuple):
    """A step that was launched whole, and its results on their way out."""

    ended: Event  # on the compute stream, timed
    copied: Event | None  # None: there is nothing to copy
    host: Bytes | None  # where they will lie


class ResultRing:
    """`depth + 2` slots. A slot comes round again only after the step that used it was committed.

    What the heads of one step have to tell lies side by side in one slot, and leaves by one copy.
    """

    def __init__(self, num_slots: int, capacity: int, device: Device, most: int = 0) -> None:
        """Slots have `capacity` bytes, and get larger when a step needs it: up to `most` they are planned for."""
        self.device = device
        self._most = most
        self.slots = [_Slot(capacity, device) for _ in range(num_slots)]
        self._next = 0
        self._opened: _Slot | None = None  # by the step that is being prepared

    def open(self, shape: ResultShape, count: int | None = None) -> ResultSlot:
        """Host: room for a head's results; the slot gets larger if the step reports more than any did.

        `count`: rows whose results count, where the shape has some that pad.
        """
        slot = self._opened
        if slot is None:
            slot = self._opened = self.slots[self._next]
            self._next = (self._next + 1) % len(self.slots)
            self.device.compute.wait_for(slot.copied)
            self.device.handed_back(slot.host)
            slot.used = 0
        start = slot.used
        slot.used = start + -(-shape.num_bytes // _ALIGN) * _ALIGN
        if slot.used > slot.capacity:
            roomy = _roomy(slot.used)
            slot.grow(min(roomy, max(slot.used, self._most)) if self._most else roomy, self.device)
        return ResultSlot(slot, start, shape, count)

    def send(self) -> Sent:
        """Host: queue the copy out of what the step's heads write, beside what the device computes next."""
        device, slot = self.device, self._opened
        ended = device.compute.record(timed=True)
        if slot is None:  # nobody's result is ready
            return Sent(ended, None, None)
        self._opened = None
        size, target, source = slot.used, slot.host_tensor, slot.on_device
        device.copy.wait_for(ended)

        def bring_out() -> None:
            target[:size].copy_(source[:size], non_blocking=True)

        device.copy.run(bring_out)
        slot.copied = device.copy.record()
        return Sent(ended, slot.copied, slot.host)


def _roomy(num_bytes: int) -> int:
    """So much or up to a quarter more: results that grow little by little do not ask for memory each time."""
    step = 1 << max(num_bytes.bit_length() - 3, 12)
    return -(-num_bytes // step) * step


class ResultSlot:
    """Where one head's results of one step go."""

    def __init__(self, slot: _Slot, start: int, shape: ResultShape, count: int | None) -> None:
        self._slot = slot
        self._start = start
        self._shape = shape
        self._count = count

    def write(self, results: dict[str, torch.Tensor]) -> None:
        """Device: put the results into the slot."""
        pack(results, self._shape, self._slot.on_device[self._start :])

    def write_part(self, name: str, first: int, part: torch.Tensor) -> None:
        """Device: likewise, lines of one field, from the `first` on."""
        field = next(field for field in self._shape.fields if field.name == name)
        if field.start < field.stop:
            whole = self._slot.on_device[self._start + field.start : self._start + field.stop]
            whole.view(part.dtype).view(field.shape)[first : first + len(part)].copy_(part)

    def write_packed(self, packed: torch.Tensor) -> None:
        """Device: likewise, what `pack` made of them."""
        self._slot.on_device[self._start : self._start + self._shape.num_bytes].copy_(packed)

    def leave(self, sent: Sent) -> StepHandle:
        """Host: what the handle then reads is the result."""
        return StepHandle(sent.copied, self._shape, self.find(sent), self._count)

    def find(self, sent: Sent) -> Bytes:
        """Host: the head's own part of what comes out."""
        assert sent.host is not None, "a slot was opened, so it was sent"
        return sent.host[self._start : self._start + self._shape.num_bytes]


def pack(results: dict[str, torch.Tensor], shape: ResultShape, buffer: torch.Tensor) -> torch.Tensor:
    """Device: results side by side in a buffer of bytes, as the host will read them."""
    for field in shape.fields:
        if field.start < field.stop:
            value = results[field.name]
            buffer[field.start : field.stop].view(value.dtype).copy_(value.reshape(-1))
    return buffer
