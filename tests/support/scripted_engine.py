"""Cores and lanes with scripted devices: the engine loop without a model."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from scripted import ScriptedExecutor
from scripted_bench import make_config
from scripted_tokens import alone
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.messages import Submit
from slipstream.contracts.request import FinishReason, Request
from slipstream.contracts.step import DrawEdits, StepPlan, StepResult
from slipstream.engine.core import EngineCore
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.grammar.constraints import Constraints


class ScriptedDevice:
    """Executes a plan when its result is waited for, or when the test calls `run`. `breaks_at` makes it fail."""

    def __init__(self, page_size: int, max_num_seqs: int, num_checkpoints: int | None = None) -> None:
        """`num_checkpoints`: as of `ScriptedExecutor`."""
        self.executor = ScriptedExecutor(
            page_size, max_num_seqs=max_num_seqs, num_checkpoints=num_checkpoints, border=page_size
        )
        self.handles: deque[_Handle] = deque()  # launched, not executed
        self.breaks_at: str | None = None  # launch, finish or wait
        self.num_waits = 0
        self.freed: list[int] = []  # stored queries that were freed without a step
        self.closed = False

    def launch(self, plan: StepPlan) -> None:
        self._break("launch")
        self.executor.launch(plan)

    def finish(self, late: DrawEdits | None = None) -> _Handle:
        self._break("finish")
        self.executor.finish(late)
        self.handles.append(_Handle(self))
        return self.handles[-1]

    def free_queries(self, queries: tuple[int, ...]) -> None:
        assert self.breaks_at is None, "a call after the device failed"
        self.freed += queries

    def run(self) -> None:
        """Executes the oldest step."""
        self.handles.popleft().result = self.executor.wait()

    def close(self) -> None:
        self.closed = True

    def _break(self, where: str) -> None:
        if self.breaks_at == where:
            raise RuntimeError("device-side assert triggered")


class _Handle:
    has_no_result = False
    interval = None

    def __init__(self, device: ScriptedDevice) -> None:
        self.device = device
        self.result: StepResult | None = None

    def done(self) -> bool:
        return self.result is not None

    def wait(self) -> StepResult:
        self.device._break("wait")
        self.device.num_waits += not self.done()
        while self.result is None:
            self.device.run()
        return self.result


def scripted_core(
    depth: int = 0,
    *,
    page_size: int = 4,
    num_pages: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    max_waiting: int = 1000,
    constraints: Constraints | None = None,
    num_checkpoints: int | None = None,
) -> EngineCore:
    """`num_checkpoints`: of a model with recurrent states; None: it has none."""
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
        chunked_prefill=True,
        depth=depth,
        seed=0,
        staged_ints=4096,
    )
    config: Any = SimpleNamespace(
        model=SimpleNamespace(info=SimpleNamespace(eos_token_ids=())),
        images=None,
        cache=make_config(page_size, num_pages, num_checkpoints=num_checkpoints),
        scheduler=limits,
        adapters=None,
    )
    return EngineCore(config, ScriptedDevice(page_size, max_num_seqs, num_checkpoints), constraints)


def submit(name: str, prompt: list[int], model: str = "", **params: Any) -> Submit:
    """A request with seed 0."""
    return Submit(name, prompt, SamplingParams(seed=0, **params), 0.0, model=model)


def tokens_alone(message: Submit, sample: int, max_model_len: int = 64) -> tuple[list[int], FinishReason]:
    """The tokens of a sample of this prompt when it runs alone."""
    params, prompt = message.params, message.prompt_token_ids
    assert isinstance(params, SamplingParams)
    most = max_model_len if params.max_tokens is None else min(max_model_len, len(prompt) + params.max_tokens)
    return alone(Request("", prompt, params, sample=sample, stop_ids=params.stop_ids, max_length=most))
