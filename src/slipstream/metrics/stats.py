"""The counts of a front end as plain data, which can be added up over several front ends."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, TypeVar

import msgspec

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""BucketCounts bounds of latencies, in seconds."""
GAPS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""BucketCounts bounds of the time between two tokens, in seconds."""
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
"""BucketCounts bounds of lengths, in tokens."""


class BucketCounts(msgspec.Struct):
    """Counts of values between bounds. Adding a value takes less than a microsecond."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class ModelStats(msgspec.Struct):
    """Counts of the requests to one model."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    finished: dict[str, int] = {}  # samples and pooled prompts, by finish reason
    ttft: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(SECONDS))  # time to the first token
    itl: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(GAPS))  # time between two tokens
    e2e: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(SECONDS))  # time of a whole request
    # of generation requests: time in the queue, from there to the first token, from there to the last, and both
    queue: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(SECONDS))
    prefill: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(SECONDS))
    decode: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(SECONDS))
    inference: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(SECONDS))
    prompt_length: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(TOKENS))
    output_length: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts(TOKENS))


class FrontStats(msgspec.Struct):
    requests: dict[str, int] = {}  # by route and status, as "/v1/models 200"
    aborted: dict[str, int] = {}  # by cause
    refused: dict[str, int] = {}  # by reason
    models: dict[str, ModelStats] = {}
    open_requests: int = 0  # prompts in progress
    queued_requests: int = 0  # prompts without a first output, those being tokenised included
    queued_tokens: int = 0
    pids: dict[str, int] = {}  # process ids by role
    failed_turns: dict[str, int] = {}  # of repeated work, by task
    failing: dict[str, int] = {}  # tasks whose last turn failed

    def without_gauges(self) -> FrontStats:
        """The fields that only increase."""
        return msgspec.structs.replace(self, open_requests=0, queued_requests=0, queued_tokens=0, pids={}, failing={})


class FrontEnds(msgspec.Struct, frozen=True):
    """The number of serving processes, if there are several."""

    wanted: int
    running: int
    restarts: int = 0  # of front ends that died


T = TypeVar("T", bound=msgspec.Struct)


def added(first: T, *others: T) -> T:
    """The sum of structs of one type, field by field."""
    result = first
    for other in others:
        result = _add(result, other)
    return result


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, msgspec.Struct):
        names = a.__struct_fields__
        return type(a)(**{name: _field(name, getattr(a, name), getattr(b, name)) for name in names})
    if isinstance(a, dict):
        return {key: _add(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key)) for key in {**a, **b}}
    if isinstance(a, list):
        return [x + y for x, y in zip(a, b, strict=True)]
    return a + b


def _field(name: str, a: Any, b: Any) -> Any:
    return a if name == "bounds" else _add(a, b)
