"""VllmMethods: methods of vLLM's LLM that are no part of generation and pooling, and the reasons of those it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from slipstream.engine.core import EngineCore
from slipstream.errors import InvalidOption
from slipstream.frontend.served import ServedModel, choose
from slipstream.frontend.step_engine import StepEngine
from slipstream.frontend.sync_loop import SleepMode, SyncLoop
from slipstream.frontend.vllm_names import EngineArgs
from slipstream.params import SamplingParams
from slipstream.text.tokenizer import Tokenizer

T = TypeVar("T")

_TRANSFER = "update_weights alone replaces weights, from a folder, tensors or received_weights"
NOT_SUPPORTED = {
    "get_metrics": "use slipstream serve and its /metrics",
    "start_profile": "use torch.profiler around the call",
    "stop_profile": "use torch.profiler around the call",
    "collective_rpc": "there is one device and no worker; use apply_model",
    "enqueue": "use llm_engine.add_request",
    "enqueue_chat": "use llm_engine.add_request",
    "wait_for_completion": "use llm_engine.step",
    "reset_mm_cache": "models read text only",
    "init_weight_transfer_engine": _TRANSFER,
    "start_weight_update": _TRANSFER,
    "finish_weight_update": _TRANSFER,
}
"""Methods of vLLM's LLM that this one does not have, and what to do instead."""


class VllmMethods:
    """A base class of `LLM`."""

    models: dict[str, ServedModel]
    cores: dict[str, EngineCore]
    _sync_loop: Any
    _llm_engine: StepEngine | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**engine_args.given())

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json."""
        return choose(self.models, None, "generate").inputs.default_params()

    def get_tokenizer(self) -> Tokenizer | None:
        return next(iter(self.models.values())).tokenizer

    def get_world_size(self) -> int:
        return 1

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Calls a function on the torch module of the first model. Returns a list with its result, as of one rank."""
        with self._sync_loop.turn():
            if not self.cores:
                raise InvalidOption("the models of replicas are in other processes; set data_parallel_size to 1")
            executor: Any = next(iter(self.cores.values())).executor
            return [func(executor.model)]

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Releases device memory until `wake_up`; calls raise EngineAsleep meanwhile. Needs enable_sleep_mode.

        Level 1: weights move to host memory, caches are dropped. Level 2: weights are dropped too, and must be loaded
        again by `update_weights`. Level 0 releases nothing. `mode`: requests of streams and of `llm_engine` are aborted
        (abort), completed first (wait), or continue after `wake_up` (keep), where they are computed again.
        """
        self._sync_loop.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes back the memory of weights, kv_cache or both, at the same addresses: captured graphs stay valid."""
        self._sync_loop.wake_up(tags)

    def update_weights(self, weights: Any = None, *, model: str | None = None) -> None:
        """Replaces weights in place: from a folder or file of the same architecture (None: the model's own), or from
        torch tensors by their names in a checkpoint: a mapping, or an iterator of pairs, such as `received_weights`.

        A part of the tensors may be given. The prefix cache is reset; requests that have not finished are computed
        again, and continue with the new weights.
        """
        self._sync_loop.update_weights(weights, model)

    @property
    def llm_engine(self) -> StepEngine:
        """The same engine, one step at a time."""
        if not isinstance(self._sync_loop, SyncLoop):
            raise InvalidOption("llm_engine steps one engine, and there are replicas; set data_parallel_size to 1")
        if self._llm_engine is None:
            self._llm_engine = StepEngine(self.models, self._sync_loop)
        return self._llm_engine

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Only for names that the class does not have."""
            if (reason := NOT_SUPPORTED.get(name)) is not None:
                raise AttributeError(f"LLM.{name} is not supported: {reason}")
            raise AttributeError(f"LLM has no attribute {name!r}")
