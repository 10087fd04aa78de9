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
import importlib.util
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

Walk = Callable[[], None]

_FEW = 2  # calls that a process gets while more may come
PATIENCE = 120.0  # seconds that a forked process may take; then its share is compiled here


def can_compile_ahead() -> bool:
    """Whether there is a Triton that lets others compile for it, and it compiles at all rather than interpret."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode") and hasattr(os, "fork")


@contextlib.contextmanager
def compiling_ahead(walk: Walk, num_processes: int) -> Iterator[None]:
    """Walks, then runs the block while kernels compile; they are ready when it ends.

    One that fails to compile says so when it is first launched.
    """
    import triton

    compiler = ForkedCompiler(num_processes, _build_launcher)
    with triton.AsyncCompileMode(compiler, ignore_errors=True):
        try:
            with _nothing_launched(), _ZeroFilled():
                walk()
            compiler.start()
            yield
        except BaseException:
            compiler.abandon()  # Triton's mode waits for all that was submitted, whatever happened
            raise
        compiler.finish()


class ForkedCompiler(Executor):
    """Has forked processes make calls for their effect on the disk, then makes them itself.

    A call that comes while there is room for another process gets one at once: what takes longest should come first.
    Those that found none are shared out by `start`.
    """

    def __init__(self, num_processes: int, also: Callable[[Any], None] = lambda result: None) -> None:
        """`also` is what the processes do with each result, for the same reason."""
        self._num_processes = num_processes
        self._also = also
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._waiting: list[Callable[[], Any]] = []  # for a process
        self._children: set[int] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def call() -> Any:
            return fn(*args, **kwargs)

        self._calls.append((call, future))
        self._waiting.append(call)
        if len(self._children) >= self._num_processes:
            self._children -= {child for child in self._children if _has_ended(child)}
        if len(self._children) < self._num_processes:
            # few, so that none of them waits long behind others, and more than one, as forking takes its time too
            some, self._waiting = self._waiting[:_FEW], self._waiting[_FEW:]
            self._fork(some)
        return future

    def start(self) -> None:
        """Nothing more will be submitted: what still waits gets processes of its own."""
        waiting, self._waiting = self._waiting, []
        num = min(self._num_processes, len(waiting))
        for child in range(num):
            self._fork(waiting[child::num])

    def _fork(self, calls: list[Callable[[], Any]]) -> None:
        with _no_garbage_collected():  # from before the fork on: others have callbacks that run in the child first
            with warnings.catch_warnings():
                # of threads that are not forked with us; whoever compiles needs none of them
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if not process:
                self._compile_and_exit(calls)
        self._children.add(process)

    def _compile_and_exit(self, calls: list[Callable[[], Any]]) -> NoReturn:
        try:
            _become_a_compiler()
            for call in calls:
                with contextlib.suppress(Exception):
                    self._also(call())
        finally:
            os._exit(0)

    def abandon(self) -> None:
        """Nobody needs the results any more."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        for _, future in self._calls:
            future.set_exception(RuntimeError("the start was given up"))
        self._children, self._calls, self._waiting = set(), [], []

    def finish(self) -> None:
        """Wait for the processes, then make every call here: what was compiled is only read."""
        deadline = time.monotonic() + PATIENCE
        for child in self._children:
            while not _has_ended(child):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(0.005)
        self._children = set()
        for call, future in self._calls:
            try:
                future.set_result(call())
            except Exception as error:  # told again by the kernel's first launch
                future.set_exception(error)
        self._calls = []


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


def _become_a_compiler() -> None:
    """In a process just forked: whatever of the device was inherited stays untouched, and nobody hears of a mishap."""
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _build_launcher(kernel: Any) -> None:
    """The piece of C by which Triton hands arguments over: a compiler's run too, as long as a small kernel's."""
    from triton.runtime import driver

    driver.active.launcher_cls(kernel.src, kernel.metadata)


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
