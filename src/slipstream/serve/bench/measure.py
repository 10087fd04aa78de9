"""Runs a workload on an engine and measures it, for `slipstream bench` and benchmarks/offline.py.

The loop is that of `LLM.generate`, with a time stamp after each step. The time is from the check of the first prompt to
the last result, with detokenising if requested.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.params.sampling import SamplingParams
from slipstream.record.device_timing import DeviceTime

if TYPE_CHECKING:
    from slipstream.api.llm import LLM
    from slipstream.config.config import EngineConfig
    from slipstream.engine.core import EngineCore
    from slipstream.front.request_state import RequestState


Advance = Callable[[int], None]
"""Called with the number of generated tokens of each finished request."""


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class DraftTrial(msgspec.Struct, frozen=True):
    """Speculative decoding in one run."""

    num_rows: int  # rows with drafts, over all steps
    num_drafts: int
    num_accepted: int
    accepted_at: list[int]  # by position in the row

    @classmethod
    def of(cls, core: EngineCore) -> DraftTrial:
        if core.scheduler.drafts is None:
            return cls(0, 0, 0, [])
        own = core.scheduler.drafts.counts
        return cls(own.num_rows, own.num_drafts, own.num_accepted, list(own.accepted_at))

    def since(self, before: DraftTrial) -> DraftTrial | None:
        """The difference; None if there were no drafts."""
        earlier = before.accepted_at + [0] * (len(self.accepted_at) - len(before.accepted_at))
        by_position = [now - then for now, then in zip(self.accepted_at, earlier, strict=True)]
        num_rows, num_accepted = self.num_rows - before.num_rows, self.num_accepted - before.num_accepted
        return (
            DraftTrial(num_rows, self.num_drafts - before.num_drafts, num_accepted, by_position) if num_rows else None
        )


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload."""

    seconds: float
    num_steps: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompts, found in the prefix cache
    ttft_ms: Spread  # time to first token, from submission
    itl_ms: Spread | None  # inter-token latency; None if all outputs have one token
    request_ms: Spread  # from submission to the last token
    device: DeviceTime  # busy and idle time
    itl_at_ms: dict[int, float]  # inter-token latency around positions 500, 1000 and so on
    drafts: DraftTrial | None = None  # None: no row had drafts

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    @property
    def output_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_per_second(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds

    def summary(self) -> dict[str, Any]:
        rates = {
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_per_second,
            "total_tokens_per_second": self.total_per_second,
            "device_busy_share": self.device.busy_share,
        }
        summary: dict[str, Any] = rates | msgspec.to_builtins(self)
        return summary


def measure(
    llm: LLM,
    workload: Workload,
    params: SamplingParams,
    *,
    repeats: int = 1,
    warmup: bool = True,
    concurrency: int | None = None,
    rate: float | None = None,
    detokenize: bool = False,
    advance: Advance = lambda tokens: None,
) -> list[Trial]:
    """Returns `repeats` trials in the order in which they ran. A warm-up before them takes the first-use costs. Each
    trial has its own prompts and starts with an empty prefix cache, which may have those of an earlier call.

    `rate`: mean arrivals per second of a Poisson process; without it all requests arrive at the start.
    """
    limit = llm.config.scheduler.max_model_len
    if workload.longest > limit:
        raise InvalidOption(
            f"a request of {workload.input_len} + {workload.output_len} tokens is longer than max_model_len {limit}; "
            "shorten it, or raise max_model_len or the cache's memory"
        )
    vocab_size = llm.config.model.info.vocab_size
    if warmup:
        first = _warm_up_items(llm.config, workload, concurrency)
        _run(llm, first, params, concurrency, None, detokenize, lambda tokens: None)
    # trials at a rate have other prompts than those before, which measured the possible rate
    trial_numbers = range(repeats) if rate is None else range(repeats, 2 * repeats)
    return [
        _run(
            llm,
            workload.items(vocab_size, trial),
            params,
            concurrency,
            None if rate is None else workload.arrivals(rate, trial),
            detokenize,
            advance,
        )
        for trial in trial_numbers
    ]


def best_of(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.seconds)


def _warm_up_items(config: EngineConfig, workload: Workload, concurrency: int | None) -> list[Item]:
    """The requests of the warm-up. A CPU needs one short request. A GPU captures every size of step at its first use,
    so the warm-up has the steps of a trial: all rows, with outputs that last until the last prompt is computed."""
    items = workload.items(config.model.info.vocab_size, -1)
    scheduler, num_rows, num_steps = config.scheduler, 1, 1
    if config.device.kind != "cpu":
        num_rows = min(concurrency or len(items), scheduler.max_num_seqs)
        each = max(1, scheduler.max_num_batched_tokens - num_rows)  # prompt tokens of a step beside decoding rows
        num_steps = -(-sum(len(item.prompt) for item in items[:num_rows]) // each)
    return [Item(item.prompt, min(item.output_len, num_steps + 3)) for item in items[:num_rows]]


def _run(
    llm: LLM,
    items: Sequence[Item],
    params: SamplingParams,
    concurrency: int | None,
    arrivals: Sequence[float] | None,
    detokenize: bool,
    advance: Advance,
) -> Trial:
    from slipstream.contracts.messages import Abort
    from slipstream.front.request_state import GenerationRequestState  # slow to import, and not needed for --help

    llm.reset_prefix_cache()
    core, clock = llm.core, time.perf_counter
    tokenizer = llm.tokenizer if detokenize else None
    limit = len(items) if concurrency is None else concurrency
    submitted: dict[str, float] = {}
    token_times: dict[str, list[float]] = {}
    states: list[RequestState] = []
    active: dict[str, RequestState] = {}  # by request id
    first_step, device, drafts = core.num_steps, core.timer.total.copy(), DraftTrial.of(core)
    waiting = iter(enumerate(items))
    begin = clock()
    while active or len(states) < len(items):
        due = len(items) if arrivals is None else bisect_right(arrivals, clock() - begin)
        if not active and len(states) == due:
            assert arrivals is not None
            time.sleep(max(0.0, arrivals[due] - (clock() - begin)))
            continue
        while len(active) < limit and len(states) < due and (entry := next(waiting, None)) is not None:
            number, item = entry
            own = params.with_changes(max_tokens=item.output_len)
            message, text = llm.inputs.prepare(f"bench-{number}", item.prompt, own)
            # a request that arrived during a step counts from its arrival
            submitted[message.request_id] = clock() if arrivals is None else begin + arrivals[number]
            token_times[message.request_id] = []
            core.submit(message)
            states.append(GenerationRequestState(message, text, tokenizer, streaming=False))
            active[message.request_id] = states[-1]
        step_outputs = core.step()
        now = clock()
        for output in step_outputs:
            if (state := active.get(output.request_id)) is None:
                continue  # a step was in flight when a stop string ended it
            token_times[state.id] += [now] * len(output.token_ids)
            if state.take(output, time.monotonic()):
                core.abort(Abort(state.id, output.sample))
            if state.finished:
                del active[state.id]
                advance(len(token_times[state.id]))
    results = [state.result() for state in states]
    seconds = clock() - begin
    gaps = [b - a for times in token_times.values() for a, b in zip(times, times[1:], strict=False)]
    return Trial(
        seconds=seconds,
        num_steps=core.num_steps - first_step,
        num_requests=len(items),
        input_tokens=sum(len(item.prompt) for item in items),
        output_tokens=sum(len(sample.token_ids) for result in results for sample in result.outputs),
        cached_tokens=sum(result.num_cached_tokens for result in results),
        ttft_ms=spread([times[0] - submitted[name] for name, times in token_times.items()]),
        itl_ms=spread(gaps) if gaps else None,
        request_ms=spread([times[-1] - submitted[name] for name, times in token_times.items()]),
        device=core.timer.total.since(device),
        itl_at_ms=_gaps_along(list(token_times.values())),
        drafts=DraftTrial.of(core).since(drafts),
    )


def _gaps_along(token_times: Sequence[Sequence[float]]) -> dict[int, float]:
    """Returns the inter-token latency in milliseconds, averaged over 100 tokens around positions of all outputs."""
    shortest = min(map(len, token_times))
    found = {}
    for position in (500, 1000, 2000, 4000, 8000, 16000):
        first, last = position - 50, min(position + 50, shortest - 1)
        if last > position:
            gaps = [(times[last] - times[first]) / (last - first) for times in token_times]
            found[position] = 1000 * sum(gaps) / len(gaps)
    return found


def spread(seconds: Sequence[float]) -> Spread:
    ordered = sorted(1000 * value for value in seconds)

    def at(share: float) -> float:
        """Linear interpolation between the two nearest values."""
        rank = share * (len(ordered) - 1)
        low = int(rank)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)

    return Spread(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99))


# Workload: random prompts of given lengths, determined by a seed.


class Item(msgspec.Struct, frozen=True):
    prompt: list[int]
    output_len: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`num_prompts` prompts of `input_len` random tokens, with `output_len` tokens to generate each."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 1.0  # lengths are uniform from this fraction of the full length up to it
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if (value := getattr(self, name)) < 1:
                raise InvalidOption(f"{name} is {value}; give an integer from 1 up")
        if not 0 < self.range_ratio <= 1:
            raise InvalidOption(
                f"range_ratio is {self.range_ratio}; give a fraction above 0 and up to 1, where 1 is full length"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return self.input_len + self.output_len

    def items(self, vocab_size: int, trial: int = 0) -> list[Item]:
        """Returns the requests of a trial. Trials have the same lengths and different tokens."""
        lengths = random.Random(self.seed)
        tokens = random.Random(f"{self.seed} {trial} {self.num_prompts} {self.input_len} {self.output_len}")
        ids = range(vocab_size)
        return [
            Item(tokens.choices(ids, k=self._length(lengths, self.input_len)), self._length(lengths, self.output_len))
            for _ in range(self.num_prompts)
        ]

    def arrivals(self, rate: float, trial: int = 0) -> list[float]:
        """Returns the arrival times in seconds of a Poisson process with `rate` requests per second."""
        if not rate > 0:
            raise InvalidOption(f"rate is {rate}; give requests per second, above 0")
        draw = random.Random(f"{self.seed} {trial} arrivals")
        times, now = [], 0.0
        for _ in range(self.num_prompts):
            now += draw.expovariate(rate)
            times.append(now)
        return times

    def summary(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def _length(self, draw: random.Random, full: int) -> int:
        return draw.randint(max(1, round(full * self.range_ratio)), full)


# Named benchmark shapes. docs/performance.md has their figures.


class Shape(msgspec.Struct, frozen=True):
    workload: Workload
    params: dict[str, Any] = {}  # sampling parameters that differ from greedy


def _shape(num_prompts: int, input_len: int, output_len: int, range_ratio: float = 1.0, **params: Any) -> Shape:
    workload = Workload(num_prompts=num_prompts, input_len=input_len, output_len=output_len, range_ratio=range_ratio)
    return Shape(workload, params)


SHAPES: dict[str, Shape] = {
    "bs1": _shape(1, 128, 256),
    "bs16": _shape(16, 1024, 256),
    "offline": _shape(256, 512, 128),
    "decode": _shape(256, 128, 512),
    "nano": _shape(256, 1024, 1024, range_ratio=100 / 1024),
    "prefill": _shape(64, 4096, 16),
    "sample": _shape(256, 128, 256, temperature=0.8, top_p=0.95, top_k=50),
    "logprobs": _shape(64, 128, 256, logprobs=5),
    "pen512": _shape(128, 64, 512, repetition_penalty=1.1),
    "long": _shape(128, 64, 4096),
    "longpen": _shape(128, 64, 4096, repetition_penalty=1.1, presence_penalty=0.2),
}
