"""Finds where a module of the transformers library waits for the device, by running it on the meta device.

A value that Python reads from a tensor (`item`, a tensor as a condition, `nonzero`) makes the host wait on a GPU, and
such a step cannot be captured in a CUDA graph. On the meta device there is no value: `WaitFinder` notes the place in
the library's code and continues with a value of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class WaitFinder(TorchDispatchMode):
    def __init__(self, exempt: str) -> None:
        """`exempt`: a file whose waits do not count."""
        super().__init__()
        self.exempt = exempt
        self.locations: dict[str, None] = {}  # in order, each once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is None or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        location = _location()
        if not location.startswith(f"{self.exempt}:"):
            self.locations[location] = None
        return answer(args[0])


def _scalar(x: torch.Tensor) -> bool | int | float:
    if x.dtype is torch.bool:
        return True
    return 1.0 if x.dtype.is_floating_point else 1


def _all_indices(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel(), x.dim(), dtype=torch.int64, device="meta")


_ANSWERS = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.nonzero.default: _all_indices,
    _aten.equal.default: lambda x: True,
}


def _location() -> str:
    """File, line and function of the innermost caller outside of torch and of this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_torch(path: str) -> bool:
    return f"{Path(torch.__file__).parent}" in path or path == __file__
