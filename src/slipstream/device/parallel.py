"""Runs independent device work on several CUDA streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def execute_in_parallel(first: Callable[[], T], *others: Callable[[], Any]) -> tuple[T, *tuple[Any, ...]]:
    """Device: run all of them at the same time, the first on the current stream. Returns their results in order.

    The others start after all work queued on the current stream, and work queued there later runs after them: for the
    caller they seem to run in order. They must not depend on each other. Forks and joins are events, which a graph
    captures. Without CUDA they run in order.
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
        # The allocator may reuse memory across these streams: a later fork waits for all reads on this stream, and
        # memory read on another stream is freed only after the join.
        for stream in beside:
            current.wait_stream(stream)


def _side_stream(device: int, number: int) -> torch.cuda.Stream:
    key = (device, number)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
