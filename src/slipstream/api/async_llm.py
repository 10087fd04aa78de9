"""AsyncLLM: vLLM's asynchronous engine, over an AsyncEngine."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slipstream.api.vllm import ModelConfigView, VllmConfigView, check_unused, refuse_unused
from slipstream.base.errors import InvalidParams
from slipstream.engine.core import EngineCore
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.inputs import Prompt
from slipstream.front.pooling_results import PoolingRequestOutput, as_plain
from slipstream.front.results import CompletionOutput, RequestOutput
from slipstream.front.router import control, fall_asleep
from slipstream.metrics.stats import ModelStats
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.text.script_tokenizer import ScriptTokenizer

if TYPE_CHECKING:
    from slipstream.api.vllm import EngineArgs


_UNUSED = (
    "tokenization_kwargs", "trace_headers", "data_parallel_rank", "reasoning_ended",
    "reasoning_parser_kwargs",
)  # fmt: skip


class UnfinishedRequests:
    """Requests of an engine that have not finished, under the names of vLLM's output processor."""

    def __init__(self, running: Collection[str]) -> None:
        self._running = running

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)


class AsyncLLM:
    """Runs many requests at a time; each is an async iterator over results, by `output_kind` of its parameters.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="path/to/model"))
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32), "0"):
        print(output.outputs[0].text)
    await engine.close()
    """

    def __init__(
        self, model: str | None = None, *, stat_loggers: Iterable[StatLoggerFactory] | None = None, **options: Any
    ) -> None:
        """`stat_loggers`: classes like `StatLoggerBase`, or functions that make such an object."""
        self.engine = AsyncEngine(model, **options)
        core = next(iter(self.engine.cores.values()))
        self._stat_loggers = StatLoggers(stat_loggers or (), core, self.engine.stats)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._is_frozen = False  # paused with mode keep: no step runs
        self._queued: set[str] = set()  # ids of requests that wait for `resume_generation`
        self._aborted: set[str] = set()  # those of them that were aborted
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Iterable[StatLoggerFactory] | None = None,
    ) -> AsyncLLM:
        """`usage_context` changes nothing: no usage is reported."""
        if not start_engine_loop:
            raise InvalidParams("start_engine_loop=False is not supported: the engine runs when it is made")
        return cls(stat_loggers=stat_loggers, **engine_args.given())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **unused: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Breaking out of the loop aborts the request. While the engine is paused, the request waits."""
        check_unused(unused, *_UNUSED)
        if await self._wait_for_resume(request_id):
            ended = CompletionOutput(0, "", [], finish_reason="abort")
            yield RequestOutput(request_id, prompt if isinstance(prompt, str) else None, [], None, [ended], True)
            return
        with self._unfinished(request_id):
            how: dict[str, Any] = {"priority": priority or None, "lora_request": lora_request}
            async for result in self.engine.generate(prompt, sampling_params, request_id, **how):
                self._stat_loggers.record()
                yield result

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **unused: Any,
    ) -> AsyncIterator[PoolingRequestOutput[Any]]:
        """Yields one result."""
        check_unused(unused, *_UNUSED)
        await self._resumed.wait()
        with self._unfinished(request_id):
            for found in await self.engine.encode([prompt], pooling_params, lora_request=lora_request):
                found.request_id = request_id
                yield as_plain(found)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends one request or several: their last result has the finish reason abort. Unknown ids are ignored.
        `internal` changes nothing: there is one kind of id."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            if each in self._queued:
                self._aborted.add(each)
            await self.engine.abort(each)

    async def _wait_for_resume(self, request_id: str) -> bool:
        """Waits while the engine is paused. Returns whether the request was aborted meanwhile."""
        if self._resumed.is_set():
            return False
        self._queued.add(request_id)
        try:
            await self._resumed.wait()
            return request_id in self._aborted
        finally:
            self._queued.discard(request_id)
            self._aborted.discard(request_id)

    async def pause_generation(
        self, *, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True, **unused: Any
    ) -> None:
        """New requests wait until `resume_generation`. Running ones are aborted, awaited, or kept: they stop where they
        are, with their pages, and go on after `resume_generation`. `clear_cache` is for the first two modes."""
        if mode not in ("abort", "wait", "keep") or unused:
            raise InvalidParams(
                f"pause_generation takes mode abort, wait or keep, not {mode!r:.50} {unused or ''}", param="mode"
            )
        self._resumed.clear()
        if mode == "keep":
            self._is_frozen = True
            await control(self.engine, "sleep", level=0)
            return
        if mode == "abort":
            await self.engine.abort_all()
        await self._idle.wait()
        if clear_cache:
            await self.engine.reset_prefix_cache()

    async def resume_generation(self) -> None:
        if self._is_frozen:
            self._is_frozen = False
            await control(self.engine, "wake_up", tags=["scheduling"])
        self._resumed.set()

    async def is_paused(self) -> bool:
        return not self._resumed.is_set()

    async def check_health(self) -> None:
        """Raises EngineDead if the engine has failed, EngineClosed if it is closed."""
        self.engine.check()

    async def do_log_stats(self) -> None:
        """Lets the loggers of `stat_loggers` log."""
        self._stat_loggers.log()

    async def is_tracing_enabled(self) -> bool:
        return False  # traces are those of the server

    @property
    def model_config(self) -> ModelConfigView:
        """The configuration of the first model."""
        return ModelConfigView.of(self.engine.config)

    @property
    def vllm_config(self) -> VllmConfigView:
        """The configuration of the first model."""
        return VllmConfigView.of(self.engine.config)

    @property
    def output_processor(self) -> UnfinishedRequests:
        return UnfinishedRequests(self._running)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        refuse_unused(reset_connector=reset_connector)
        await self.engine.reset_prefix_cache(reset_running_requests)
        return True

    async def sleep(self, level: int = 1, mode: Literal["abort", "keep"] = "abort") -> None:
        """See `LLM.sleep`."""
        if mode not in ("abort", "keep"):
            raise InvalidParams(f"sleep takes mode abort or keep, not {mode!r:.50}", param="mode")
        await fall_asleep(self.engine, level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await control(self.engine, "wake_up", tags=tags)

    async def is_sleeping(self) -> bool:
        return await control(self.engine, "ask")

    async def update_weights(self, folder: str | None = None) -> None:
        """Reads weights from a folder of the same architecture; None: the model's own."""
        await control(self.engine, "update_weights", path=folder)

    @property
    def errored(self) -> bool:
        return self.engine.failure is not None

    @property
    def dead_error(self) -> BaseException | None:
        return self.engine.failure

    @property
    def is_running(self) -> bool:
        return self.engine.failure is None

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def tokenizer(self) -> ScriptTokenizer | None:
        return self.engine.model().script_tokenizer

    def get_tokenizer(self) -> ScriptTokenizer | None:
        return self.tokenizer

    async def close(self) -> None:
        await self.engine.close()

    def shutdown(self) -> None:
        """Closes the engine. In a running event loop this takes effect in its next turns; `close` waits for it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.engine.close())
        else:
            self._closing = loop.create_task(self.engine.close())

    @contextmanager
    def _unfinished(self, request_id: str) -> Iterator[None]:
        self._running.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(request_id)
            if not self._running:
                self._idle.set()


AsyncLLMEngine = AsyncLLM  # vLLM's older name


# StatLoggerBase: vLLM's interface for loggers of statistics that a user writes, for `AsyncLLM(stat_loggers=[...])`.
#
# A logger records the tokens since its last record and the queue of the moment: after every result of a request, and by
# `do_log_stats`.


@dataclass
class PrefixCacheStats:
    """Prompt tokens since the last record."""

    queries: int = 0  # looked up in the cache
    hits: int = 0  # found there


@dataclass
class SchedulerStats:
    """The present state of the scheduler, under vLLM's names."""

    num_running_reqs: int = 0  # samples
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # pages in use, 0 to 1
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)


@dataclass
class IterationStats:
    """Counts since the last record, under vLLM's names."""

    iteration_timestamp: float = 0.0  # seconds since the epoch
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preempted_reqs: int = 0


class StatLoggerBase(ABC):
    @abstractmethod
    def __init__(self, vllm_config: VllmConfigView, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None: ...

    @abstractmethod
    def log_engine_initialized(self) -> None: ...

    def log(self) -> None:  # noqa: B027 (a logger need not have it)
        """Called by `do_log_stats`."""


StatLoggerFactory = Callable[[VllmConfigView, int], StatLoggerBase]


class StatLoggers:
    """The loggers of one engine, which has one core."""

    def __init__(self, factories: Iterable[StatLoggerFactory], core: EngineCore, stats: dict[str, ModelStats]) -> None:
        """`stats`: the counts of the front end by model, which grow."""
        self._core = core
        self._stats = stats
        self._last = dict.fromkeys(("prompt", "generation", "preempted", "queries", "hits"), 0)
        self.loggers = [make(VllmConfigView.of(core.config), 0) for make in factories]
        for logger in self.loggers:
            logger.log_engine_initialized()

    def record(self) -> None:
        if not self.loggers:
            return
        scheduler = self._core.scheduler
        cache = scheduler.cache
        now = {
            "prompt": sum(each.prompt_tokens for each in self._stats.values()),
            "generation": sum(each.generated_tokens for each in self._stats.values()),
            "preempted": scheduler.num_preemptions,
            "queries": 0 if cache is None else cache.num_queries,
            "hits": 0 if cache is None else cache.num_hits,
        }
        new = {name: value - self._last[name] for name, value in now.items()}
        self._last = now
        pool = cache.groups[0].pool if cache is not None and cache.groups else None
        usage = 0.0 if pool is None else 1 - pool.num_free / pool.num_usable
        cached = PrefixCacheStats(new["queries"], new["hits"])
        moment = SchedulerStats(scheduler.num_running, scheduler.num_waiting, usage, cached)
        iteration = IterationStats(time.time(), new["prompt"], new["generation"], new["preempted"])
        for logger in self.loggers:
            logger.record(moment, iteration)

    def log(self) -> None:
        self.record()
        for logger in self.loggers:
            logger.log()
