"""Host time to encode a plan of decode rows, to write it to the ring of several ranks, and to decode it.

The plan is that of a decode step: one token per row, a new page for every sixteenth row, no admissions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from slipstream.contracts.step import NO_INTS, PageUpdates, StepPlan
from slipstream.ranks.plan_ring import PlanReader, PlanWriter, decode_plan, encode_plan


def decode_step(num_rows: int) -> StepPlan:
    rows = np.arange(num_rows, dtype=np.int32)
    ones = np.ones(num_rows, np.int32)
    paged = rows[::16]
    return StepPlan(
        step=1000,
        released=NO_INTS,
        admitted=(),
        rows=rows,
        num_tokens=ones,
        lengths=rows + 500,
        num_drawn=ones,
        num_host_tokens=np.zeros(num_rows, np.int32),
        tokens=NO_INTS,
        new_pages=(PageUpdates(paged, paged + 30, paged + 7000),),
    )


def measure(call: Callable[[], object], count: int = 2000) -> str:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return f"{statistics.median(times):6.1f} us, 99 % {sorted(times)[int(0.99 * count)]:6.1f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    plan = decode_step(args.rows)
    data = encode_plan(plan)
    writer = PlanWriter(args.ranks - 1)
    readers = [PlanReader(os.dup(files.memory), files.messages, files.acknowledgements) for files in writer.files]

    def send() -> None:
        writer.write(b"p", encode_plan(plan))
        for reader in readers:
            reader.read()

    print(f"{args.rows} rows, {args.ranks} ranks, {len(data)} bytes")
    print(f"encode                    {measure(lambda: encode_plan(plan))}")
    print(f"decode                    {measure(lambda: decode_plan(data))}")
    print(f"encode, write, read       {measure(send)}")


if __name__ == "__main__":
    main()
