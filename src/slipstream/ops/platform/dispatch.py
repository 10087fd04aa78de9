"""Chooses the implementation of an op by the device of its first tensor, per call.

    rms_norm = by_device(reference.rms_norm, "slipstream.ops.elementwise.norm_triton")

In a torch without CUDA `by_device` returns the host function itself: no check per call, and triton is never imported.
With CUDA, a call costs one check of its first tensor, and the first call that needs triton imports it. float64 tensors,
which tests use as an oracle, use the host function on every device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_map

P = ParamSpec("P")
R = TypeVar("R")

_validated: Callable[[str], None] | None = None


def by_device(host: Callable[P, R], module: str) -> Callable[P, R]:
    """`host` for CPU tensors; for CUDA tensors the function of the same name in `module`, if triton is installed."""
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
            kernel = getattr(importlib.import_module(module), name, None)
            if kernel is None:
                raise NotImplementedError(
                    f"{name} has no CUDA kernel: {module} does not define it; write one, or export the host function "
                    "without by_device"
                )
        if _validated is not None:
            return _run_both(host, kernel, (first, *args), kwargs)
        return kernel(first, *args, **kwargs)

    return call  # type: ignore[return-value]


@contextlib.contextmanager
def validating() -> Iterator[list[str]]:
    """For debugging: every op with a kernel also runs its host function, and the results must be close.

    Yields the list of the ops compared so far. Synchronizes with the device at each op.
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
    # arguments are compared too: an op may work in place
    torch.testing.assert_close(
        (result, args),
        (expected, copy_args),
        rtol=2e-2 if args[0].dtype in (torch.bfloat16, torch.float16) else 1e-4,
        atol=1e-2 if args[0].dtype in (torch.bfloat16, torch.float16) else 1e-4,
        equal_nan=True,
        msg=lambda message: f"{host.__name__}: the kernel and the reference differ\n{message}",
    )
    return result


# Limits of a device by which kernels are launched.


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and bytes of shared memory per program."""
    if device.type != "cuda":  # the interpreter
        return 2, 232448
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def multiprocessors(device: torch.device) -> int:
    return device_limits(device)[0]


# Whether a device runs our kernels in Gluon.


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Gluon is an experimental language, so only the Triton version that was tested is used."""
    if device.type != "cuda":
        return False
    import triton

    return triton.__version__.startswith("3.6.") and torch.cuda.get_device_capability(device) == (9, 0)
