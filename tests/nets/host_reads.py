"""Launchers on CPU tensors whose values must not be read, with every kernel replaced by a recorder.

Most launchers run only where tensors are on CUDA, so the FakeTensor net, which runs the CPU's path, never sees them. In
here tensors say that they are on CUDA, what reads a value raises, and a launch is checked against the kernel's list of
arguments and noted instead of run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import slipstream.ops

READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__contains__,
    torch.Tensor.__array__, torch.Tensor.__format__, torch.Tensor.__repr__, torch.Tensor.equal, torch.equal,
    torch.Tensor.nonzero, torch.nonzero, torch.Tensor.allclose, torch.allclose,
}  # fmt: skip
READING_OPS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave.Tensor",
}  # fmt: skip
OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}  # of a launch, not of the kernel


class HostRead(AssertionError):
    """The host would wait for the device here."""


class _NoMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if func in READS:
            raise HostRead(f"{func.__name__} reads a value on the host")
        return func(*args, **(kwargs or {}))


class _NoOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READING_OPS or f"{name}.{func._overloadname}" in READING_OPS:
            raise HostRead(f"{name} reads a value on the host")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(map(_is_mask, args[1])):
            raise HostRead(f"{name} by a mask counts on the host")
        return func(*args, **(kwargs or {}))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    with _NoMethods(), _NoOps():
        yield


class Recorder:
    """Replaces a kernel: records launches, and checks that each names all arguments once."""

    def __init__(self, name: str, kernel: Any, launched: set[str]) -> None:
        self.name = name
        self.arg_names = list(kernel.arg_names)
        self.launched = launched

    def __getitem__(self, grid: Any) -> Any:
        assert callable(grid) or all(isinstance(size, int) and size > 0 for size in grid), f"{self.name}: grid {grid}"

        def launch(*args: Any, **kwargs: Any) -> None:
            given = [*self.arg_names[: len(args)], *(name for name in kwargs if name not in OPTIONS)]
            assert len(args) <= len(self.arg_names), f"{self.name} takes {len(self.arg_names)} arguments"
            assert sorted(given) == sorted(self.arg_names), f"{self.name}: {set(given) ^ set(self.arg_names)}"
            self.launched.add(self.name)

        return launch


def kernel_modules() -> list[ModuleType]:
    """Every module of ops that defines kernels."""
    modules = []
    for info in pkgutil.walk_packages(slipstream.ops.__path__, "slipstream.ops."):
        spec = importlib.util.find_spec(info.name)
        assert spec is not None and spec.origin is not None
        if ".jit" in Path(spec.origin).read_text():
            modules.append(importlib.import_module(info.name))
    return modules


def replace_kernels(patch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """The names of all kernels, and of those that were launched since."""
    found: set[str] = set()
    launched: set[str] = set()
    for module in kernel_modules():
        for name, kernel in vars(module).copy().items():
            if name.endswith("_kernel") and hasattr(kernel, "arg_names") and kernel.fn.__module__ == module.__name__:
                whole = f"{module.__name__.removeprefix('slipstream.ops.')}.{name}"
                found.add(whole)
                patch.setattr(module, name, Recorder(whole, kernel, launched))
    return found, launched
