"""MaintenanceMethods: methods of vLLM's LLM that act on the engine: memory, weights, metrics, profiles, workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.base.errors import InvalidOption, InvalidParams
from slipstream.engine.core import EngineCore
from slipstream.engine.lane_stats import lane_stats
from slipstream.frontend.front_end_args import FrontEndArgs
from slipstream.frontend.rank_worker import RankWorker
from slipstream.frontend.sync_loop import SleepMode, SyncLoop

if TYPE_CHECKING:
    from slipstream.metrics.prometheus import Metric

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
