"""Measures whether bfloat16 weights are faster than float32 weights on this machine, once, and remembers the answer.

The answer is in the user's cache folder, under a hash of the C kernels and of the processor.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from slipstream.ops import native as kernels
from slipstream.ops.linear import native

log = logging.getLogger(__name__)

_ROWS, _COLUMNS = 8192, 2048  # 64 MiB in float32: the weights of a model do not fit a cache either
_ROUNDS = 4


class GemvTimes(NamedTuple):
    """Seconds of one token times the same weights."""

    float32: float
    bfloat16: float

    @property
    def bfloat16_is_faster(self) -> bool:
        return self.bfloat16 <= self.float32


def bfloat16_is_faster() -> bool:
    """False without the C kernels, which are compiled if necessary."""
    times = gemv_times()
    return times is not None and times.bfloat16_is_faster


@functools.cache
def gemv_times() -> GemvTimes | None:
    """Those of an earlier run, or measured now, in a fraction of a second; None without the C kernels."""
    if not kernels.build():
        return None
    path = kernels.cache_folder() / f"gemv-{kernels.identity()}.json"
    try:
        return GemvTimes(**json.loads(path.read_text(encoding="ascii")))
    except (OSError, ValueError, TypeError):
        times = _measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(times._asdict()))
    except OSError as error:
        log.info("the measured dtypes cannot be remembered, and are measured again next time: %s", error)
    return times


def _measure() -> GemvTimes:
    x, weight = torch.ones(1, _COLUMNS), torch.ones(_ROWS, _COLUMNS)
    narrow = weight.bfloat16()
    multiply = functools.partial(native.skinny_gemm, x, bias=None)
    # in turns, so that other programs slow both down
    rounds = [(_seconds(multiply, weight), _seconds(multiply, narrow)) for _ in range(_ROUNDS)]
    return GemvTimes(min(first for first, _ in rounds), min(second for _, second in rounds))


def _seconds(multiply: Callable[..., torch.Tensor], weight: torch.Tensor) -> float:
    start = time.perf_counter()
    multiply(weight=weight)
    return time.perf_counter() - start


def _write(path: Path, text: str) -> None:
    """All or nothing: another process may read the file."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="ascii")
    os.replace(part, path)
