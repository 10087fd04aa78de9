"""Sleeper: releases the device memory of weights and caches while an engine is not used, and exchanges weights.

Both happen between two steps. Requests that have not finished are preempted: they are computed again afterwards, with
the weights of then. The prefix cache is reset, because its pages are lost or belong to other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slipstream.base.errors import EngineAsleep, InvalidOption, InvalidParams, ModelNotFound
from slipstream.contracts.messages import Output
from slipstream.contracts.step import WeightUpdate
from slipstream.engine.core import EngineCore
from slipstream.scheduler.scheduler import Scheduler

WEIGHTS, CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
TAGS = (WEIGHTS, CACHE, SCHEDULING)
"""What `wake_up` can bring back, by vLLM's names."""


class SleepingDevice(Protocol):
    """The part of `Device` that is used here."""

    def release(self, tag: str, *, keep: bool) -> None: ...
    def map(self, tag: str) -> None: ...


class Sleeper:
    def __init__(self, cores: Mapping[str, EngineCore], device: SleepingDevice | None = None) -> None:
        """`device`: None if the engine has no sleep mode."""
        self._cores = cores
        self._device = device
        self._asleep: set[str] = set()  # tags
        self._missing: dict[str, int] = {}  # by model: tensors that were dropped, or changed by an update that failed

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def can_run(self, model: str) -> bool:
        """Whether the engine is awake and the model has its weights."""
        return not self._asleep and model not in self._missing

    def check_awake(self, model: str) -> None:
        """Raises where requests for the model cannot run."""
        if self._asleep:
            raise EngineAsleep(f"the engine is asleep ({', '.join(sorted(self._asleep))}); call wake_up first")
        if model in self._missing:
            raise EngineAsleep(
                f"weights of {model} were dropped (sleep level 2) or replaced in part (an update that failed), and "
                f"{self._missing[model]} tensors were not loaded again; call update_weights first"
            )

    def sleep(self, level: int) -> list[Output]:
        """Level 0: no step runs. Level 1: weights move to host memory, caches are dropped. Level 2: weights are dropped
        too. Returns the outputs of steps that were in flight."""
        if type(level) is not int or level not in (0, 1, 2):
            raise InvalidParams(f"level is {level!r:.50}; give 0, 1 or 2", param="level")
        if level == 0:
            self._asleep.add(SCHEDULING)
            return [output for core in self._cores.values() for output in core.drain()]
        device = self._sleeping_device()
        if level == 2:
            for core in self._cores.values():
                self._weights_of(core).check_can_update()
        outputs = [output for core in self._cores.values() for output in _pause(core)]
        self._asleep.update(TAGS)
        device.release(WEIGHTS, keep=level == 1)
        device.release(CACHE, keep=False)
        if level == 2:
            for core in self._cores.values():
                self._weights_of(core).drop()
            self._count_missing()
        return outputs

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings back what the tags name; None: everything. Weights that were dropped must be loaded again."""
        if tags is not None and (isinstance(tags, str) or not all(tag in TAGS for tag in tags)):
            raise InvalidParams(f"tags are {tags!r:.100}; give a list of {', '.join(TAGS)}", param="tags")
        wanted = set(TAGS if tags is None else tags)
        for tag in (WEIGHTS, CACHE):
            if tag in wanted & self._asleep:
                self._sleeping_device().map(tag)
        self._asleep -= wanted
        if self._asleep == {SCHEDULING} and wanted & {WEIGHTS, CACHE}:
            self._asleep.clear()

    def update_weights(self, source: object = None, model: str | None = None) -> list[Output]:
        """Replaces weights of a model in place, see `WeightUpdate`. Returns the outputs of steps that were in
        flight."""
        if WEIGHTS in self._asleep:
            raise EngineAsleep('the weights are asleep; call wake_up(tags=["weights"]) first')
        if model is not None and model not in self._cores:
            raise ModelNotFound(f"there is no model {model!r:.100} here; there is {', '.join(self._cores)}")
        core = next(iter(self._cores.values())) if model is None else self._cores[model]
        weights = self._weights_of(core)
        weights.check_can_update()
        outputs = [] if self._asleep - {SCHEDULING} else _pause(core)
        if core.recorder is not None:
            core.recorder.weights_changed(from_files=source is None)
        try:
            weights.update(source)
        finally:
            self._count_missing()
        return outputs

    def preempt_all(self) -> list[Output]:
        """Releases the pages of all running requests, which are computed again from their tokens, and resets the prefix
        caches."""
        return [output for core in self._cores.values() for output in _pause(core)]

    def _count_missing(self) -> None:
        counts = {name: self._weights_of(core).num_missing for name, core in self._cores.items()}
        self._missing = {name: count for name, count in counts.items() if count}

    def _sleeping_device(self) -> SleepingDevice:
        if self._device is None:
            raise InvalidOption("enable_sleep_mode is off, so that memory cannot be released; start the engine with it")
        return self._device

    def _weights_of(self, core: EngineCore) -> WeightUpdate:
        if core.handoff is not None:
            raise InvalidOption("weights of engines that exchange pages stay as they are; start them again instead")
        if core.weights is None:
            raise InvalidOption("weights of several ranks cannot be exchanged; set tensor_parallel_size to 1")
        return core.weights


def _pause(core: EngineCore) -> list[Output]:
    """Complete the steps in flight, preempt all running requests and reset the prefix cache."""
    outputs = core.drain()
    if isinstance(core.scheduler, Scheduler):
        core.scheduler.preempt_all()
        core.scheduler.cache.reset()
    return outputs
