"""Kernels compiled before they are needed, all at once, each on a core of its own.

A step is walked through: everything happens but the launches of our kernels, whose programs are compiled instead, with
the very arguments they would have got. So there is no list of kernels to keep, and no variant is missed or made for
nothing. What the kernels would have written is zero, which is a valid token, page or position to whatever reads it.

Triton's compiler holds the interpreter most of the time, so threads do not help. Forked processes do: each compiles its
share into Triton's cache on the disk, touches no device, and is gone; this process then finds the programs there.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
from torch.overrides import TorchFunctionMode

Walk = Callable[[], None]

_FEW = 2  # tasks that a process gets while more may come
_LATE = 10  # the niceness of processes that are more than there is room for
_walking = threading.Lock()  # engines may start side by side, and Triton is everybody's
PATIENCE = 120.0  # seconds that a forked process may take; then its share is compiled here


def can_compile_ahead() -> bool:
    """Whether there is a Triton that lets others compile for it, and it compiles at all rather than interpret."""
    if not _has_compiler():
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode") and hasattr(os, "fork")


def _has_compiler() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"


@cache
def get_ready() -> threading.Thread | None:
    """Begin, beside the caller, with what Triton does once in a process: it is imported, compiles some C, asks for
    its assembler's version and hashes itself, 400 MB of it."""
    if not _has_compiler():
        return None
    thread = threading.Thread(target=_use_triton_first, name="slipstream-triton", daemon=True)
    thread.start()
    return thread


def _use_triton_first() -> None:
    with contextlib.suppress(Exception):  # told again by whoever needs it
        from triton.runtime.cache import triton_key

        hashing = threading.Thread(target=triton_key, daemon=True)
        hashing.start()
        from triton.compiler import make_backend
        from triton.runtime import driver

        make_backend(driver.active.get_current_target()).hash()
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
        hashing.join()


@contextlib.contextmanager
def compiling_ahead(walk: Walk, num_processes: int) -> Iterator[ForkedCompiler]:
    """Walks, then runs the block while kernels compile; they are ready when it ends.

    One that fails to compile says so when it is first launched.
    """
    import triton

    thread = get_ready()
    if thread is not None:
        thread.join()  # before anything is forked

    class Mode(triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> None:
            if key not in submitted:  # calls that differ may come to the same
                submitted.add(key)
                compiler.submit(_Kernel(key, compile_fn, finalize_fn))

    submitted: set[str] = set()
    compiler = ForkedCompiler(num_processes)
    try:
        with _walking, Mode(compiler), _nothing_launched(), _ZeroFilled():
            walk()
        compiler.start()
        yield compiler
        compiler.finish()
    except BaseException:
        compiler.abandon()
        raise


class Task(Protocol):
    """Something whose effect stays on the disk, so that it is made once and then only read."""

    def is_made(self) -> bool:
        """Whether all of it is on the disk. If that is not certain, no."""

    def make(self) -> None: ...

    def read(self) -> None:
        """Or make it now, if it is not there."""


class ForkedCompiler:
    """Has forked processes make tasks, then reads what they have made.

    A task that comes while there is room for another process gets one at once: what takes longest should come first.
    Those that found none are shared out by `start`. One that was made by an earlier run needs none.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._waiting: list[Task] = []  # for a process
        self._children: dict[int, list[Task]] = {}
        self._made: list[Task] = []  # by processes that are gone

    def submit(self, task: Task) -> None:
        if task.is_made():
            self._made.append(task)
            return
        self._waiting.append(task)
        if len(self._children) >= self._num_processes:
            self._part_from_children()
        if len(self._children) < self._num_processes:
            # few, so that none of them waits long behind others, and more than one, as forking takes its time too
            some, self._waiting = self._waiting[:_FEW], self._waiting[_FEW:]
            self._fork(some)

    def start(self) -> None:
        """Nothing more will be submitted: what still waits gets processes of its own, which let the others go first."""
        waiting, self._waiting = self._waiting, []
        num = min(self._num_processes, len(waiting))
        for child in range(num):
            self._fork(waiting[child::num], _LATE)

    def _fork(self, tasks: list[Task], niceness: int = 0) -> None:
        with _no_garbage_collected():  # from before the fork on: others have callbacks that run in the child first
            with warnings.catch_warnings():
                # of threads that are not forked with us; whoever compiles needs none of them
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if not process:
                _make_and_exit(tasks, niceness)
        self._children[process] = tasks

    def _part_from_children(self) -> None:
        for child in [child for child in self._children if _has_ended(child)]:
            self._made += self._children.pop(child)

    def abandon(self) -> None:
        """Nobody needs the tasks any more."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        self._waiting, self._children, self._made = [], {}, []

    def finish(self, but: int = 0) -> None:
        """Read what was made, of each process as soon as it has ended; until no more than `but` tasks are left, with a
        process each. What none has made is made here."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._part_from_children()
            for task in self._made:
                with contextlib.suppress(Exception):  # told by the kernel's first launch
                    task.read()
            self._made = []
            if len(self._children) <= but and self._num_left() <= but:
                return
            if time.monotonic() > deadline:
                for child in self._children:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.005)

    def _num_left(self) -> int:
        return sum(not task.is_made() for tasks in self._children.values() for task in tasks)


def _make_and_exit(tasks: list[Task], niceness: int) -> NoReturn:
    try:
        _become_a_compiler(niceness)
        for task in tasks:
            with contextlib.suppress(Exception):
                task.make()
    finally:
        os._exit(0)


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:  # somebody else has waited for it
        return True


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """An event of the device that is freed in a forked process ends that process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _become_a_compiler(niceness: int) -> None:
    """In a process just forked: whatever of the device was inherited stays untouched, and nobody hears of a mishap."""
    gc.freeze()
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


class _Kernel:
    """A kernel that Triton was asked for, and the piece of C by which it hands arguments over: a compiler's run too, as
    long as a small kernel's, which Triton puts off until the first launch."""

    _MARK = "launcher_is_built"

    def __init__(self, key: str, compile: Callable[[], Any], finalize: Callable[[Any], None]) -> None:
        from triton.runtime.cache import get_cache_manager

        self._compile = compile
        self._finalize = finalize
        self._files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())  # as Triton finds the kernel's own

    def is_made(self) -> bool:
        return self._files.get_file(self._MARK) is not None

    def make(self) -> None:
        from triton.runtime import driver

        kernel = self._compile()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        self._files.put("", self._MARK)

    def read(self) -> None:
        self._finalize(self._compile())  # found in Triton's cache, and launched from now on


@contextlib.contextmanager
def _nothing_launched() -> Iterator[None]:
    """Launches of this thread compile and return. Other threads notice nothing."""
    from triton.runtime.jit import JITFunction

    owner, run = threading.get_ident(), JITFunction.run
    met: set[Any] = set()  # every layer launches the same; asking Triton about each takes a millisecond

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        variant = (id(self), *map(_kind, args), *((name, _kind(kwargs[name])) for name in kwargs))
        if variant not in met:
            met.add(variant)
            run(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def _kind(value: Any) -> Any:
    """All that a compiled program may depend on of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, Hashable):
        return value
    # a descriptor of a tensor, say: what it is made of, and not which one it is
    base, block, layout = (getattr(value, name, None) for name in ("base", "block_shape", "layout"))
    return type(value), getattr(base, "dtype", None), str(block), str(layout)


_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}


class _ZeroFilled(TorchFunctionMode):
    """Memory that nobody has written holds zeros. (A mode of dispatch would see more, and imports the whole of torch's
    compiler, which takes seconds.)"""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _EMPTY else result
