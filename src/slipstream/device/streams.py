"""Streams and events: a queue of device work, and a point in it.

On CUDA they are the driver's. On the CPU a stream is either inline (`run` calls at once: depth 0) or a worker
thread that runs what was queued, in order, later, so that asynchrony and its races are real without a GPU.

What is queued is one closure per part of a step. It may capture ring slots and arrays that nobody changes;
on a threaded stream it is the only place where torch kernels run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Sleep until the stream has come this far. Raises what the stream's work raised."""

    def done(self) -> bool: ...


class Stream(Protocol):
    def run(self, work: Work) -> None:
        """Queue `work` after all that was queued before."""

    def record(self) -> Event:
        """A point after all that was queued so far."""

    def wait_for(self, event: Event) -> None:
        """What is queued from now on runs after `event`. The host does not wait."""

    def close(self) -> None: ...


class _Passed:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


PASSED: Event = _Passed()
"""An event that has always been reached."""


class InlineStream:
    """Runs at once, in the caller's thread."""

    def run(self, work: Work) -> None:
        work()

    def record(self) -> Event:
        return PASSED

    def wait_for(self, event: Event) -> None:
        event.wait()

    def close(self) -> None:
        pass


class _Reached:
    """An event of a threaded stream."""

    def __init__(self, stream: ThreadedStream) -> None:
        self.stream = stream
        self.flag = threading.Event()

    def wait(self) -> None:
        self.flag.wait()
        if self.stream.failure is not None:
            raise self.stream.failure

    def done(self) -> bool:
        return self.flag.is_set()


class ThreadedStream:
    """A worker thread. After work raised, the rest of the queue is skipped and every event raises that error."""

    def __init__(self, name: str, prepare: Work | None = None) -> None:
        self.queue: queue.SimpleQueue[Work | _Reached | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(prepare,), name=name, daemon=True)
        self.thread.start()

    def run(self, work: Work) -> None:
        self.queue.put(work)

    def record(self) -> Event:
        event = _Reached(self)
        self.queue.put(event)
        return event

    def wait_for(self, event: Event) -> None:
        self.queue.put(event.wait)

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def before(self) -> None:
        """Comes before each piece of work; a test stream sleeps here."""

    def _serve(self, prepare: Work | None) -> None:
        if prepare is not None:
            prepare()
        while (item := self.queue.get()) is not None:
            if isinstance(item, _Reached):
                item.flag.set()
            elif self.failure is None:
                try:
                    self.before()
                    item()
                except BaseException as error:  # handed to whoever waits on an event
                    self.failure = error


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return self.event.query()


class CudaStream:
    """The driver's own queue. `run` calls at once, with the stream current: kernels are what is queued."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # whoever waits sleeps instead of spinning
        event.record(self.stream)
        return _CudaEvent(event)

    def wait_for(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self.stream.wait_event(event.event)

    def close(self) -> None:
        self.stream.synchronize()
