"""VllmMethods: small methods of vLLM's LLM, and the reasons of those that this one lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from slipstream.base.errors import InvalidOption
from slipstream.frontend.maintenance_methods import MaintenanceMethods
from slipstream.frontend.model_config_view import ModelConfigView
from slipstream.frontend.served import ServedModel, choose
from slipstream.frontend.step_engine import StepEngine
from slipstream.frontend.sync_loop import SyncLoop
from slipstream.params.sampling import SamplingParams
from slipstream.text.script_tokenizer import ScriptTokenizer

if TYPE_CHECKING:
    from slipstream.frontend.engine_args import EngineArgs

_TRANSFER = "update_weights alone replaces weights, from a folder, tensors or received_weights"
NOT_SUPPORTED = {
    "enqueue": "use llm_engine.add_request",
    "enqueue_chat": "use llm_engine.add_request",
    "wait_for_completion": "use llm_engine.step",
    "reset_mm_cache": "models read text only",
    "init_weight_transfer_engine": _TRANSFER,
    "start_weight_update": _TRANSFER,
    "finish_weight_update": _TRANSFER,
}
"""Methods of vLLM's LLM that this one does not have, and what to do instead."""


class VllmMethods(MaintenanceMethods):
    """A base class of `LLM`."""

    models: dict[str, ServedModel]
    _llm_engine: StepEngine | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**engine_args.given())

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json."""
        return choose(self.models, None, "generate").inputs.default_params()

    def get_tokenizer(self) -> ScriptTokenizer | None:
        """The tokenizer of the first model, with the methods of a transformers tokenizer. `LLM.tokenizer` is ours."""
        return next(iter(self.models.values())).script_tokenizer

    def get_world_size(self) -> int:
        return 1

    @property
    def llm_engine(self) -> StepEngine:
        """The same engine, one step at a time."""
        if not isinstance(self._sync_loop, SyncLoop):
            raise InvalidOption("llm_engine steps one engine, and there are replicas; set data_parallel_size to 1")
        if self._llm_engine is None:
            self._llm_engine = StepEngine(self.models, self._sync_loop)
        return self._llm_engine

    @property
    def model_config(self) -> ModelConfigView:
        """The configuration of the first model."""
        return self.llm_engine.model_config

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Only for names that the class does not have."""
            if (reason := NOT_SUPPORTED.get(name)) is not None:
                raise AttributeError(f"LLM.{name} is not supported: {reason}")
            raise AttributeError(f"LLM has no attribute {name!r}")
