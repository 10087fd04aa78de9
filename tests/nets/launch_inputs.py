"""Launchers by name, and small inputs for them, of the net over launchers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

ROWS = 3


def get(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f"slipstream.ops.{module}"), name)
    return function


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def ints(*shape: int, most: int = 4) -> torch.Tensor:
    return torch.randint(0, most, shape)
