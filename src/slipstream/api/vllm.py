"""VllmMethods: small methods of vLLM's LLM, and the reasons of those that this one lacks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar, get_args, get_type_hints

from slipstream.base.errors import InvalidOption, InvalidParams
from slipstream.config.options import Options
from slipstream.config.vllm_args import NO_EFFECT, REFUSED, TRANSLATED
from slipstream.contracts.messages import Abort
from slipstream.engine.core import EngineCore
from slipstream.engine.lanes import lane_stats
from slipstream.front.inputs import Prompt
from slipstream.front.request_state import RequestState
from slipstream.front.results import RequestOutput
from slipstream.front.served import FrontEndArgs, ServedModel, choose
from slipstream.front.sync_loop import SleepMode, SyncLoop
from slipstream.front.vllm_names import ModelConfigView, VllmConfigView, refuse_unused
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.params.values import check_text
from slipstream.text.script_tokenizer import ScriptTokenizer

if TYPE_CHECKING:
    from slipstream.metrics.prometheus import Metric


# StepEngine: the methods of vLLM's LLMEngine, which runs one step at a time, over the loop of an LLM.


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
        prepared = served.inputs.prepare(
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


# MaintenanceMethods: methods of vLLM's LLM that act on the engine: memory, weights, metrics, profiles, workers.

T = TypeVar("T")


class MaintenanceMethods:
    """A base class of `LLM`."""

    cores: dict[str, EngineCore]
    _front_end: FrontEndArgs
    _sync_loop: Any
    _profiler: Any = None

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

    def get_metrics(self) -> list[Metric]:
        """The metrics of the moment under vLLM's names, as objects of `slipstream.metrics.prometheus`. Needs
        disable_log_stats=False."""
        from slipstream.metrics.prometheus import read_metrics  # with prometheus_client, which takes a while to import

        loop = self._own_loop()
        with loop.turn():
            if loop.stats is None:
                raise InvalidOption("statistics are off; make the LLM with disable_log_stats=False")
            return read_metrics(loop.stats, [lane_stats(name, core) for name, core in self.cores.items()])

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Records the operations of the device until `stop_profile`. Needs profiler_config."""
        config = self._front_end.profiler_config
        if config is None:
            raise InvalidOption(
                'profiles need a folder; give profiler_config={"profiler": "torch", "torch_profiler_dir": FOLDER}'
            )
        if self._profiler is not None:
            raise InvalidParams("a profile is being recorded; call stop_profile first")
        with self._own_loop().turn():
            self._profiler = self._one_device().profile(
                Path(config.torch_profiler_dir),
                with_stack=config.torch_profiler_with_stack,
                record_shapes=config.torch_profiler_record_shapes,
                profile_memory=config.torch_profiler_with_memory,
            )
            self._profile_prefix = f"{profile_prefix}_" if profile_prefix else ""

    def stop_profile(self) -> None:
        """Writes a trace, which ui.perfetto.dev opens, to the folder of profiler_config."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise InvalidParams("no profile is being recorded; call start_profile first")
        with self._own_loop().turn():
            profiler.stop(self._profile_prefix)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Calls a function on the torch module of the first model. Returns a list with its result, as of one rank."""
        with self._own_loop().turn():
            return [func(self._one_runner().model)]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the worker by name, or a function with the worker (`RankWorker`) as its first argument.
        Returns a list with the result, as of one rank. `timeout` must be None: the call runs in this thread."""
        if timeout is not None:
            raise InvalidParams("timeout is not supported: the call runs in this thread; leave it out", param="timeout")
        loop = self._own_loop()
        with loop.turn():
            worker = RankWorker(self._one_runner(), loop)
            if callable(method):
                return [method(worker, *args, **(kwargs or {}))]
            if not isinstance(method, str) or method not in RankWorker.METHODS:
                names = ", ".join(RankWorker.METHODS)
                raise InvalidParams(f"a worker has no method {method!r:.50}; it has {names}", param="method")
            return [getattr(worker, method)(*args, **(kwargs or {}))]

    def _one_runner(self) -> Any:
        """The runner of the first model."""
        executor: Any = next(iter(self.cores.values())).executor
        if not hasattr(executor, "model"):
            raise InvalidOption("the model has several ranks, in other processes; set tensor_parallel_size to 1")
        return executor

    def _one_device(self) -> Any:
        return self._one_runner().device

    def _own_loop(self) -> SyncLoop:
        """The loop of an engine in this process. Raises if the engine has replicas in other processes."""
        if not isinstance(self._sync_loop, SyncLoop):
            raise InvalidOption("replicas run in other processes, which this call does not reach; use one replica")
        return self._sync_loop


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


# RankWorker: the part of vLLM's worker that functions of `LLM.collective_rpc` use. There is one rank.


class WorkerRunner(NamedTuple):
    """vLLM's model_runner."""

    model: Any  # a torch module


class RankWorker:
    METHODS = ("get_model", "load_weights", "reload_weights", "update_config", "sleep", "wake_up", "check_health")
    rank = local_rank = 0

    def __init__(self, runner: Any, loop: SyncLoop) -> None:
        self.model_runner = WorkerRunner(runner.model)
        self.device = runner.device.torch_device
        self._loop = loop

    def get_model(self) -> Any:
        """The torch module."""
        return self.model_runner.model

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replaces weights by pairs of a name in the checkpoint and a torch tensor, in place."""
        self._loop.update_weights(weights, None)

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Any]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Reads weights again: of the model's files, or of a folder, or of pairs of names and tensors."""
        if not is_checkpoint_format:
            raise InvalidParams("weights must have the names of the checkpoint", param="is_checkpoint_format")
        self._loop.update_weights(weights_path if weights_iterator is None else weights_iterator, None)

    def update_config(self, overrides: Mapping[str, Any]) -> None:
        """Accepts a `load_format` of the model's files, as scripts set it before `reload_weights`, which reads them."""
        accepted = [{"load_config": {"load_format": each}} for each in ("auto", "hf", "safetensors")]
        if dict(overrides) not in accepted:
            raise InvalidParams(
                f"update_config takes load_config with load_format auto, hf or safetensors, not {overrides!r:.100}",
                param="overrides",
            )

    def sleep(self, level: int = 1) -> None:
        self._loop.sleep(level, "abort")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._loop.wake_up(tags)

    def check_health(self) -> None:
        self._loop.check_open()


# EngineArgs, as scripts for vLLM use it. Imported only where it is used: a dataclass of 239 fields takes 20 ms.

_FRONT_END = (*FrontEndArgs.__struct_fields__, "use_tqdm_on_load", "spec_method", "spec_tokens")
_NAMES = dict.fromkeys(("model", *Options.__struct_fields__, *_FRONT_END, *TRANSLATED, *REFUSED, *NO_EFFECT))

_Args: Any = dataclasses.make_dataclass("_Args", [(name, Any, None) for name in _NAMES])


class EngineArgs(_Args):  # type: ignore[misc]
    """The arguments of `LLM`, for `from_engine_args`. A dataclass; None is the default of each field."""

    def given(self) -> dict[str, Any]:
        """The arguments that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each argument to a parser of argparse, and returns the parser."""
        add_engine_flags(parser, _NAMES)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments among those that a parser has read."""
        return cls(**{name: getattr(args, name) for name in _NAMES if hasattr(args, name)})


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM`."""


# Command-line flags of EngineArgs, for scripts that make their own parser (`EngineArgs.add_cli_args`).

SHORT = {
    "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep", "decode_context_parallel_size": "-dcp", "prefill_context_parallel_size": "-pcp",
    "data_parallel_rank": "-dpn", "data_parallel_start_rank": "-dpr", "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa", "data_parallel_rpc_port": "-dpp", "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph", "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm", "nnodes": "-n", "node_rank": "-r", "quantization": "-q",
    "speculative_config": "-sc", "diffusion_config": "-dc", "compilation_config": "-cc", "attention_config": "-ac",
}  # fmt: skip
"""Short flags of vLLM, by argument."""


def add_engine_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds a flag for each argument; None is the default of each. A value is text or JSON, by the option's type."""
    group = parser.add_argument_group("engine arguments")
    kinds = {name: set(get_args(hint)) or {hint} for name, hint in get_type_hints(Options).items()}
    for name in names:
        flags, kind = _spellings(name), kinds.get(name, {Any})
        if bool in kind and kind <= {bool, type(None)}:
            group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, default=None)
        elif kind <= {str, type(None)}:
            group.add_argument(*flags, dest=name, default=None)
        else:  # without a value it is a switch
            group.add_argument(*flags, dest=name, nargs="?", const=True, type=_value, default=None)


def _spellings(name: str) -> list[str]:
    flags = [f"--{name.replace('_', '-')}"]
    flags += [f"--{name}"] if "_" in name else []
    return [*flags, SHORT[name]] if name in SHORT else flags


def _value(text: str) -> Any:
    """Numbers, booleans, objects and lists of JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
