"""Where the host waits for the device: places that may, and a detector for all others.

Launching a step never needs a token's value. A place that must read from the device all the same says so with
`sync_allowed`. `watch` finds the reads that do not, in this engine or in any torch program:

    with watch() as log:
        run()
    for sync in log.found:
        print(sync)

It sees, in the thread that opened it, every torch operation that reads a value to go on (`.item()`, `bool(t)`,
`nonzero`, a mask as an index, `unique`) and every copy between host and device that the host sits through. On CUDA it
also hears what torch's own sync debug mode warns of, from any thread. It does not see waits on events, waits inside
other libraries, nor, on the CPU, reads that are no operation there: `.tolist()`, `.numpy()`, `.cpu()`. Work on a
threaded CPU stream runs in another thread: watch at depth 0.
"""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_reason: ContextVar[str | None] = ContextVar("sync_allowed", default=None)


@contextmanager
def sync_allowed(reason: str) -> Iterator[None]:
    """Marks a block in which the host may wait. `reason` is a literal string, for the reader and for the nets."""
    assert reason, "a wait without a reason; say why the host may wait here"
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)


@dataclass(slots=True)
class Sync:
    """One place where the host waited, with all the times it did."""

    what: str
    stack: tuple[str, ...]  # "file:line in function", the innermost first
    allowed: str | None  # the reason given by sync_allowed
    count: int = 0
    seconds: float = 0.0  # that the host spent in it

    def __str__(self) -> str:
        why = "" if self.allowed is None else f", allowed: {self.allowed}"
        lines = "".join(f"\n    {line}" for line in self.stack)
        return f"{self.what} ({self.count} times, {1000 * self.seconds:.2f} ms{why}){lines}"


@dataclass(slots=True)
class SyncLog:
    _places: dict[tuple[str, tuple[str, ...]], Sync] = field(default_factory=dict)

    @property
    def found(self) -> list[Sync]:
        """Those that nobody allowed."""
        return [sync for sync in self._places.values() if sync.allowed is None]

    @property
    def allowed(self) -> list[Sync]:
        return [sync for sync in self._places.values() if sync.allowed is not None]

    def add(self, what: str, seconds: float) -> None:
        stack = _stack()
        sync = self._places.setdefault((what, stack), Sync(what, stack, _reason.get()))
        sync.count += 1
        sync.seconds += seconds


@contextmanager
def watch() -> Iterator[SyncLog]:
    log = SyncLog()
    with _heard_from_cuda(log) as heard, _Watcher(log, heard):
        yield log


# Shapes of their results are values of their inputs.
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


class _Watcher(TorchDispatchMode):
    def __init__(self, log: SyncLog, heard: _Heard) -> None:
        super().__init__()
        self.log = log
        self.heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = _waits(func, args, kwargs)
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


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What to call an operation by which the host waits, or None."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        # the form that makes indices from counts; the others call it
        return None if kwargs.get("output_size") is not None else _READS[name]
    if name in _READS:
        return _READS[name]
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return "a mask as an index" if masks else None
    if name == "aten::_to_copy":
        source, target = args[0].device, kwargs.get("device") or args[0].device
        return _copy(args[0], source, target, bool(kwargs.get("non_blocking")))
    if name == "aten::copy_":
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return _copy(args[1], args[1].device, args[0].device, not blocking)
    return None


def _copy(tensor: torch.Tensor, source: torch.device, target: torch.device, non_blocking: bool) -> str | None:
    if source.type == target.type or "meta" in (source.type, target.type):
        return None
    way = f"copy from {source.type} to {target.type}"
    if not non_blocking:
        return f"{way} without non_blocking"
    if source.type == "cpu" and not tensor.is_pinned():
        return f"{way} from memory that is not pinned"
    return None


class _Heard:
    """Torch's own warnings of synchronising CUDA calls. One inside a watched operation is that operation's."""

    def __init__(self, log: SyncLog) -> None:
        self.log = log
        self._thread: int | None = None  # that is inside a watched operation
        self._warned = False

    def enter(self) -> None:
        self._thread, self._warned = threading.get_ident(), False

    def leave(self) -> bool:
        self._thread = None
        return self._warned

    def warn(self) -> None:
        if self._thread == threading.get_ident():
            self._warned = True
        else:
            self.log.add("a synchronising CUDA call", 0.0)


@contextmanager
def _heard_from_cuda(log: SyncLog) -> Iterator[_Heard]:
    heard = _Heard(log)
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


def _stack() -> tuple[str, ...]:
    """The caller's frames, the innermost first; ours and torch's own left out."""
    own, library = __file__, torch.__path__[0]
    return tuple(
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in reversed(traceback.extract_stack())
        if frame.filename != own and not frame.filename.startswith(library)
    )
