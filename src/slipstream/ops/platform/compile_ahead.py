"""Compiles Triton kernels ahead of their first launch, in parallel processes.

A dry run executes a step with every launch of our kernels replaced by a compilation with the same arguments. So no list
of kernels has to be maintained, and exactly the variants that steps use are compiled. Outputs of the replaced kernels
are zero, which is a valid token id, page and position for the code that reads them.

Triton's compiler holds the GIL most of the time, so threads do not help. Forked processes do: each compiles its share
into Triton's cache on disk, does not touch the device, and exits; this process then loads the kernels from the cache.
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

from slipstream.base.processes import die_with_parent

DryRun = Callable[[], None]

_TASKS_PER_FORK = 2  # while more tasks may be submitted
_LOW_NICENESS = 10  # of the processes that `start` adds beyond the limit
_dry_run_lock = threading.Lock()  # engines may start in several threads; the patches of Triton are global
FORK_TIMEOUT = 120.0  # seconds; afterwards this process compiles the tasks of a child itself


def can_compile_ahead() -> bool:
    """Whether Triton supports asynchronous compilation here and is not in interpreter mode."""
    if not _has_compiler():
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode") and hasattr(os, "fork")


def _has_compiler() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"


@cache
def start_triton() -> threading.Thread | None:
    """Starts, in a thread, the work that Triton does once per process: import, compilation of its C helpers, the
    version query of its assembler, and a hash of its own 400 MB of files."""
    if not _has_compiler():
        return None
    thread = threading.Thread(target=_initialize_triton, name="slipstream-triton", daemon=True)
    thread.start()
    return thread


def _initialize_triton() -> None:
    with contextlib.suppress(Exception):  # the first use of Triton raises it again
        from triton.runtime.cache import triton_key

        hashing = threading.Thread(target=triton_key, daemon=True)
        hashing.start()
        from triton.compiler import make_backend
        from triton.runtime import driver

        make_backend(driver.active.get_current_target()).hash()
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
        hashing.join()


@contextlib.contextmanager
def compiling_ahead(dry_run: DryRun, num_processes: int) -> Iterator[ForkedCompiler]:
    """Runs the dry run, then the `with` block while kernels compile. They are ready when the block ends.

    A kernel that fails to compile raises at its first launch.
    """
    import triton

    thread = start_triton()
    if thread is not None:
        thread.join()  # before the first fork

    class Mode(triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> None:
            if key not in submitted:  # different calls may need the same kernel
                submitted.add(key)
                compiler.submit(_Kernel(key, compile_fn, finalize_fn))

    submitted: set[str] = set()
    compiler = ForkedCompiler(num_processes)
    try:
        with _dry_run_lock, Mode(compiler), _compiling_launches(), _ZeroFilled():
            dry_run()
        compiler.start()
        yield compiler
        compiler.finish()
    except BaseException:
        compiler.abandon()
        raise


class Task(Protocol):
    """Work whose result is stored on disk: made once, then only read."""

    def is_made(self) -> bool:
        """Whether the complete result is on disk; False if that is not certain."""

    def make(self) -> None: ...

    def read(self) -> None:
        """Reads the result, or makes it now if it is not on disk."""


class ForkedCompiler:
    """Makes tasks in forked processes, then reads their results in this process.

    A task submitted while fewer than `num_processes` run starts at once, so the longest tasks should come first.
    `start` distributes the tasks that still wait. A task that an earlier run made is only read.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._waiting: list[Task] = []  # for a child process
        self._children: dict[int, list[Task]] = {}
        self._made: list[Task] = []  # by children that have exited

    def submit(self, task: Task) -> None:
        if task.is_made():
            self._made.append(task)
            return
        self._waiting.append(task)
        if len(self._children) >= self._num_processes:
            self._collect_children()
        if len(self._children) < self._num_processes:
            # few tasks, so that none waits long behind another, but more than one, since a fork takes time too
            tasks, self._waiting = self._waiting[:_TASKS_PER_FORK], self._waiting[_TASKS_PER_FORK:]
            self._fork(tasks)

    def start(self) -> None:
        """Call after the last `submit`: forks more processes, of lower priority, for the tasks that still wait."""
        waiting, self._waiting = self._waiting, []
        num = min(self._num_processes, len(waiting))
        for child in range(num):
            self._fork(waiting[child::num], _LOW_NICENESS)

    def _fork(self, tasks: list[Task], niceness: int = 0) -> None:
        with _no_garbage_collected():  # from before the fork: at-fork callbacks of other modules run in the child first
            with warnings.catch_warnings():
                # the warning about threads that do not exist in the child; compilation needs none of them
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if not process:
                _make_and_exit(tasks, niceness)
        self._children[process] = tasks

    def _collect_children(self) -> None:
        for child in [child for child in self._children if _has_ended(child)]:
            self._made += self._children.pop(child)

    def abandon(self) -> None:
        """Kills the children and drops all tasks."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        self._waiting, self._children, self._made = [], {}, []

    def finish(self, max_left: int = 0) -> None:
        """Reads the results of each child when it exits, until at most `max_left` tasks, one per child, are unfinished.
        Tasks that a child failed to make are made here."""
        deadline = time.monotonic() + FORK_TIMEOUT
        while True:
            self._collect_children()
            for task in self._made:
                with contextlib.suppress(Exception):  # the first launch of the kernel raises it again
                    task.read()
            self._made = []
            if len(self._children) <= max_left and self._num_left() <= max_left:
                return
            if time.monotonic() > deadline:
                for child in self._children:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.005)

    def _num_left(self) -> int:
        return sum(not task.is_made() for tasks in self._children.values() for task in tasks)


def _make_and_exit(tasks: list[Task], niceness: int) -> NoReturn:
    try:
        _prepare_child(niceness)
        for task in tasks:
            with contextlib.suppress(Exception):
                task.make()
    finally:
        os._exit(0)


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:  # reaped elsewhere
        return True


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Freeing a CUDA event in a forked process would kill the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _prepare_child(niceness: int) -> None:
    """In a child: keeps inherited device objects untouched and discards output."""
    die_with_parent()  # whose connections it has: others see the end of a process when the last one is closed
    gc.freeze()
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills its children
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


class _Kernel:
    """A Triton kernel and its C launcher. Compiling the launcher takes as long as a small kernel, and Triton would
    defer it to the first launch."""

    _MARK = "launcher_is_built"

    def __init__(self, key: str, compile: Callable[[], Any], finalize: Callable[[Any], None]) -> None:
        from triton.runtime.cache import get_cache_manager

        self._compile = compile
        self._finalize = finalize
        self._files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())  # Triton's own folder

    def is_made(self) -> bool:
        return self._files.get_file(self._MARK) is not None

    def make(self) -> None:
        from triton.runtime import driver

        kernel = self._compile()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        self._files.put("", self._MARK)

    def read(self) -> None:
        self._finalize(self._compile())  # from Triton's cache; later launches use it


@contextlib.contextmanager
def _compiling_launches() -> Iterator[None]:
    """Launches in this thread compile the kernel and return. Other threads are not affected."""
    from triton.runtime.jit import JITFunction

    owner, run = threading.get_ident(), JITFunction.run
    seen: set[Any] = set()  # every layer launches the same variants, and each call of Triton takes a millisecond

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        variant = (id(self), *map(_kind, args), *((name, _kind(kwargs[name])) for name in kwargs))
        if variant not in seen:
            seen.add(variant)
            run(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def _kind(value: Any) -> Any:
    """The properties of an argument that a compiled kernel may depend on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, Hashable):
        return value
    # a tensor descriptor: its properties, not its identity
    base, block, layout = (getattr(value, name, None) for name in ("base", "block_shape", "layout"))
    return type(value), getattr(base, "dtype", None), str(block), str(layout)


_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}


class _ZeroFilled(TorchFunctionMode):
    """Fills uninitialized tensors with zeros. (A TorchDispatchMode would catch more calls, but imports torch's
    compiler, which takes seconds.)"""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _EMPTY else result
