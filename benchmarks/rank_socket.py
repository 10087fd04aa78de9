"""Host time to encode a plan of decode rows, to send it to several ranks, and to decode it.

The plan is that of a decode step: one token per row, a new page for every sixteenth row, no admissions.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np

from slipstream.contracts.codec import decoder, encode
from slipstream.contracts.step import NO_INTS, PageUpdates, StepPlan
from slipstream.ranks.link import PLAN, RankSocket


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
    data, decode = encode(plan), decoder(StepPlan).decode
    pairs = [socket.socketpair() for _ in range(1, args.ranks)]
    links = [(RankSocket(ours), RankSocket(theirs)) for ours, theirs in pairs]
    sending = []

    def send() -> None:
        start = time.perf_counter()
        data = encode(plan)
        for link, _ in links:
            link.send(PLAN, data)
        sending.append(1e6 * (time.perf_counter() - start))
        for _, other in links:
            other.receive()

    print(f"{args.rows} rows, {args.ranks} ranks, {len(data)} bytes")
    print(f"encode                    {measure(lambda: encode(plan))}")
    print(f"decode                    {measure(lambda: decode(data))}")
    print(f"encode, send, receive     {measure(send)}, of which rank 0 {statistics.median(sending):.1f} us")


if __name__ == "__main__":
    main()
