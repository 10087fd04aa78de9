"""Measures whether bfloat16 weights are faster than float32 weights on this machine, once, and remembers the answer.

Both are measured by the functions that multiply with them later. The answer is in the user's cache folder, by C
kernels, processor and version of torch.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from slipstream.ops.gemm.linear import linear
from slipstream.ops.gemm.linear.tiles import skinny_gemm
from slipstream.ops.platform import native as kernels

log = logging.getLogger(__name__)

_ROWS, _COLUMNS = 8192, 2048  # 64 MiB in float32: the weights of a model do not fit a cache either
_STEADY, _MAX_ROUNDS = 8, 64  # rounds without a new best time after which the times count


class GemvTimes(NamedTuple):
    """Seconds of one token times the same weights."""

    float32: float  # by the faster of the two functions in use
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
    path = kernels.cache_folder() / f"linear-{kernels.identity()}-{torch.__version__}.json"
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
    x, weight = torch.ones(1, _COLUMNS, dtype=torch.float32), torch.ones(_ROWS, _COLUMNS, dtype=torch.float32)
    narrow = weight.bfloat16()
    # float32 weights are multiplied by our kernel in fused layers, and elsewhere by what `linear` chooses: on x86
    # without AVX-512 that is torch's library
    calls: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: linear(x, weight),
        lambda: skinny_gemm(x, weight, None),
        lambda: linear(x, narrow),
    )
    best, steady = [math.inf] * len(calls), 0
    # in turns, so that other programs slow down all of them; until each has run undisturbed
    for _ in range(_MAX_ROUNDS):
        times = [_seconds(call) for call in calls]
        is_better = any(new < 0.97 * old for new, old in zip(times, best, strict=True))
        best = [min(pair) for pair in zip(times, best, strict=True)]
        steady = 0 if is_better else steady + 1
        if steady == _STEADY:
            break
    chosen, fused, bfloat16 = best
    return GemvTimes(min(chosen, fused), bfloat16)


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write(path: Path, text: str) -> None:
    """All or nothing: another process may read the file."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="ascii")
    os.replace(part, path)
