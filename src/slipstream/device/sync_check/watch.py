"""watch: finds where the current thread waits for the device."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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


# The waits that a watcher found, and those that are allowed.

_reason: ContextVar[str | None] = ContextVar("sync_allowed", default=None)


@contextmanager
def sync_allowed(reason: str) -> Iterator[None]:
    """Marks a block in which the host may wait. `reason` is a literal string: the AST net reads it."""
    assert reason, "a wait without a reason; say why the host may wait here"
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)


@dataclass(slots=True)
class Sync:
    """One stack at which the host waited, with the number and the duration of all waits there."""

    what: str
    stack: tuple[str, ...]  # "file:line in function", innermost first
    allowed: str | None  # the reason passed to sync_allowed
    count: int = 0
    seconds: float = 0.0  # total time that the host waited

    def __str__(self) -> str:
        why = "" if self.allowed is None else f", allowed: {self.allowed}"
        lines = "".join(f"\n    {line}" for line in self.stack)
        return f"{self.what} ({self.count} times, {1000 * self.seconds:.2f} ms{why}){lines}"


@dataclass(slots=True)
class SyncLog:
    on_found: Callable[[Sync], None] | None = None  # called for each wait that is not allowed, each time
    _syncs: dict[tuple[str, tuple[str, ...], str | None], Sync] = field(default_factory=dict)

    @property
    def found(self) -> list[Sync]:
        """The waits that are not allowed."""
        return [sync for sync in self._syncs.values() if sync.allowed is None]

    @property
    def allowed(self) -> list[Sync]:
        return [sync for sync in self._syncs.values() if sync.allowed is not None]

    def add(self, what: str, seconds: float, *, unless_known: bool = False) -> None:
        """`unless_known`: skip it if a wait of another name was found at the same stack."""
        stack, reason = _stack(), _reason.get()
        if unless_known and any(name != what and known == stack for name, known, _ in self._syncs):
            return
        sync = self._syncs.setdefault((what, stack, reason), Sync(what, stack, reason))
        sync.count += 1
        sync.seconds += seconds
        if sync.allowed is None and self.on_found is not None:
            self.on_found(sync)


def _stack() -> tuple[str, ...]:
    """The caller's frames, innermost first, without this package, torch, torch's warning machinery, and the frames that
    run a script."""
    left_out = (os.path.dirname(__file__), torch.__path__[0], "<frozen ", warnings.__file__, contextlib.__file__)
    return tuple(
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in reversed(traceback.extract_stack())
        if not frame.filename.startswith(left_out)
    )


# Torch operations that make the host wait.

# The shapes of their results depend on values of their inputs.
_READS = {
    "aten::_local_scalar_dense": "item()",
    "aten::nonzero": "nonzero()",
    "aten::masked_select": "masked_select()",
    "aten::repeat_interleave": "repeat_interleave() without output_size",
    "aten::unique_dim": "unique()",
    "aten::unique_consecutive": "unique_consecutive()",
    "aten::_unique": "unique()",
    "aten::_unique2": "unique()",
    "aten::bincount": "bincount()",
    "aten::equal": "equal()",
}


def waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cpu: bool) -> str | None:
    """The name of an operation that makes the host wait, or None. `cpu`: the CPU is treated as the device."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        # the overload that makes indices from counts; the others call it
        return _READS[name] if kwargs.get("output_size") is None and (cpu or not args[0].is_cpu) else None
    if name in _READS:
        return _READS[name] if cpu or not args[0].is_cpu else None
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        on_device = cpu or any(not tensor.is_cpu for tensor in (args[0], *masks))
        return "a mask as an index" if masks and on_device else None
    if name == "aten::_to_copy":
        target = kwargs.get("device") or args[0].device
        # a non_blocking copy to the host allocates pinned memory itself
        host = args[0] if args[0].is_cpu else None
        return copy_waits(args[0].device, target, bool(kwargs.get("non_blocking")), host)
    if name == "aten::copy_":
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        host = args[1] if args[1].is_cpu else args[0]
        return copy_waits(args[1].device, args[0].device, non_blocking, host)
    return None


def copy_waits(source: torch.device, target: torch.device, non_blocking: bool, host: torch.Tensor | None) -> str | None:
    """`host`: the tensor in host memory, if it exists already. Pageable or strided memory cannot be copied
    asynchronously: torch copies through a pageable buffer."""
    if source.type == target.type or "meta" in (source.type, target.type):
        return None
    direction = f"copy from {source.type} to {target.type}"
    if not non_blocking:
        return f"{direction} without non_blocking"
    if host is None:
        return None
    side = "from" if source.type == "cpu" else "into"
    if not host.is_contiguous():
        return f"{direction} {side} strided memory"
    return None if host.is_pinned() else f"{direction} {side} memory that is not pinned"
