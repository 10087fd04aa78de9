"""StepEngine: the methods of vLLM's LLMEngine, which runs one step at a time, over the loop of an LLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slipstream.base.errors import InvalidParams
from slipstream.contracts.messages import Abort
from slipstream.frontend.inputs import Prompt
from slipstream.frontend.model_config_view import ModelConfigView, VllmConfigView
from slipstream.frontend.request_state import RequestState
from slipstream.frontend.results import RequestOutput
from slipstream.frontend.served import ServedModel, choose
from slipstream.frontend.sync_loop import SleepMode, SyncLoop
from slipstream.frontend.vllm_names import refuse_unused
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.params.values import check_text
from slipstream.text.script_tokenizer import ScriptTokenizer


class StepEngine:
    """Requests are added at any time, and every `step` advances all of them."""

    def __init__(self, models: Mapping[str, ServedModel], loop: SyncLoop) -> None:
        self.models = models
        self._loop = loop
        self._states: dict[str, RequestState] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
    ) -> str:
        """Submits a request. Its results come from `step`, by `output_kind` of the parameters. Returns the id."""
        refuse_unused(tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        check_text("request_id", request_id)
        if request_id in self._states:
            raise InvalidParams(f"request id {request_id!r} is in use; give another one", param="request_id")
        if not isinstance(params, SamplingParams):
            raise InvalidParams("LLMEngine generates text; for pooling use LLM.encode", param="params")
        served = choose(self.models, None, "generate")
        prepared = served.inputs.submit(
            request_id, prompt, params, priority=priority or None, lora_request=lora_request
        )
        with self._loop.turn():
            self._states[request_id] = self._loop.submit(served, prepared, streaming=True)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the results of the requests with new output."""
        if not self._states:
            return []
        with self._loop.turn():
            # sleep may have finished some
            updated = [state for state in self._states.values() if state.finished] or [
                state for state in self._loop.step() if state.id in self._states
            ]
            for state in updated:
                if state.finished:
                    del self._states[state.id]
                if state.refused is not None:
                    raise state.refused
            return [result for state in updated if (result := state.next_result()) is not None]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests without a result. Unknown ids are ignored: the request may have finished."""
        with self._loop.turn():
            for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
                if self._states.pop(request_id, None) is not None:
                    self._loop.lanes.abort(Abort(request_id))
                    self._loop.outputs.drop(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def get_num_unfinished_requests(self) -> int:
        return len(self._states)

    @property
    def tokenizer(self) -> ScriptTokenizer | None:
        return next(iter(self.models.values())).script_tokenizer

    def get_tokenizer(self) -> ScriptTokenizer | None:
        return self.tokenizer

    @property
    def model_config(self) -> ModelConfigView:
        """The configuration of the first model."""
        return ModelConfigView(next(iter(self._loop.lanes.cores.values())).config)

    @property
    def vllm_config(self) -> VllmConfigView:
        """The configuration of the first model."""
        return VllmConfigView(self.model_config.config)

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """See `LLM.sleep`."""
        self._loop.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._loop.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self._loop.lanes.sleeper.is_asleep

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        refuse_unused(reset_connector=reset_connector)
        self._loop.reset_prefix_cache(reset_running_requests=reset_running_requests)
        return True
