"""Loggers of statistics that users of vLLM write: AsyncLLM(stat_loggers=[...])."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loop_pace import keep_pace
from slipstream import AsyncEngineArgs, AsyncLLM, SamplingParams, StatLoggerBase
from slipstream.base.errors import InvalidParams
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1)


class Logger(StatLoggerBase):
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.index = engine_index
        self.is_started = False
        self.records: list[Any] = []
        self.num_logs = 0
        LOGGERS.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
        self.records.append((scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        self.is_started = True

    def log(self) -> None:
        self.num_logs += 1


LOGGERS: list[Logger] = []


def test_loggers_get_what_happened_since_the_last_time(tmp_path):
    LOGGERS.clear()
    args = AsyncEngineArgs(model=str(write_tiny(tmp_path)), **SMALL)
    prompt, params = {"prompt_token_ids": list(range(5, 17))}, SamplingParams(max_tokens=7, ignore_eos=True)

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(
            args, usage_context="script", stat_loggers=[Logger, lambda *how: Logger(*how)]
        )
        keep_pace(engine.engine)
        async for _ in engine.generate(prompt, params, "0"):
            pass
        async for _ in engine.generate(prompt, params, "1"):
            pass
        await engine.do_log_stats()
        assert not await engine.is_tracing_enabled() and engine.model_config.max_model_len == 64
        assert engine.vllm_config.scheduler_config.max_num_seqs == 4
        await engine.close()

    asyncio.run(run())
    assert len(LOGGERS) == 2
    for logger in LOGGERS:
        assert (logger.max_num_seqs, logger.index, logger.is_started, logger.num_logs) == (4, 0, True, 1)
        steps = [step for _, step in logger.records]
        assert sum(step.num_generation_tokens for step in steps) == 14
        assert sum(step.num_prompt_tokens for step in steps) == 24
        cached = [moment.prefix_cache_stats for moment, _ in logger.records]
        assert sum(each.queries for each in cached) == 24 and 0 < sum(each.hits for each in cached) < 12
        assert any(0 < moment.kv_cache_usage < 1 and moment.num_running_reqs == 1 for moment, _ in logger.records)
        assert logger.records[-1][0].num_running_reqs == 0


def test_an_engine_cannot_be_made_without_running(tmp_path):
    with pytest.raises(InvalidParams, match="start_engine_loop"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tmp_path)), start_engine_loop=False)
