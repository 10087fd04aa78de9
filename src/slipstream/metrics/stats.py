"""The counts of a front end as plain data, which can be added up over several front ends."""

from __future__ import annotations

import importlib.util
import logging
import mmap
import os
import tempfile
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from slipstream.base.errors import InvalidOption

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


# Statistics of a core: LaneStats of each model, ReplicaStats where several cores run the same models.


class LaneStats(msgspec.Struct, frozen=True, array_like=True):
    model: str
    num_steps: int = 0
    num_running: int = 0  # samples that have a row
    num_waiting: int = 0  # samples that wait for a row or for pages
    num_preemptions: int = 0
    num_free_pages: int = 0  # of the group that keeps every position; cached pages without a holder are free
    num_pages: int = 0
    page_size: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the cache
    prefix_hits: int = 0  # prompt tokens found in the cache
    tier_hits: int = 0  # of those, tokens whose pages came from the second tier
    tier_bytes_stored: int = 0  # copied to the second tier
    tier_bytes_loaded: int = 0  # copied from it
    # device seconds, by what the device did
    busy: float = 0.0
    turnaround: float = 0.0
    host_late: float = 0.0
    output: float = 0.0
    grammar: float = 0.0  # waiting for masks and logits processors
    no_requests: float = 0.0
    host: float = 0.0  # seconds of the core itself, on the host's clock
    # speculative decoding
    num_drafted_rows: int = 0  # rows with drafts, over all steps
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    accepted_at: tuple[int, ...] = ()  # accepted drafts by their position in the row
    replica: int = 0  # index of the core, where several cores run the same models
    # LoRA adapters
    max_loras: int = 0  # in one step; 0: the engine takes none
    running_adapters: tuple[str, ...] = ()  # names of adapters that running requests have
    waiting_adapters: tuple[str, ...] = ()  # names of adapters that only or also waiting requests have
    memory: dict[str, int] = {}  # planned bytes by part: weights, cache ...


class ReplicaStats(msgspec.Struct, frozen=True, array_like=True):
    """State of one replica, as its front end knows it."""

    replica: int
    is_ready: bool
    num_restarts: int
    num_open: int  # requests sent to it that have not finished
    num_rerouted: int  # requests that were run again on another replica, because this one died
    pid: int | None = None


# The status line: regularly, what the server did since the last one. Nothing is logged if nothing was done.

log = logging.getLogger("slipstream.status")
_DRAFTS = ("num_accepted_drafts", "num_drafts")


class StatusLine:
    def __init__(self) -> None:
        self._last: tuple[float, int, int, int] | None = None
        self._was_busy = False

    def look(self, now: float, front: FrontStats, lanes: Sequence[LaneStats]) -> str | None:
        """A line, or None if there is nothing to say. `now`: seconds of any clock."""
        prompt = sum(model.prompt_tokens for model in front.models.values())
        generated = sum(model.generated_tokens for model in front.models.values())
        requests = sum(front.requests.values())
        before, self._last = self._last, (now, prompt, generated, requests)
        if before is None:
            return None
        seconds = max(now - before[0], 1e-9)
        running, waiting = (sum(getattr(lane, name) for lane in lanes) for name in ("num_running", "num_waiting"))
        did = prompt - before[1] or generated - before[2] or running or waiting
        was_busy, self._was_busy = self._was_busy, bool(did)
        if not did and not was_busy:
            return None
        parts = [
            f"{(requests - before[3]) / seconds:.1f} requests/s",
            f"prompt {(prompt - before[1]) / seconds:.0f} tok/s",
            f"generated {(generated - before[2]) / seconds:.0f} tok/s",
            f"running {running}",
            f"waiting {waiting}",
        ]
        if num_pages := sum(lane.num_pages for lane in lanes):
            parts.append(f"cache {1 - sum(lane.num_free_pages for lane in lanes) / num_pages:.0%}")
        if queries := sum(lane.prefix_queries for lane in lanes):
            parts.append(f"prefix hits {sum(lane.prefix_hits for lane in lanes) / queries:.0%}")
        if rows := sum(lane.num_drafted_rows for lane in lanes):
            accepted, drafted = (sum(getattr(lane, name) for lane in lanes) for name in _DRAFTS)
            at = [sum(counts) for counts in zip_longest(*(lane.accepted_at for lane in lanes), fillvalue=0)]
            # the share of rows with drafts that accepted the first one, the second ...
            by_position = " ".join(f"{count / rows:.0%}" for count in at)
            parts.append(f"drafts {accepted / drafted:.0%} accepted ({by_position}), {1 + accepted / rows:.2f} tok/row")
        return ", ".join(parts)


# SharedCounters: shared memory to which several front ends write their counts, so that each can report the total.
#
# Each front end writes to its own part, and no process waits. A reader that reads during a write uses its last reading.

SharedT = TypeVar("SharedT", FrontStats, FrontEnds)

_SEGMENT = 2**20  # bytes per front end; only pages that are written use memory
_HEADER = 8  # bytes: length and checksum


class SharedCounters:
    def __init__(self, fd: int, own: int, count: int) -> None:
        """For front end `own` of `count`; `own == count` is the supervisor.

        A front end that replaces one that died continues its counts, so that no counter decreases.
        """
        self._memory = mmap.mmap(fd, _SEGMENT * (count + 1))
        self.own = own
        self.count = count
        self._known = [FrontStats() for _ in range(count)]
        found = self._read(own, FrontStats) if own < count else None
        self._before = None if found is None else found.without_gauges()

    @staticmethod
    def create(count: int) -> int:
        """A file without a name, for processes that inherit it."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("slipstream-metrics")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SEGMENT * (count + 1))
        return fd

    def write(self, stats: FrontStats) -> None:
        if self._before is not None:
            stats = added(self._before, stats)
        self._known[self.own] = stats
        self._write(stats)

    def write_front_ends(self, front_ends: FrontEnds) -> None:
        """Called by the supervisor."""
        self._write(front_ends)

    def total(self) -> FrontStats:
        for process in range(self.count):
            if process != self.own and (found := self._read(process, FrontStats)) is not None:
                self._known[process] = found
        return added(FrontStats(), *self._known)

    def front_ends(self) -> FrontEnds:
        """The counts that the supervisor wrote last."""
        return self._read(self.count, FrontEnds) or FrontEnds(self.count, self.count)

    def _write(self, value: FrontStats | FrontEnds) -> None:
        payload = msgspec.msgpack.encode(value)
        if len(payload) > _SEGMENT - _HEADER:
            return  # more routes and models than can exist
        header = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little")
        start = self.own * _SEGMENT
        self._memory[start : start + _HEADER + len(payload)] = header + payload

    def _read(self, process: int, kind: type[SharedT]) -> SharedT | None:
        start = process * _SEGMENT
        header = self._memory[start : start + _HEADER]
        length = int.from_bytes(header[:4], "little")
        if not 0 < length <= _SEGMENT - _HEADER:
            return None
        payload = self._memory[start + _HEADER : start + _HEADER + length]
        if zlib.crc32(payload) != int.from_bytes(header[4:], "little"):
            return None  # a write is in progress
        return msgspec.msgpack.decode(payload, type=kind)


# Traces: one OpenTelemetry span per request. Its packages are an extra, and are imported only when tracing is on.

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_CLOSE_SECONDS = 5.0  # for the spans that are left


def check_tracing(endpoint: str) -> None:
    """Raises an error if traces cannot be sent."""
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidOption(f"otlp_traces_endpoint is {endpoint!r}; give a URL like http://localhost:4318/v1/traces")
    try:
        found = importlib.util.find_spec(_EXPORTER) and importlib.util.find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise InvalidOption("otlp_traces_endpoint needs packages that are missing; run: pip install 'slipstream[otel]'")


class Traces:
    """Passes spans to a thread that sends them, so that no request waits."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("slipstream")
        self._parents = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Traces:
        check_tracing(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(shutdown_on_exit=False, resource=Resource.create({"service.name": "slipstream"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def record(
        self, name: str, seconds: float, attributes: Mapping[str, Any], carrier: Mapping[str, str], *, failed: bool
    ) -> None:
        """Record a span that ends now. `carrier` may hold the caller's W3C traceparent header."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time_ns()
        span = self._tracer.start_span(
            name,
            context=self._parents.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - int(seconds * 1e9),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans, within some seconds: an endpoint that does not answer holds no end of a server."""
        ending = threading.Thread(target=self._provider.shutdown, name="slipstream-traces", daemon=True)
        ending.start()
        ending.join(_CLOSE_SECONDS)
        if ending.is_alive():
            log.warning("the last traces are lost: their endpoint has not answered within %.0f s", _CLOSE_SECONDS)
