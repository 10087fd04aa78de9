"""PageImports: fetches pages of new requests from other engines into the second cache tier.

A new request whose prompt has full pages that neither the device nor the tier has waits until a background thread has
asked for them. Pages that arrive are in the tier, so the request is admitted with an ordinary prefix hit. Pages that do
not arrive (the peer has none, fails, is late, or sends wrong bytes) are computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from slipstream.contracts.request import NEVER, Request, WaitFor
from slipstream.scheduler.cache.tier import CacheTier, Reserved

_WAIT = 0.005  # seconds; then the caller runs: other requests may have arrived
NUM_THREADS = 4
"""Transfers at the same time. The pages of one prompt are divided among them: copies and checksums take longest."""

_MIN_PAGES = 16  # of a transfer


class PageSource(Protocol):
    """Another engine, or a store of pages, found by their hashes."""

    def prepare(self) -> Callable[[], bool]:
        """Called by the core when slots are reserved. The result says, in any thread, whether all copies from and to
        these slots that were planned before are done."""

    def fetch(self, pages: Sequence[Reserved], is_free: Callable[[], bool], deadline: float) -> list[bool]:
        """Write the content of these pages to their slots. Returns which of them arrived whole. In a background thread;
        does not raise for failures of a peer. `deadline`: on the clock of time.monotonic."""


class _Import(NamedTuple):
    request: Request
    pages: list[Reserved]
    version: int  # of the tier when the slots were reserved
    jobs: list[Future[list[bool]]]  # which pages arrived, of consecutive parts of them


class PageImports:
    def __init__(self, tier: CacheTier, source: PageSource, timeout: float) -> None:
        """`timeout`: seconds that a request waits."""
        self._tier = tier
        self._source = source
        self._timeout = timeout
        self._running: list[_Import] = []
        self._pool = ThreadPoolExecutor(NUM_THREADS, "slipstream-imports")
        self._finished = threading.Event()
        self.num_asked = 0  # pages
        self.num_arrived = 0

    def enter(self, request: Request, extend_hashes: Callable[[Request, int], None]) -> WaitFor:
        """Begin to fetch pages of a new request. Returns what the request must wait for. `extend_hashes` computes the
        hashes of its leading pages."""
        num_pages = (len(request.tokens) - 1) // self._tier.page_size
        is_cached = request.next_scored == NEVER and not request.params.skip_reading_prefix_cache
        if not num_pages or request.lora is not None or not is_cached:
            return WaitFor.NOTHING
        extend_hashes(request, num_pages)
        pages = self._tier.reserve(request.hashes[:num_pages])
        if not pages:
            return WaitFor.NOTHING
        self.num_asked += len(pages)
        deadline = time.monotonic() + self._timeout
        is_free = self._source.prepare()
        size = max(_MIN_PAGES, -(-len(pages) // NUM_THREADS))
        parts = [pages[first : first + size] for first in range(0, len(pages), size)]
        jobs = [self._pool.submit(self._fetch, part, is_free, deadline) for part in parts]
        self._running.append(_Import(request, pages, self._tier.version, jobs))
        return WaitFor.PAGES

    def _fetch(self, pages: list[Reserved], is_free: Callable[[], bool], deadline: float) -> list[bool]:
        try:
            return self._source.fetch(pages, is_free, deadline)
        finally:
            self._finished.set()

    def take_done(self) -> list[Request]:
        """Requests whose pages have arrived, or will not."""
        if not self._running:
            return []
        running, self._running = self._running, []
        done = []
        for each in running:
            if not all(job.done() for job in each.jobs):
                self._running.append(each)
                continue
            arrived = [has_arrived for job in each.jobs for has_arrived in job.result()]
            self.num_arrived += sum(arrived)
            self._tier.end_reservation(each.pages, arrived, each.version)
            done.append(each.request)
        return done

    # The interface of background work of the core

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for pages."""
        return bool(self._running)

    def wait(self) -> None:
        """Wait until an import has ended, for a few milliseconds at most."""
        if self._finished.wait(_WAIT):
            self._finished.clear()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
