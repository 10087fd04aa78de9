"""Streams and events: a queue of device work, and a point in the queue.

On CUDA they are the driver's. On the CPU a stream is either inline (`run` calls the work at once: depth 0) or a worker
thread that runs queued work later, in order, so that asynchrony and its races are real without a GPU.

Work is one closure per part of a step. It may capture ring buffers and arrays that are never written again. With a
threaded stream, torch kernels run in that thread only.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from slipstream.base.host import num_cpus
from slipstream.device.sync_check.watch import host_waits, is_watched

DeviceWork = Callable[[], None]

_POLL_SECONDS = 0.003  # longest wait in which the host polls
_MIN_POLL_CPUS = 8
_NUM_LENT = 32  # streams of torch's pool


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Wait until the stream has reached this point. Raises the error of the stream's work, if any."""

    def done(self) -> bool: ...

    def since(self, earlier: Event) -> float:
        """Seconds on the device's clock from `earlier` to this point. Both must be reached, and recorded as timed."""


class Stream(Protocol):
    """Used by one thread. Queued work may be held back until `flush`, or until that thread waits for an event."""

    def run(self, work: DeviceWork) -> None:
        """Queue `work` after all work queued so far."""

    def record(self, *, timed: bool = False) -> Event:
        """A point after all work queued so far; `timed` if its time will be read."""

    def wait_for(self, event: Event) -> None:
        """Work queued from now on runs after `event`. The host does not wait."""

    def flush(self) -> None:
        """Submit work that is held back."""

    def close(self) -> None: ...


class _Passed:
    __slots__ = ("time",)

    def __init__(self, time: float = 0.0) -> None:
        self.time = time

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Passed)
        return self.time - earlier.time


PASSED: Event = _Passed()
"""An event that is reached from the start."""


class InlineStream:
    """Runs work at once, in the caller's thread."""

    def run(self, work: DeviceWork) -> None:
        work()

    def record(self, *, timed: bool = False) -> Event:
        return _Passed(time.perf_counter()) if timed else PASSED

    def wait_for(self, event: Event) -> None:
        event.wait()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _ThreadedEvent:
    """An event of a threaded stream: the number of pieces of work before it."""

    __slots__ = ("stream", "count", "time")

    def __init__(self, stream: ThreadedStream, count: int) -> None:
        self.stream = stream
        self.count = count
        self.time = 0.0

    def stamp(self) -> None:
        """Called by the stream as the last piece of work before this point."""
        self.time = time.perf_counter()

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _ThreadedEvent)
        return self.time - earlier.time

    def wait(self) -> None:
        """Called by the thread that queues work."""
        self.stream.flush()
        if self.done():
            self.sleep()
        else:
            with host_waits("wait for an event"):
                self.sleep()

    def sleep(self) -> None:
        """Called by another stream, whose thread must not submit what this stream holds back."""
        self.stream.sleep_until(self.count)
        if self.stream.failure is not None:
            raise self.stream.failure

    def done(self) -> bool:
        return self.stream.passed >= self.count


class ThreadedStream:
    """A worker thread. After an error the rest of the queue is skipped, and every event raises the error.

    Waking the thread is the largest cost, so work is held back and submitted once per step. Events are counts; only a
    thread that waits for one needs a lock.
    """

    def __init__(self, name: str, prepare: DeviceWork | None = None) -> None:
        self.queue: queue.SimpleQueue[list[DeviceWork] | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.passed = 0  # pieces of work that ran or were skipped
        self._unflushed: list[DeviceWork] = []
        self._num_queued = 0
        self._lock = threading.Lock()
        self._sleepers: list[tuple[int, threading.Lock]] = []  # threads that wait until this many pieces have passed
        self.thread = threading.Thread(target=self._serve, args=(prepare,), name=name, daemon=True)
        self.thread.start()

    def run(self, work: DeviceWork) -> None:
        self._unflushed.append(work)
        self._num_queued += 1

    def record(self, *, timed: bool = False) -> Event:
        if not timed:
            return _ThreadedEvent(self, self._num_queued)
        event = _ThreadedEvent(self, self._num_queued + 1)
        self.run(event.stamp)
        return event

    def wait_for(self, event: Event) -> None:
        if not isinstance(event, _ThreadedEvent):
            self.run(event.wait)
        elif event.stream is not self:  # an event of this stream comes first in any case
            event.stream.flush()
            self.run(event.sleep)

    def flush(self) -> None:
        if self._unflushed:
            self.queue.put(self._unflushed)
            self._unflushed = []

    def sleep_until(self, count: int) -> None:
        if self.passed >= count:
            return
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if self.passed >= count:
                return
            self._sleepers.append((count, gate))
        gate.acquire()  # the worker releases it

    def close(self) -> None:
        self.flush()
        self.queue.put(None)
        self.thread.join()

    def before(self) -> None:
        """Called before each piece of work; a test stream delays here."""

    def _serve(self, prepare: DeviceWork | None) -> None:
        if prepare is not None:
            prepare()
        while (works := self.queue.get()) is not None:
            for work in works:
                if self.failure is None:
                    try:
                        self.before()
                        work()
                    except BaseException as error:  # raised by every event from now on
                        self.failure = error
                with self._lock:
                    self.passed += 1
                    if self._sleepers:
                        self._wake()

    def _wake(self) -> None:
        for sleeper in list(self._sleepers):
            count, gate = sleeper
            if count <= self.passed:
                self._sleepers.remove(sleeper)
                gate.release()


class EventWaits:
    """Waits for events of the driver. If the last wait was short, the host polls: a thread that has slept is slow for a
    while afterwards, so that on a virtual machine a step of 64 rows took it 0.8 ms instead of 0.5. Other waits, and all
    waits on a machine with few CPUs, are asleep."""

    def __init__(self) -> None:
        self._polls = num_cpus() >= _MIN_POLL_CPUS
        self._seconds = 0.0  # of the last wait

    def wait(self, event: torch.cuda.Event) -> None:
        if event.query():
            return
        start = time.perf_counter()
        if self._polls and self._seconds < _POLL_SECONDS and not is_watched():
            end = start + _POLL_SECONDS
            while not event.query() and time.perf_counter() < end:
                time.sleep(0)  # lets other threads of the interpreter run
        event.synchronize()
        self._seconds = time.perf_counter() - start


class _CudaEvent:
    __slots__ = ("event", "_waits")

    def __init__(self, event: torch.cuda.Event, waits: EventWaits) -> None:
        self.event = event
        self._waits = waits

    def wait(self) -> None:
        self._waits.wait(self.event)

    def done(self) -> bool:
        return self.event.query()

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return earlier.event.elapsed_time(self.event) / 1000


class CudaStream:
    """The driver's queue. `run` calls the work at once with the stream current: its kernels are queued."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._id = stream.stream_id, stream.device_index, stream.device_type
        self._waits = EventWaits()

    def run(self, work: DeviceWork) -> None:
        if torch._C._cuda_getDevice() != self._id[1]:  # the caller has made another device current
            with torch.cuda.stream(self.stream):
                work()
            return
        # as `torch.cuda.stream`, in a fraction of its time on the host
        before = torch._C._cuda_getCurrentStream(self._id[1])
        _make_current(*self._id)
        try:
            work()
        finally:
            _make_current(*before)

    def record(self, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # a thread in `synchronize` is asleep
        event.record(self.stream)
        return _CudaEvent(event, self._waits)

    def wait_for(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self.stream.wait_event(event.event)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.stream.synchronize()


def _make_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


# Runs independent device work on several CUDA streams.

T = TypeVar("T")


def execute_in_parallel(first: Callable[[], T], *others: Callable[[], Any]) -> tuple[T, *tuple[Any, ...]]:
    """Device: run all of them at the same time, the first on the current stream. Returns their results in order.

    The others start after all work queued on the current stream, and work queued there later runs after them: for the
    caller they seem to run in order. They must not depend on each other. Forks and joins are events, which a graph
    captures. Without CUDA they run in order.
    """
    if not others or not torch.cuda.is_initialized():
        return first(), *(work() for work in others)
    current = torch.cuda.current_stream()
    forked = torch.cuda.Event()
    forked.record(current)
    beside = []
    results: list[Any] = []
    try:
        for number, work in enumerate(others):
            stream = _side_stream(current.device_index, number)
            stream.wait_event(forked)
            beside.append(stream)
            with torch.cuda.stream(stream):
                results.append(work())
        return first(), *results
    finally:
        # The allocator may reuse memory across these streams: a later fork waits for all reads on this stream, and
        # memory read on another stream is freed only after the join.
        for stream in beside:
            current.wait_stream(stream)


def new_stream(device: int | torch.device | None = None) -> torch.cuda.Stream:
    """A stream that nothing else of this process has, as long as there is one.

    torch lends 32 in turn: in a process with many engines two of them, or two sides of one step, would get the same,
    and what should overlap would run in order.
    """
    taken = {stream.cuda_stream for stream in _lent}
    for _ in range(_NUM_LENT):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in taken:
            break
    _lent.add(stream)
    return stream


def _side_stream(device: int, number: int) -> torch.cuda.Stream:
    key = (device, number)
    if key not in _streams:
        _streams[key] = new_stream(device)
    return _streams[key]


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
_lent: weakref.WeakSet[torch.cuda.Stream] = weakref.WeakSet()
