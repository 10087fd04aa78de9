"""watch: finds where the current thread waits for the device."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.device.sync_check.log import Sync, SyncLog
from slipstream.device.sync_check.operations import waits


@contextmanager
def watch(
    log: SyncLog | None = None, on_found: Callable[[Sync], None] | None = None, *, cpu: bool | None = None
) -> Iterator[SyncLog]:
    """Returns a log that is filled while the block runs, or continues one. `on_found` may raise.

    `cpu`: whether reads of tensors in host memory count; None: if there is no GPU.
    """
    cpu = not torch.cuda.is_available() if cpu is None else cpu
    log = SyncLog(on_found) if log is None else log
    before = getattr(_watching, "log", None), getattr(_watching, "heard", None)
    try:
        with _explicit_waits(), _cuda_warnings(log) as heard, _Watcher(log, heard, cpu):
            _watching.log, _watching.heard = log, heard
            yield log
    finally:
        _watching.log, _watching.heard = before


@contextmanager
def host_waits(what: str) -> Iterator[None]:
    """Around a wait of the host that is no torch operation, so that watchers of this thread record it."""
    log: SyncLog | None = getattr(_watching, "log", None)
    heard: _CudaWarnings | None = getattr(_watching, "heard", None)
    start = time.perf_counter()
    if heard is not None:
        heard.enter()  # torch may warn of the same wait
    try:
        yield
    finally:
        if heard is not None:
            heard.leave()
    if log is not None:
        log.add(what, time.perf_counter() - start)


def is_watched() -> bool:
    """Whether waits of this thread are recorded."""
    return getattr(_watching, "log", None) is not None


_watching = threading.local()


class _Watcher(TorchDispatchMode):
    def __init__(self, log: SyncLog, heard: _CudaWarnings, cpu: bool) -> None:
        super().__init__()
        self.log = log
        self.heard = heard
        self.cpu = cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = waits(func, args, kwargs, self.cpu)
        self.heard.enter()
        start = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            warned = self.heard.leave()
        seconds = time.perf_counter() - start
        if what is None and warned:
            what = f"{func} (torch says it synchronises)"
        if what is not None:
            self.log.add(what, seconds)
        return result


class _CudaWarnings:
    """Torch's own warnings about synchronising CUDA calls. A warning inside a watched operation belongs to it, and so
    does one after it at the same line, since torch delays warnings until it returns to Python."""

    def __init__(self, log: SyncLog) -> None:
        self.log = log
        self._thread = threading.get_ident()
        self._inside = self._warned = False

    def enter(self) -> None:
        self._inside, self._warned = True, False

    def leave(self) -> bool:
        self._inside = False
        return self._warned

    def warn(self) -> None:
        if self._thread != threading.get_ident():
            return  # other threads are not watched
        if self._inside:
            self._warned = True
        else:
            self.log.add("a synchronising CUDA call", 0.0, unless_known=True)


@contextmanager
def _cuda_warnings(log: SyncLog) -> Iterator[_CudaWarnings]:
    heard = _CudaWarnings(log)
    if not torch.cuda.is_available():
        yield heard
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def hear(message: Any, category: Any, *rest: Any, **more: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                heard.warn()
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield heard
        finally:
            torch.cuda.set_sync_debug_mode(mode)


# Functions that wait, and how to ask whether there is anything to wait for.
_WAITING: list[tuple[Any, str, str, Callable[[Any], bool]]] = [
    (torch.cuda.Event, "synchronize", "wait for an event", lambda event: event.query()),
    (torch.cuda.Stream, "synchronize", "wait for a stream", lambda stream: stream.query()),
    (torch.cuda, "synchronize", "wait for the device", lambda *device: False),
]
_patched = 0  # open watchers, in all threads
_lock = threading.Lock()
_originals: list[Any] = []


@contextmanager
def _explicit_waits() -> Iterator[None]:
    """Waits for events, streams and devices are no torch operations: they are patched while a watcher is open."""
    global _patched
    if not torch.cuda.is_available():
        yield
        return
    with _lock:
        _patched += 1
        if _patched == 1:
            for owner, name, what, passed in _WAITING:
                _originals.append(getattr(owner, name))
                setattr(owner, name, _telling(_originals[-1], what, passed))
    try:
        yield
    finally:
        with _lock:
            _patched -= 1
            if _patched == 0:
                for (owner, name, _, _), original in zip(_WAITING, _originals, strict=True):
                    setattr(owner, name, original)
                _originals.clear()


def _telling(wait: Callable[..., Any], what: str, passed: Callable[..., bool]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_watching, "log", None) is None or passed(*args):
            return wait(*args, **kwargs)
        with host_waits(what):
            return wait(*args, **kwargs)

    return call
