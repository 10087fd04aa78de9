"""StatLoggerBase: vLLM's interface for loggers of statistics that a user writes, for `AsyncLLM(stat_loggers=[...])`.

A logger records the tokens since its last record and the queue of the moment: after every result of a request, and by
`do_log_stats`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.core import EngineCore
from slipstream.frontend.model_config_view import VllmConfigView
from slipstream.metrics.stats import ModelStats


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
        self.loggers = [make(VllmConfigView(core.config), 0) for make in factories]
        for logger in self.loggers:
            logger.log_engine_initialized()

    def record(self) -> None:
        if not self.loggers:
            return
        scheduler: Any = self._core.scheduler
        cache: Any = getattr(scheduler, "cache", None)  # encoders have none
        now = {
            "prompt": sum(each.prompt_tokens for each in self._stats.values()),
            "generation": sum(each.generated_tokens for each in self._stats.values()),
            "preempted": getattr(scheduler, "num_preemptions", 0),
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
