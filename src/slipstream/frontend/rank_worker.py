"""RankWorker: the part of vLLM's worker that functions of `LLM.collective_rpc` use. There is one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from slipstream.base.errors import InvalidParams
from slipstream.frontend.sync_loop import SyncLoop


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
