"""Torch's state in a thread that is the caller's: what engines need inside a call, and the caller's own afterwards.

An LLM builds and steps its engine in the thread of the call, and the next lines of the caller may train a model.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def engine_state(num_threads: int | None = None) -> Iterator[None]:
    """Inside, this thread has the state that an engine needs; afterwards it has its own. `num_threads`: threads of
    kernels that run in this thread; None leaves them as they are until someone sets them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # its tensors could not be written later, outside of it
            stack.enter_context(torch.inference_mode(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.no_grad())
        if dtype is not torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if num_threads is not None and num_threads != threads:
            torch.set_num_threads(num_threads)
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def enter_for_good(num_threads: int | None = None) -> None:
    """Sets the state of a thread that is the engine's own."""
    torch.set_grad_enabled(False)
    if num_threads is not None:
        of_others = torch.get_num_threads()  # also: this thread takes that number now, not at its first operation
        torch.set_num_threads(num_threads)
        # new threads of the process take the number that was set last, in whatever thread
        other = threading.Thread(target=torch.set_num_threads, args=(of_others,))
        other.start()
        other.join()


@functools.cache
def openmp_library() -> str | None:
    """Path of the GNU OpenMP runtime that torch has loaded; None if it uses another."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as entries:
            return next((each.split()[-1] for each in entries if "/libgomp" in each), None)
    except OSError:
        return None


@functools.cache
def allow_forks() -> None:
    """Before each fork, ends the OpenMP threads of the thread that forks: the child has none, and would wait for
    them forever. The next parallel operation starts them again."""
    if (path := openmp_library()) is not None and hasattr(os, "register_at_fork"):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_pause_resource_all"):
            os.register_at_fork(before=functools.partial(library.omp_pause_resource_all, _PAUSE_SOFT))


_PAUSE_SOFT = 1  # omp_pause_soft: values of threadprivate variables stay
