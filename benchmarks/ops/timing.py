"""Device time of a captured graph."""

from __future__ import annotations

import statistics

import torch


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int = 15) -> float:
    """Median of `replays` replays, each timed by CUDA events."""
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
