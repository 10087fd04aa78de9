"""EngineMethods: methods of vLLM's LLM and LLMEngine that act on the engine. StepEngine: runs single steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from slipstream.api.vllm import ModelConfigView, VllmConfigView, refuse_unused
from slipstream.base.errors import InvalidOption, InvalidParams
from slipstream.config.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.lanes import lane_stats
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.inputs import Prompt
from slipstream.front.loop_thread import LoopThread
from slipstream.front.request_state import RequestStream
from slipstream.front.results import RequestOutput
from slipstream.front.router import SleepMode, control, fall_asleep
from slipstream.front.served import FrontEndArgs
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.params.values import check_text
from slipstream.text.script_tokenizer import ScriptTokenizer
from slipstream.transport.inline import InlineClient

if TYPE_CHECKING:
    from slipstream.metrics.prometheus import Metric

T = TypeVar("T")


class EngineMethods:
    """A base class of `LLM` and `LLMEngine`: memory, weights, metrics, profiles, workers."""

    _profiler: Any = None

    def __init__(
        self,
        engine: AsyncEngine,
        driver: InlineClient | LoopThread,
        cores: dict[str, EngineCore],
        configs: Mapping[str, EngineConfig],
        front_end: FrontEndArgs,
    ) -> None:
        """`cores`, by model: empty with replicas, which run in other processes."""
        self.cores = cores
        self._engine = engine
        self._driver = driver
        self._configs = configs
        self._front_end = front_end

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Releases device memory until `wake_up`; calls raise EngineAsleep meanwhile. Needs enable_sleep_mode.

        Level 1: weights move to host memory, caches are dropped. Level 2: weights are dropped too, and must be loaded
        again by `update_weights`. Level 0 releases nothing. `mode`: requests of streams and of `llm_engine` are aborted
        (abort), completed first (wait), or continue after `wake_up` (keep), where they are computed again.
        """
        self._driver.call(fall_asleep(self._engine, level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes back the memory of weights, kv_cache or both, at the same addresses: captured graphs stay valid."""
        self._driver.call(control(self._engine, "wake_up", tags=tags))

    def update_weights(self, weights: Any = None, *, model: str | None = None) -> None:
        """Replaces weights in place: from a folder or file of the same architecture (None: the model's own), or from
        torch tensors by their names in a checkpoint: a mapping, or an iterator of pairs, such as `received_weights`.

        A part of the tensors may be given. The prefix cache is reset; requests that have not finished are computed
        again, and continue with the new weights.
        """
        client = self._inline()
        client.do(lambda: self._engine.receive([*client.lanes.sleeper.update_weights(weights, model)]))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clears the prefix caches of all models. Returns True.

        Running requests keep their pages; with `reset_running_requests` they are computed again from their tokens.
        """
        refuse_unused(reset_connector=reset_connector)
        self._driver.call(self._engine.reset_prefix_cache(reset_running_requests))
        return True

    def get_metrics(self) -> list[Metric]:
        """The metrics of the moment under vLLM's names, as objects of `slipstream.metrics.prometheus`. Needs
        disable_log_stats=False."""
        from slipstream.metrics.prometheus import read_metrics  # with prometheus_client, which takes a while to import

        with self._inline().turn():
            if not self._engine.counts:
                raise InvalidOption("statistics are off; make the LLM with disable_log_stats=False")
            return read_metrics(self._engine.stats, [lane_stats(name, core) for name, core in self.cores.items()])

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Records the operations of the device until `stop_profile`. Needs profiler_config."""
        config = self._front_end.profiler_config
        if config is None:
            raise InvalidOption(
                'profiles need a folder; give profiler_config={"profiler": "torch", "torch_profiler_dir": FOLDER}'
            )
        if self._profiler is not None:
            raise InvalidParams("a profile is being recorded; call stop_profile first")
        with self._inline().turn():
            self._profiler = self._one_runner().device.profile(
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
        with self._inline().turn():
            profiler.stop(self._profile_prefix)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Calls a function on the torch module of the first model. Returns a list with its result, as of one rank."""
        with self._inline().turn():
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
        with self._inline().turn():
            worker = RankWorker(self._one_runner(), self)
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

    @property
    def model_config(self) -> ModelConfigView:
        """The configuration of the first model."""
        return ModelConfigView.of(next(iter(self._configs.values())))

    def get_tokenizer(self) -> ScriptTokenizer | None:
        """The tokenizer of the first model, with the methods of a transformers tokenizer. `LLM.tokenizer` is ours."""
        return self._engine.model().script_tokenizer

    def _inline(self) -> InlineClient:
        """The client of an engine in this process. Raises if the engine has replicas in other processes."""
        if not isinstance(self._driver, InlineClient):
            raise InvalidOption("replicas run in other processes, which this call does not reach; use one replica")
        return self._driver


# StepEngine: the methods of vLLM's LLMEngine, which runs one step at a time.


class StepEngine(EngineMethods):
    """Requests are added at any time, and every `step` advances all of them."""

    def __init__(self, whole: EngineMethods) -> None:
        """`whole`: an LLM. It owns the engine."""
        super().__init__(whole._engine, whole._driver, whole.cores, whole._configs, whole._front_end)
        self._streams: dict[str, RequestStream[Any]] = {}  # by request id

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
        if request_id in self._streams:
            raise InvalidParams(f"request id {request_id!r} is in use; give another one", param="request_id")
        if not isinstance(params, SamplingParams):
            raise InvalidParams("LLMEngine generates text; for pooling use LLM.encode", param="params")
        served = self._engine.model(None, "generate")
        prepared = served.inputs.prepare(
            self._engine.new_id(request_id), prompt, params, priority=priority or None, lora_request=lora_request
        )
        read = partial(self._engine.read, [prepared], served.description.name, name=request_id)
        stream = self._inline().do(read)
        try:
            stream.mailbox.take()  # raises if the core has refused it
        except Exception:
            self._inline().do(partial(self._engine.end, stream, failed=True))
            raise
        self._streams[request_id] = stream
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the results of the requests with new output."""
        if not self._streams:
            return []
        client = self._inline()
        with client.turn():
            if not any(stream.mailbox for stream in self._streams.values()):  # sleep may have finished some
                client.step()
            results = []
            for name, stream in list(self._streams.items()):
                for state in stream.mailbox.take():
                    if state.finished:
                        del self._streams[name]
                    if (result := state.next_result()) is not None:
                        results.append(result)
            return results

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests without a result. Unknown ids are ignored: the request may have finished."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if (stream := self._streams.pop(request_id, None)) is not None:
                self._inline().do(partial(self._engine.end, stream, failed=False))

    def has_unfinished_requests(self) -> bool:
        return bool(self._streams)

    def get_num_unfinished_requests(self) -> int:
        return len(self._streams)

    @property
    def tokenizer(self) -> ScriptTokenizer | None:
        return self.get_tokenizer()

    @property
    def vllm_config(self) -> VllmConfigView:
        """The configuration of the first model."""
        return VllmConfigView.of(next(iter(self._configs.values())))

    def is_sleeping(self) -> bool:
        return self._driver.call(control(self._engine, "ask"))


# RankWorker: the part of vLLM's worker that functions of `LLM.collective_rpc` use. There is one rank.


class WorkerRunner(NamedTuple):
    """vLLM's model_runner."""

    model: Any  # a torch module


class RankWorker:
    METHODS = ("get_model", "load_weights", "reload_weights", "update_config", "sleep", "wake_up", "check_health")
    rank = local_rank = 0

    def __init__(self, runner: Any, engine: EngineMethods) -> None:
        self.model_runner = WorkerRunner(runner.model)
        self.device = runner.device.torch_device
        self._engine = engine

    def get_model(self) -> Any:
        """The torch module."""
        return self.model_runner.model

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replaces weights by pairs of a name in the checkpoint and a torch tensor, in place."""
        self._engine.update_weights(weights)

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Any]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Reads weights again: of the model's files, or of a folder, or of pairs of names and tensors."""
        if not is_checkpoint_format:
            raise InvalidParams("weights must have the names of the checkpoint", param="is_checkpoint_format")
        self._engine.update_weights(weights_path if weights_iterator is None else weights_iterator)

    def update_config(self, overrides: Mapping[str, Any]) -> None:
        """Accepts a `load_format` of the model's files, as scripts set it before `reload_weights`, which reads them."""
        accepted = [{"load_config": {"load_format": each}} for each in ("auto", "hf", "safetensors")]
        if dict(overrides) not in accepted:
            raise InvalidParams(
                f"update_config takes load_config with load_format auto, hf or safetensors, not {overrides!r:.100}",
                param="overrides",
            )

    def sleep(self, level: int = 1) -> None:
        self._engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._engine.wake_up(tags)

    def check_health(self) -> None:
        """Nothing to do: the engine is open while it calls a function."""
