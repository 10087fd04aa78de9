"""Host time to extract token-level rows of a step: 32 rows from the 16th on, of 64 requests of 128 tokens, width 4096.

    python benchmarks/token_pooling.py [--device cuda] [--json]

Four methods for the 32 matrices:
  slice per request    reads the counts from the device once, then one slice per request
  slice and split      reads two numbers for the ends of the group, then one slice and one split (the upstream seed)
  split on host counts the same with counts that the host knows: no read
  ours                 one view of the group on the device, and views of the host's copy when it has arrived
The first two wait for the device. Nothing is copied: only the host's work is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.device.device import open_device
from slipstream.runner.pool_methods import take_ranges
from slipstream.runner.pool_results import ResultBlock
from slipstream.runner.staging import HostRing

REQUESTS, TOKENS, WIDTH, FIRST, COUNT = 64, 128, 4096, 16, 32


def ways(device: str) -> dict[str, Callable[[], Sequence[Any]]]:
    hidden = torch.zeros(REQUESTS * TOKENS, WIDTH, dtype=torch.bfloat16, device=device)
    counts = [TOKENS] * REQUESTS
    ends = torch.tensor(counts, device=device).cumsum(0)
    starts = ends - TOKENS
    group = slice(FIRST, FIRST + COUNT)
    own_counts, own_starts = counts[group], [i * TOKENS for i in range(REQUESTS)][group]
    places = list(range(COUNT))
    on_host = np.zeros((COUNT * TOKENS, WIDTH), np.float32)
    upload = HostRing(2, 1 << 20, open_device(device, 0, 1)).open()

    def slice_each() -> Sequence[Any]:
        first, last = starts[group].tolist(), ends[group].tolist()
        return [hidden[a:b] for a, b in zip(first, last, strict=True)]

    def slice_and_split() -> Sequence[Any]:
        first, last = starts[FIRST].item(), ends[FIRST + COUNT - 1].item()
        return hidden[first:last].split(own_counts)

    def split_on_host_counts() -> Sequence[Any]:
        first = own_starts[0]
        return hidden[first : first + sum(own_counts)].split(own_counts)

    def ours() -> Sequence[Any]:
        lines = take_ranges(own_starts, own_counts, upload)(hidden)
        return ResultBlock(WIDTH, places, own_counts, len(lines)).split(on_host)

    return {
        "slice per request": slice_each,
        "slice and split": slice_and_split,
        "split on host counts": split_on_host_counts,
        "ours": ours,
    }


def measure(method: Callable[[], Sequence[Any]], rounds: int = 5, times: int = 2000) -> float:
    """Microseconds, median round."""
    assert [part.shape[0] for part in method()] == [TOKENS] * COUNT
    each = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(times):
            method()
        each.append((time.perf_counter() - start) / times * 1e6)
    return statistics.median(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {name: round(measure(method), 2) for name, method in ways(args.device).items()}
    if args.json:
        print(json.dumps(results))
        return
    for name, us in results.items():
        print(f"{name:22} {us:8.2f} us")


if __name__ == "__main__":
    main()
