"""Side work beside the main work of a step, on streams of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def execute_in_parallel(first: Callable[[], T], *others: Callable[[], Any]) -> tuple[T, *tuple[Any, ...]]:
    """Device: all of them at once, the first on the current stream; their results in that order.

    The others begin after all that was queued on the current stream, and what is queued there afterwards comes after
    them: for the caller it is as if they had run in order. They must not need each other's results. Forks and joins are
    events, which a graph captures. Without CUDA they do run in order.
    """
    if not others or not torch.cuda.is_initialized():
        return first(), *(work() for work in others)
    current = torch.cuda.current_stream()
    forked = torch.cuda.Event()
    forked.record(current)
    beside = []
    results: list[Any] = []
    try:
        for number, work in enumerate(others):
            stream = _side_stream(current.device_index, number)
            stream.wait_event(forked)
            beside.append(stream)
            with torch.cuda.stream(stream):
                results.append(work())
        return first(), *results
    finally:
        # Memory may go back and forth without more ado: whoever forks next waits for all that read it here, and
        # whoever frees what was read over there has waited for that.
        for stream in beside:
            current.wait_stream(stream)


def _side_stream(device: int, number: int) -> torch.cuda.Stream:
    key = (device, number)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
