"""The time of a captured graph, as the device sees it."""

from __future__ import annotations

import statistics

import torch


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int = 15) -> float:
    """The median of so many replays, each timed by events around it."""
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
