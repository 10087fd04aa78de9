"""Load generator for a running server: streamed completions at a concurrency or a rate, with the times of each.

It uses HTTP over plain sockets, because a client library would need more CPU time than the server that is measured.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.serve.bench.measure import Item, Spread, Workload, spread

VOCAB = range(3, 256)  # token ids of every vocabulary
_MAX_CONNECTING = 16  # connections that are opened at the same time


class Target(msgspec.Struct, frozen=True):
    host: str
    port: int
    model: str | None = None
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, model: str | None, api_key: str | None) -> Target:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise InvalidOption(f"url is {url!r}; give one like http://127.0.0.1:8000")
        return cls(parts.hostname, parts.port or 80, model, api_key)


class Answer(msgspec.Struct):
    """The result of one request."""

    status: int = 0  # 0: the connection failed
    sent: float = 0.0
    times: list[float] = []  # of each event with text
    end: float = 0.0
    num_tokens: int = 0
    error: str | None = None  # in a stream that had started


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    num_requests: int
    statuses: dict[str, int]
    num_failed: int  # streams that started and failed
    output_tokens: int
    requests_per_second: float  # successful ones
    tokens_per_second: float
    ttft_ms: Spread | None
    itl_ms: Spread | None  # between events, which may have several tokens
    request_ms: Spread | None
    refused_ms: Spread | None  # until the 429

    def lines(self) -> list[str]:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        lines = [
            f"  {'time':<18}{self.seconds:.2f} s",
            f"  {'answers':<18}{statuses}"
            + (f"; {self.num_failed} failed after they started" if self.num_failed else ""),
            f"  {'requests':<18}{self.requests_per_second:.2f} /s",
            f"  {'output tokens':<18}{self.tokens_per_second:.1f} /s",
            f"  {'ms':<18}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
        ]
        for name, times in (
            ("first token", self.ttft_ms),
            ("between events", self.itl_ms),
            ("whole request", self.request_ms),
            ("refusal", self.refused_ms),
        ):
            if times is not None:
                columns = (times.mean, times.p50, times.p90, times.p99)
                lines.append(f"  {name:<18}" + "".join(f"{value:>10.2f}" for value in columns))
        return lines


def run_online(
    target: Target,
    workload: Workload,
    params: dict[str, Any],
    *,
    rate: float | None,
    concurrency: int | None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[BenchResult, list[Answer]]:
    """Runs with Poisson arrivals at `rate`, independent of the responses, or with `concurrency` concurrent requests."""
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidOption(f"rate is {rate}; give requests per second, a finite number above 0")
    requests = [_request(target, item, params) for item in workload.items(len(VOCAB))]
    start = time.perf_counter()
    answers = asyncio.run(_run(target, requests, rate, concurrency, workload.seed, advance))
    return summarise(answers, time.perf_counter() - start), answers


async def _run(
    target: Target,
    requests: Sequence[bytes],
    rate: float | None,
    concurrency: int | None,
    seed: int,
    advance: Callable[[int], None],
) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency or len(requests))
    # few at a time: if all connected at once, the first would send its request after the last has connected
    connecting = asyncio.Semaphore(_MAX_CONNECTING)
    draw = random.Random(seed)

    async def one(request: bytes) -> Answer:
        async with gate:
            answer = await send_request(target, request, connecting)
        advance(answer.num_tokens)
        return answer

    tasks = []
    for request in requests:
        tasks.append(asyncio.ensure_future(one(request)))
        if rate is not None:
            await asyncio.sleep(draw.expovariate(rate))
    return await asyncio.gather(*tasks)


async def send_request(target: Target, request: bytes, connecting: asyncio.Semaphore) -> Answer:
    answer = Answer(sent=time.perf_counter(), times=[])
    try:
        async with connecting:
            reader, writer = await asyncio.open_connection(target.host, target.port)
            writer.write(request)
    except OSError as error:
        answer.error, answer.end = str(error), time.perf_counter()
        return answer
    try:
        await _read(reader, answer)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.end = time.perf_counter()
        writer.close()
    return answer


def _request(target: Target, item: Item, params: dict[str, Any]) -> bytes:
    body = {
        "prompt": [VOCAB[token] for token in item.prompt],
        "max_tokens": item.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        **params,
    }
    if target.model is not None:
        body["model"] = target.model
    data = msgspec.json.encode(body)
    headers = [
        "POST /v1/completions HTTP/1.1",
        f"host: {target.host}:{target.port}",
        "content-type: application/json",
        "connection: close",
        f"content-length: {len(data)}",
    ]
    if target.api_key is not None:
        headers.append(f"authorization: Bearer {target.api_key}")
    return "\r\n".join(headers).encode() + b"\r\n\r\n" + data


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    headers = await reader.readuntil(b"\r\n\r\n")
    answer.status = int(headers.split(b" ", 2)[1])
    while line := await reader.readline():  # skips chunk sizes and empty lines between events
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            answer.error = event["error"]["message"]
        elif event["choices"]:
            answer.times.append(time.perf_counter())
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]


def summarise(answers: Sequence[Answer], seconds: float) -> BenchResult:
    good = [answer for answer in answers if answer.status == 200 and answer.error is None and answer.times]
    gaps = [b - a for answer in good for a, b in zip(answer.times, answer.times[1:], strict=False)]
    refused = [answer.end - answer.sent for answer in answers if answer.status == 429]
    tokens = sum(answer.num_tokens for answer in good)
    return BenchResult(
        seconds=seconds,
        num_requests=len(answers),
        statuses=dict(Counter(str(answer.status or "broken") for answer in answers)),
        num_failed=sum(answer.status == 200 and (answer.error is not None or not answer.times) for answer in answers),
        output_tokens=tokens,
        requests_per_second=len(good) / seconds,
        tokens_per_second=tokens / seconds,
        ttft_ms=_spread([answer.times[0] - answer.sent for answer in good]),
        itl_ms=_spread(gaps),
        request_ms=_spread([answer.end - answer.sent for answer in good]),
        refused_ms=_spread(refused),
    )


def _spread(seconds: list[float]) -> Spread | None:
    return spread(seconds) if seconds else None


def histogram(values: Sequence[float], title: str, *, rows: int = 12, width: int = 50) -> list[str]:
    """Returns the lines of a text histogram in milliseconds."""
    if not values:
        return []
    low, high = min(values), max(values)
    step = (high - low) / rows or 1.0
    counts = Counter(min(rows - 1, int((value - low) / step)) for value in values)
    most = max(counts.values())
    lines = [f"  {title}, ms"]
    for row in range(rows):
        bar = "#" * round(width * counts[row] / most)
        lines.append(f"  {1000 * (low + row * step):>10.1f} |{bar}{' ' if bar else ''}{counts[row] or ''}".rstrip())
    return lines
