"""ReplayedAdapters: reads the LoRA adapters of a recording from their folders while its plans run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from slipstream.base.errors import UserError
from slipstream.contracts.step import StepPlan
from slipstream.engine.record_file import Recording


class AdapterTarget(Protocol):
    """The part of AdapterStore that a replay uses."""

    def read(self, buffer: int, path: str) -> bytes: ...
    def load(self, slot: int, buffer: int) -> None: ...


class ReplayedAdapters:
    def __init__(self, target: AdapterTarget, folders: Mapping[str, str]) -> None:
        """`folders`: by the name of an adapter, where it is on this machine; others are where they were."""
        self._target = target
        self._folders = folders

    def start(self, recording: Recording) -> None:
        """Brings adapters to slots that were there before the first step. Raises UserError unless every adapter of the
        recording is on this machine, with the matrices that it had."""
        before = recording.adapters_read()
        plans = [step.plan.adapters for step in recording.steps]
        loads = [*before, *(load for plan in plans if plan is not None for load in plan.loads)]
        for name, path, digest in sorted({(load.name, load.path, load.digest) for load in loads}):
            self._read(0, name, path, digest)
        for load in before:
            self._read(load.buffer, load.name, load.path, load.digest)
            self._target.load(load.slot, load.buffer)

    def prepare(self, plan: StepPlan) -> None:
        """Reads the adapters that the plan loads to their host buffers."""
        for load in () if plan.adapters is None else plan.adapters.loads:
            self._read(load.buffer, load.name, load.path, load.digest)

    def _read(self, buffer: int, name: str, path: str, digest: bytes) -> None:
        folder = self._folders.get(name, path)
        advice = f"give its folder by --lora-modules {name}=FOLDER, or --check-only"
        if not Path(folder).is_dir():
            raise UserError(f"the adapter {name} is not in {folder} on this machine; {advice}")
        if self._target.read(buffer, folder) != digest:
            raise UserError(f"the adapter {name} in {folder} has other matrices than in the recording; {advice}")
