"""Rate at which pages travel between two engines of one host: over TCP, and through shared memory.

A child process serves pages of random bytes with the engine's page server; this process fetches them with its page
client, checksums included. No model and no device takes part.

    python benchmarks/page_transfer.py --pages 64 --page-kb 2048
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.config.config import TransferConfig
from slipstream.handoff.client import PageClient
from slipstream.handoff.mover import PageMover
from slipstream.handoff.server import Index, PageServer
from slipstream.scheduler.cache.imports import NUM_THREADS
from slipstream.scheduler.cache.tier import Reserved, Stored


class Slots:
    """The memory of a tier, and its index: page n has n as its hash and is in slot n."""

    num_groups = 1
    mirror = None

    def __init__(self, num_pages: int, page_bytes: int, *, is_shared: bool) -> None:
        self.page_bytes = page_bytes
        self.file = os.memfd_create("pages") if is_shared else -1
        if is_shared:
            os.ftruncate(self.file, num_pages * page_bytes)
        memory = mmap.mmap(self.file, num_pages * page_bytes)
        self.slots = np.frombuffer(memory, np.uint8).reshape(num_pages, page_bytes)
        self.slots[:] = np.random.default_rng(0).integers(256, size=page_bytes, dtype=np.uint8)

    def mark(self) -> Any:
        return SimpleNamespace(done=lambda: True)

    def is_stored(self, group: int, slot: int, num_stores: int) -> bool:
        return True

    def memory_of(self, group: int, slot: int) -> memoryview:
        return self.slots[slot].data

    def shared_files(self) -> list[tuple[int, int]]:
        return [] if self.file < 0 else [(self.file, self.page_bytes)]

    def pin(self, group: int, page_hash: bytes) -> Stored:
        return Stored(group, int.from_bytes(page_hash, "little"), 1)

    def unpin(self, stored: Stored) -> None: ...
    def is_pending(self, group: int, page_hash: bytes) -> bool:
        return False


def serve(pipe: Connection, num_pages: int, page_bytes: int, is_shared: bool) -> None:
    slots: Any = Slots(num_pages, page_bytes, is_shared=is_shared)
    server = PageServer(("127.0.0.1", 0), 0, slots, b"", Index("same", slots, []))
    pipe.send(server.port)
    pipe.recv()
    server.close()


def measure(num_pages: int, page_bytes: int, repeat: int, num_threads: int, *, is_shared: bool) -> list[float]:
    """Seconds of each transfer of all pages."""
    pipe, other = multiprocessing.Pipe()
    child = multiprocessing.Process(target=serve, args=(other, num_pages, page_bytes, is_shared))
    child.start()
    slots: Any = Slots(num_pages, page_bytes, is_shared=False)
    mover = PageMover(TransferConfig(), slots, b"")
    client = PageClient([("127.0.0.1", pipe.recv())], "same", mover)
    pages = [Reserved(0, n.to_bytes(16, "little"), n) for n in range(num_pages)]
    parts = [pages[n::num_threads] for n in range(num_threads)]
    pool = ThreadPoolExecutor(num_threads)
    seconds = []
    for _ in range(repeat + 1):
        slots.slots[:] = 0
        started = time.perf_counter()
        jobs = [pool.submit(client.fetch, part, client.prepare(), time.monotonic() + 60) for part in parts]
        assert all(all(job.result()) for job in jobs)
        seconds.append(time.perf_counter() - started)
    mover.close()
    pipe.send(None)
    child.join()
    return seconds[1:]  # the first one connects and maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--page-kb", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=NUM_THREADS, help="transfers at the same time")
    args = parser.parse_args()
    size = args.page_kb * 1024
    print(f"{args.pages} pages of {args.page_kb} kB, {args.threads} threads, median of {args.repeat} transfers")
    for way, is_shared in (("TCP", False), ("shared memory", True)):
        seconds = measure(args.pages, size, args.repeat, args.threads, is_shared=is_shared)
        print(f"{way}: {args.pages * size / statistics.median(seconds) / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
