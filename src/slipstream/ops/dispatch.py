"""Which version of an op runs: the tensor's device decides, call by call.

    rms_norm = by_device(reference.rms_norm, "slipstream.ops.norm.triton")

A torch without CUDA gets the host's version itself, so nothing is asked and triton is never imported. With CUDA, a
call costs one question to its first tensor; triton is imported by the first call that needs it. float64, which is
there to compare results with, stays with the host's version on every device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_map

P = ParamSpec("P")
R = TypeVar("R")

_validated: Callable[[str], None] | None = None


def by_device(host: Callable[P, R], module: str) -> Callable[P, R]:
    """`host` for CPU tensors; for CUDA tensors the function of the same name in `module`, where triton is installed."""
    if not torch.backends.cuda.is_built() or importlib.util.find_spec("triton") is None:
        return host
    return _pick(host, module)


def _pick(host: Callable[P, R], module: str) -> Callable[P, R]:
    name = host.__name__
    kernel: Callable[..., R] | None = None

    @functools.wraps(host)
    def call(first: Any, *args: Any, **kwargs: Any) -> R:
        nonlocal kernel
        if not first.is_cuda or first.dtype is torch.float64:
            return host(first, *args, **kwargs)  # type: ignore[call-arg]
        if kernel is None:
            kernel = getattr(importlib.import_module(module), name)
        if _validated is not None:
            return _run_both(host, kernel, (first, *args), kwargs)
        return kernel(first, *args, **kwargs)

    return call  # type: ignore[return-value]


@contextlib.contextmanager
def validating() -> Iterator[list[str]]:
    """For debugging: inside, every op that has a kernel runs the host's version too, and the two must be close.

    Gives the names of the ops that were compared. Waits for the device at each.
    """
    global _validated
    names: list[str] = []
    _validated, before = names.append, _validated
    try:
        yield names
    finally:
        _validated = before


def _run_both(host: Callable[..., R], kernel: Callable[..., R], args: Any, kwargs: Any) -> R:
    assert _validated is not None
    _validated(host.__name__)
    copy_args, copy_kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
    expected = host(*copy_args, **copy_kwargs)
    result = kernel(*args, **kwargs)
    # arguments too: an op may work in place
    torch.testing.assert_close(
        (result, args),
        (expected, copy_args),
        rtol=2e-2 if args[0].dtype in (torch.bfloat16, torch.float16) else 1e-4,
        atol=1e-2 if args[0].dtype in (torch.bfloat16, torch.float16) else 1e-4,
        equal_nan=True,
        msg=lambda message: f"{host.__name__}: the kernel and the reference differ\n{message}",
    )
    return result
