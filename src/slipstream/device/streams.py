"""Streams and events: a queue of device work, and a point in it.

On CUDA they are the driver's. On the CPU a stream is either inline (`run` calls at once: depth 0) or a worker
thread that runs what was queued, in order, later, so that asynchrony and its races are real without a GPU.

What is queued is one closure per part of a step. It may capture ring slots and arrays that nobody changes;
on a threaded stream it is the only place where torch kernels run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from slipstream.device.sync_check.watch import host_waits

Work = Callable[[], None]


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Sleep until the stream has come this far. Raises what the stream's work raised."""

    def done(self) -> bool: ...

    def since(self, earlier: Event) -> float:
        """Seconds on the device's clock from that point to this one. Both are reached, and were recorded as timed."""


class Stream(Protocol):
    """Used by one thread. What is queued may be held back until `flush`, or until that thread waits for an event."""

    def run(self, work: Work) -> None:
        """Queue `work` after all that was queued before."""

    def record(self, *, timed: bool = False) -> Event:
        """A point after all that was queued so far; timed, if anyone will ask when it was reached."""

    def wait_for(self, event: Event) -> None:
        """What is queued from now on runs after `event`. The host does not wait."""

    def flush(self) -> None:
        """Hand over what is held back."""

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
"""An event that has always been reached."""


class InlineStream:
    """Runs at once, in the caller's thread."""

    def run(self, work: Work) -> None:
        work()

    def record(self, *, timed: bool = False) -> Event:
        return _Passed(time.perf_counter()) if timed else PASSED

    def wait_for(self, event: Event) -> None:
        event.wait()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Mark:
    """An event of a threaded stream: how many pieces it will have been through by then."""

    __slots__ = ("stream", "count", "time")

    def __init__(self, stream: ThreadedStream, count: int) -> None:
        self.stream = stream
        self.count = count
        self.time = 0.0

    def stamp(self) -> None:
        """By the stream, as the last piece before this point."""
        self.time = time.perf_counter()

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Mark)
        return self.time - earlier.time

    def wait(self) -> None:
        """By the thread that queues."""
        self.stream.flush()
        if self.done():
            self.sleep()
        else:
            with host_waits("wait for an event"):
                self.sleep()

    def sleep(self) -> None:
        """By another stream: its own thread may not hand over what this one holds back."""
        self.stream.sleep_until(self.count)
        if self.stream.failure is not None:
            raise self.stream.failure

    def done(self) -> bool:
        return self.stream.passed >= self.count


class ThreadedStream:
    """A worker thread. After work raised, the rest of the queue is skipped and every event raises that error.

    Waking the thread costs more than any of the rest, so work is held back and handed over a step at a time; events
    are counts, and only whoever sleeps on one needs a lock.
    """

    def __init__(self, name: str, prepare: Work | None = None) -> None:
        self.queue: queue.SimpleQueue[list[Work] | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.passed = 0  # pieces of work that are behind us, whether they ran or were skipped
        self._held: list[Work] = []
        self._num_queued = 0
        self._lock = threading.Lock()
        self._sleepers: list[tuple[int, threading.Lock]] = []  # whoever waits until this many are behind us
        self.thread = threading.Thread(target=self._serve, args=(prepare,), name=name, daemon=True)
        self.thread.start()

    def run(self, work: Work) -> None:
        self._held.append(work)
        self._num_queued += 1

    def record(self, *, timed: bool = False) -> Event:
        if not timed:
            return _Mark(self, self._num_queued)
        mark = _Mark(self, self._num_queued + 1)
        self.run(mark.stamp)
        return mark

    def wait_for(self, event: Event) -> None:
        if not isinstance(event, _Mark):
            self.run(event.wait)
        elif event.stream is not self:  # else it comes before in any case
            event.stream.flush()
            self.run(event.sleep)

    def flush(self) -> None:
        if self._held:
            self.queue.put(self._held)
            self._held = []

    def sleep_until(self, count: int) -> None:
        if self.passed >= count:
            return
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if self.passed >= count:
                return
            self._sleepers.append((count, gate))
        gate.acquire()  # the worker opens it

    def close(self) -> None:
        self.flush()
        self.queue.put(None)
        self.thread.join()

    def before(self) -> None:
        """Comes before each piece of work; a test stream sleeps here."""

    def _serve(self, prepare: Work | None) -> None:
        if prepare is not None:
            prepare()
        while (works := self.queue.get()) is not None:
            for work in works:
                if self.failure is None:
                    try:
                        self.before()
                        work()
                    except BaseException as error:  # handed to whoever waits on an event
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


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return self.event.query()

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return earlier.event.elapsed_time(self.event) / 1000


class CudaStream:
    """The driver's own queue. `run` calls at once, with the stream current: kernels are what is queued."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # whoever waits sleeps instead of spinning
        event.record(self.stream)
        return _CudaEvent(event)

    def wait_for(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self.stream.wait_event(event.event)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.stream.synchronize()
