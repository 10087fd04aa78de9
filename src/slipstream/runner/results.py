"""Results: the only way from the device to the host.

A step writes its results to a device buffer of a ring, and the copy stream copies them to pinned host memory while the
next step runs. A buffer is written again only after its copy; if necessary the compute stream waits, never the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from slipstream.base.host import num_cpus
from slipstream.contracts.step import NO_INTS, StepLogprobs, StepPlan, StepResult
from slipstream.device.device import Bytes, Device
from slipstream.device.streams import PASSED, Event
from slipstream.device.sync_check import sync_allowed
from slipstream.ops.sampling import Accepted
from slipstream.runner.features import Gathered, Size
from slipstream.runner.staging import Upload

_ALIGN = 16

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    start: int  # bytes
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class ResultShape:
    """The layout of one step's results in a buffer."""

    fields: tuple[_Field, ...]
    num_bytes: int


NO_RESULTS = ResultShape((), 0)


@functools.lru_cache(4096)
def result_shape(
    num_draws: int,
    num_logprobs: int | None,
    logit_dtype: Any,  # a numpy dtype
    requested: tuple[int, int] | None = None,  # shape of the logprobs of requested ids
    scores: tuple[int, int] | None = None,  # number of scored prompt tokens, and likeliest tokens reported for each
    wide: tuple[int, int] | None = None,  # number of rows with wide logprobs, and likeliest tokens reported for each
    has_drafts: bool = False,
    num_proposed: int = 0,  # drafts of each row that are reported
) -> ResultShape:
    wanted: list[tuple[str, tuple[int, ...], Any]] = [
        ("tokens", (num_draws,), np.int64),
        ("failed", (num_draws,), np.bool_),
    ]
    if has_drafts:
        wanted.append((KEPT, (num_draws,), np.bool_))
    if num_proposed:
        wanted.append((DRAFTS, (num_draws, num_proposed), np.int64))
    if num_logprobs is not None:
        wanted += _logprob_fields("", num_draws, num_logprobs, logit_dtype)
    if requested is not None:
        wanted.append(("requested", requested, logit_dtype))
    if scores is not None:
        wanted += _logprob_fields(PROMPT, *scores, logit_dtype)
    if wide is not None:
        wanted += _logprob_fields(WIDE, *wide, logit_dtype)
    return lay_out(wanted)


def lay_out(wanted: list[tuple[str, tuple[int, ...], Any]]) -> ResultShape:
    """Lay out fields of these names, dimensions and numpy dtypes one after another."""
    fields, start = [], 0
    for name, dims, dtype in wanted:
        stop = start + math.prod(dims) * np.dtype(dtype).itemsize
        fields.append(_Field(name, start, stop, dims, np.dtype(dtype)))
        start = -(-stop // _ALIGN) * _ALIGN
    return ResultShape(tuple(fields), start)


KEPT = "kept"
"""Name of the field that says which drawn tokens are accepted."""
DRAFTS = "drafts"
"""Name of the field with the drafts for the next step."""
PROMPT = "prompt_"
"""Prefix of the names of fields about prompt tokens."""
WIDE = "wide_"
"""Prefix of the names of fields about rows with wide logprobs."""


def _logprob_fields(prefix: str, num: int, k: int, real: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    return [
        (f"{prefix}chosen", (num,), real),
        (f"{prefix}rank", (num,), np.int64),
        (f"{prefix}top_ids", (num, k), np.int64),
        (f"{prefix}top", (num, k), real),
    ]


class DeviceInterval(NamedTuple):
    """The first and the last timed event of a step on the compute stream."""

    started: Event
    ended: Event
    late: tuple[Event, Event] | None = None  # the end of the forward, and the arrival of late data


class StepHandle:
    """A step in flight. The commit waits for the device in `wait`; `wait_until_ended` and `HostRing.open` wait too."""

    def __init__(
        self,
        ready: Event | None,
        shape: ResultShape,
        host: Bytes | None,
        count: int | None = None,
        first: Indices | None = None,
    ) -> None:
        """`ready`: the event after the copy; None if nothing of the step is copied, so that `wait` does not wait.

        `count`: number of rows to read, if the shape has padding rows; prompts are not scored in such steps. `first`:
        of a step with drafts, the index of each sampling row's first drawn token.
        """
        self.ready = ready
        self._shape = shape
        self._host = host
        self._count = count
        self._first = first
        self.started: Event | None = None  # first and last timed event on the compute stream
        self.ended: Event | None = None
        self.late: tuple[Event, Event] | None = None

    @property
    def interval(self) -> DeviceInterval | None:
        """The step's first and last event, if they were recorded."""
        started, ended = self.started, self.ended
        return None if started is None or ended is None else DeviceInterval(started, ended, self.late)

    @property
    def has_no_result(self) -> bool:
        """Whether `wait` returns at once because nothing is copied: the step may still be running then."""
        return self.ready is None

    def done(self) -> bool:
        point = self.ended if self.ready is None else self.ready
        return point is None or point.done()

    def wait(self) -> StepResult:
        if self.ready is None or self._host is None:
            return StepResult(NO_INTS, np.zeros(0, np.bool_))
        self._wait_until_copied()
        shape = self._shape
        own = self._host[: shape.num_bytes].copy()  # the buffer will be written again
        count = self._count
        if len(shape.fields) == 2:  # the usual case
            tokens, failed = shape.fields
            return StepResult(
                np.ndarray(tokens.shape, tokens.dtype, own)[:count],
                np.ndarray(failed.shape, failed.dtype, own, failed.start)[:count],
            )
        read = {field.name: np.ndarray(field.shape, field.dtype, own, field.start)[:count] for field in shape.fields}
        by_row, counts, drafts = read["failed"], None, read.get(DRAFTS)
        if self._first is not None and len(self._first):
            counts = np.add.reduceat(read[KEPT], self._first, dtype=np.int32)
            by_row = np.logical_or.reduceat(by_row, self._first)
            drafts = None if drafts is None else drafts[self._first]
        return StepResult(
            read["tokens"], by_row, _logprobs(read, ""), _logprobs(read, PROMPT), counts=counts, drafts=drafts
        )

    def wait_until_ended(self) -> None:
        """Wait until the device has finished a step without results. Bounds how far the host runs ahead."""
        assert self.ended is not None
        with sync_allowed("the end of the oldest step"):
            self.ended.wait()

    def _wait_until_copied(self) -> None:
        assert self.ready is not None
        with sync_allowed("the commit of the oldest step"):
            self.ready.wait()


class MixedHandle(StepHandle):
    """A step with drawn tokens and pooled results, which one copy brings out."""

    def __init__(self, generated: StepHandle, pooled: StepHandle) -> None:
        super().__init__(pooled.ready, NO_RESULTS, None)
        self._generated = generated
        self._pooled = pooled

    def wait(self) -> StepResult:
        drawn, own = self._generated.wait(), self._pooled.wait()
        return replace(drawn, pooled=own.pooled, pool_failed=own.pool_failed)


def _logprobs(read: dict[str, np.ndarray[Any, Any]], prefix: str) -> StepLogprobs | None:
    if f"{prefix}chosen" not in read:
        return None
    chosen, rank, top_ids, top = (read[f"{prefix}{name}"] for name in ("chosen", "rank", "top_ids", "top"))
    if prefix:
        return StepLogprobs(chosen, rank, top_ids, top)
    return StepLogprobs(chosen, rank, top_ids, top, read.get("requested"), _logprobs(read, WIDE))


class _Buffer:
    def __init__(self, capacity: int, device: Device) -> None:
        self.copied: Event = PASSED
        self.used = 0  # bytes that the heads of the current step write
        self.grow(capacity, device)

    def grow(self, capacity: int, device: Device) -> None:
        """Host: the step that used the buffer before is committed, and nothing has been written since."""
        self.capacity = capacity
        self.host, self.host_tensor = device.host_buffer(capacity)
        # not zeros: they would be written on the default stream, possibly after the step's own writes
        self.on_device = torch.empty(capacity, dtype=torch.uint8, device=device.torch_device)


class Sent(NamedTuple):
    """A launched step whose results are being copied."""

    ended: Event  # on the compute stream, timed
    copied: Event | None  # None: there is nothing to copy
    host: Bytes | None  # the pinned buffer that the copy writes


class ResultRing:
    """`depth + 2` buffers. A buffer is reused only after the step that used it is committed.

    The results of all heads of a step are in one buffer, and one copy brings them out.
    """

    def __init__(self, num_buffers: int, capacity: int, device: Device, max_capacity: int = 0) -> None:
        """Buffers have `capacity` bytes and grow when a step needs more; the memory estimate counts `max_capacity`."""
        self.device = device
        self._max_capacity = max_capacity
        self.buffers = [_Buffer(capacity, device) for _ in range(num_buffers)]
        self._next = 0
        self._opened: _Buffer | None = None  # the buffer of the step that is being prepared

    def open(self, shape: ResultShape, count: int | None = None, first: Indices | None = None) -> ResultSpan:
        """Host: a span for one head's results. The buffer grows if the step returns more than any step before.

        `count`, `first`: as `StepHandle` takes them.
        """
        buffer = self._opened
        if buffer is None:
            buffer = self._opened = self.buffers[self._next]
            self._next = (self._next + 1) % len(self.buffers)
            self.device.compute.wait_for(buffer.copied)
            self.device.before_reuse(buffer.host)
            buffer.used = 0
        start = buffer.used
        buffer.used = start + -(-shape.num_bytes // _ALIGN) * _ALIGN
        if buffer.used > buffer.capacity:
            roomy = _roomy(buffer.used)
            buffer.grow(min(roomy, max(buffer.used, self._max_capacity)) if self._max_capacity else roomy, self.device)
        return ResultSpan(buffer, start, shape, count, first)

    def send(self) -> Sent:
        """Host: queue the copy of the heads' results to the host, which overlaps with the next step."""
        device, buffer = self.device, self._opened
        ended = device.compute.record(timed=True)
        if buffer is None:  # the step has no results
            return Sent(ended, None, None)
        self._opened = None
        size, target, source = buffer.used, buffer.host_tensor, buffer.on_device
        device.copy.wait_for(ended)

        def bring_out() -> None:
            target[:size].copy_(source[:size], non_blocking=True)

        device.copy.run(bring_out)
        buffer.copied = device.copy.record()
        return Sent(ended, buffer.copied, buffer.host)


def _roomy(num_bytes: int) -> int:
    """Rounded up by at most a quarter, so that slowly growing results do not reallocate each time."""
    step = 1 << max(num_bytes.bit_length() - 3, 12)
    return -(-num_bytes // step) * step


class ResultSpan:
    """The part of a result buffer that one head writes in one step."""

    def __init__(
        self, buffer: _Buffer, start: int, shape: ResultShape, count: int | None, first: Indices | None
    ) -> None:
        self._buffer = buffer
        self._start = start
        self._shape = shape
        self._count = count
        self._first = first

    def room(self) -> torch.Tensor:
        """Device: this part of the buffer."""
        return self._buffer.on_device[self._start : self._start + self._shape.num_bytes]

    def write(self, results: dict[str, torch.Tensor]) -> None:
        """Device: write the results."""
        pack(results, self._shape, self.room())

    def write_part(self, name: str, first: int, part: torch.Tensor) -> None:
        """Device: write a part of one field, from index `first` of its first dimension on."""
        field = next(field for field in self._shape.fields if field.name == name)
        if field.start < field.stop:
            whole = self._buffer.on_device[self._start + field.start : self._start + field.stop]
            whole.view(part.dtype).view(field.shape)[first : first + len(part)].copy_(part)

    def write_packed(self, packed: torch.Tensor) -> None:
        """Device: write the output of `pack`."""
        self.room().copy_(packed)

    def handle(self, sent: Sent) -> StepHandle:
        """Host: the handle that reads this span."""
        return StepHandle(sent.copied, self._shape, self.find(sent), self._count, self._first)

    def find(self, sent: Sent) -> Bytes:
        """Host: this span of the pinned buffer."""
        assert sent.host is not None, "a buffer was opened, so it was sent"
        return sent.host[self._start : self._start + self._shape.num_bytes]


def pack(results: dict[str, torch.Tensor], shape: ResultShape, buffer: torch.Tensor) -> torch.Tensor:
    """Device: write the results one after another to a buffer of bytes, as the host will read them. Results that are
    views of their part of the buffer are not copied."""
    for field in shape.fields:
        if field.start < field.stop:
            value = results[field.name]
            target = buffer[field.start : field.stop].view(value.dtype)
            if not (value.is_contiguous() and value.view(-1).is_set_to(target)):
                target.copy_(value.reshape(-1))
    return buffer


def view_draws(shape: ResultShape, buffer: torch.Tensor) -> Accepted:
    """Device: the parts of the buffer for the tokens of a step, and for whether each is accepted or failed, so that
    kernels write there. Without drafts none is accepted or rejected: that part is empty."""
    spans = {field.name: slice(field.start, field.stop) for field in shape.fields}
    tokens, failed = buffer[spans["tokens"]].view(torch.int64), buffer[spans["failed"]].view(torch.bool)
    return Accepted(tokens, buffer[spans[KEPT]].view(torch.bool) if KEPT in spans else failed[:0], failed)


def view_drafts(shape: ResultShape, buffer: torch.Tensor) -> torch.Tensor | None:
    """Device: the part of the buffer for the drafts of each draw [draws, drafts]; None: the result has none."""
    found = next((field for field in shape.fields if field.name == DRAFTS), None)
    return None if found is None else buffer[found.start : found.stop].view(torch.int64).view(found.shape)


# Copies a result buffer for its reader, since a later step overwrites the buffer.
#
# Token vectors are tens of megabytes per step. Most of the time of such a copy is spent on first-touch page faults, and
# one thread is slower than the device's next step; so several threads copy.

LARGE = 4 * 2**20  # bytes from which several threads are faster
MAX_THREADS = 8


def host_copy(buffer: Bytes) -> Bytes:
    num_threads = min(MAX_THREADS, num_cpus() // 2) if buffer.nbytes >= LARGE else 1
    if num_threads < 2:
        return buffer.copy()
    own = np.empty_like(buffer)
    size = -(-len(buffer) // num_threads)
    parts = [slice(start, start + size) for start in range(0, len(buffer), size)]
    copies = [_threads().submit(np.copyto, own[part], buffer[part]) for part in parts[1:]]
    np.copyto(own[parts[0]], buffer[parts[0]])
    for copy in copies:
        copy.result()
    return own


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, "slipstream-results")


# Head: turns the hidden states of a step into results.

Finish = Callable[[Gathered, torch.Tensor], None]


class CapturedDraw(NamedTuple):
    """The work of a head that can be captured together with the forward before it."""

    key: Hashable
    draw: Callable[[Gathered, torch.Tensor], torch.Tensor]  # returns results at a fixed address
    put: Callable[[torch.Tensor], None]  # to where this step's results are copied from; not captured


class Head:
    """One step's head: its device work, and how its results are read once copied; None if it has no results."""

    def __init__(
        self, run: Finish, handle: Callable[[Sent], StepHandle] | None, captured: CapturedDraw | None = None
    ) -> None:
        """`captured`: the same work as `run` for steps without data that come after the forward's launch; None: it
        cannot be captured with the forward."""
        self.run = run
        self.handle = handle
        self.captured = captured


def step_handle(heads: Sequence[Head], sent: Sent) -> StepHandle:
    """Host: the handle of a step with the results of these heads."""
    handles = [head.handle(sent) for head in heads if head.handle is not None]
    if not handles:
        handle = StepHandle(sent.copied, NO_RESULTS, None)
    else:
        handle = handles[0] if len(handles) == 1 else MixedHandle(*handles)
    handle.ended = sent.ended
    return handle


class HeadMaker(Protocol):
    """Makes a head for each step."""

    def wants_all(self, plan: StepPlan) -> bool:
        """Host: whether the head reads hidden states other than that of each row's last token."""

    def prepare(
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: upload what the head needs; None if this step needs no head. `size`: what the forward is padded to;
        None: it is not padded. `only_last`: the hidden states are those of each row's last token, not of all tokens.
        A captured forward leaves them at the addresses of its graph: `Gathered.graph`."""
