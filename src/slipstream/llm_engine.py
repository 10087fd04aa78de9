"""LLMEngine: vLLM's engine of one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.frontend.step_engine import StepEngine
from slipstream.llm import LLM

if TYPE_CHECKING:
    from slipstream.frontend.engine_args import EngineArgs
    from slipstream.metrics.prometheus import Metric

T = TypeVar("T")


class LLMEngine(StepEngine):
    """An LLM to which requests are added at any time. `llm` is the LLM, to close.

    engine = LLMEngine.from_engine_args(EngineArgs(model="path/to/model"))
    engine.add_request("0", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text)
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.models, llm._own_loop())
        self.llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(LLM.from_engine_args(engine_args))

    # methods of `LLM`

    def get_metrics(self) -> list[Metric]:
        return self.llm.get_metrics()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self.llm.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        self.llm.stop_profile()

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        return self.llm.apply_model(func)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return self.llm.collective_rpc(method, timeout, args, kwargs)
