"""LLMEngine: vLLM's engine of one step at a time."""

from __future__ import annotations

from slipstream.frontend.step_engine import StepEngine
from slipstream.frontend.vllm_names import EngineArgs
from slipstream.llm import LLM


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
