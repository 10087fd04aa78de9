"""Counters: what this front end has seen of HTTP, by kind. Tokens and times are counted in `AsyncEngine.stats`."""

from __future__ import annotations

from collections import Counter


class Counters:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status; streams count when they begin
        self.aborted: Counter[str] = Counter()  # requests by cause: disconnect, deadline, body_timeout, drain, admin
        self.refused: Counter[str] = Counter()  # requests not taken: queue_full, bodies_full, not_ready, draining
