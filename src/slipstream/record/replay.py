"""Replay: runs the plans of a recording again, in the plan checker and, if there is one, in an executor.

Rows that were admitted before the first recorded step read pages whose content is not in the recording. They are
computed, since their tokens belong to the batch, and not compared. LoRA adapters are read again from their folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from slipstream.base.errors import UserError
from slipstream.contracts.step import Admission, DrawEdits, Executor, PoolAdmission, StepPlan, StepResult
from slipstream.record.plan_checker import PlanChecker, PlanFault, accepted_tokens
from slipstream.record.record_file import Recording, StepRecord
from slipstream.record.recorder import first_values

CLOSE = 1e-3  # relative difference of pooled values that counts as equal


class ReplayResult(msgspec.Struct):
    num_steps: int
    num_compared: int = 0  # results of rows: tokens of a step, or a pooled vector
    num_skipped: int = 0  # results of rows that began before the recording
    fault: str | None = None  # of the scheduler
    difference: str | None = None  # the first step whose result differs, with the values
    error: str | None = None  # of the executor


def replay(
    recording: Recording,
    executor: Executor | None = None,
    adapters: ReplayedAdapters | None = None,
    advance: Callable[[int], None] = lambda step: None,
) -> ReplayResult:
    """Stops at the first fault or difference. `adapters`: required for an executor of an engine with adapters.
    `advance` is called with the number of each step."""
    before: list[Admission | PoolAdmission] = [*recording.generated, *recording.pooled]
    checker = PlanChecker(recording.config, before, recording.adapters)
    outcome = ReplayResult(0)
    if adapters is not None:
        adapters.start(recording)
    plans = _prepared(recording) if executor is not None else []
    for index, record in enumerate(recording.steps):
        advance(record.plan.step)
        try:
            complete = checker.run(record)
        except PlanFault as fault:
            outcome.fault = str(fault)
            return outcome
        outcome.num_steps += 1
        if executor is None:
            continue
        late = record.late
        try:
            if adapters is not None:
                adapters.prepare(plans[index])
            executor.launch(plans[index])
            given = (
                None
                if late is None
                else DrawEdits(late.rows, late.bits, late.bias, offsets=late.offsets, sit_out=late.sit_out)
            )
            result = executor.finish(given).wait()
        except Exception as error:
            outcome.error = f"step {record.plan.step}: {type(error).__name__}: {error}"
            return outcome
        if not recording.redacted and record.tokens is not None:
            outcome.difference = _compare(record, result, complete, outcome)
            if outcome.difference is not None:
                return outcome
    return outcome


def _compare(record: StepRecord, result: StepResult, complete: set[int], outcome: ReplayResult) -> str | None:
    """The first difference of a complete row, in words."""
    plan = record.plan
    again = StepRecord(plan, tokens=result.tokens, counts=result.counts)
    sampling = plan.rows[plan.num_drawn > 0].tolist()
    sit_out = None if record.late is None else record.late.sit_out
    sitting = set() if sit_out is None else set(sit_out.rows.tolist())
    for row, old, new in zip(sampling, accepted_tokens(record), accepted_tokens(again), strict=True):
        if row in sitting:
            continue  # its draw is dropped
        if row not in complete:
            outcome.num_skipped += 1
            continue
        outcome.num_compared += 1
        if old != new:
            return f"step {plan.step}: row {row} drew {new}, the recording has {old}"
    if record.pooled is not None and plan.pooling is not None and plan.pooling.ends is not None:
        ending = plan.rows[plan.pooling.ends].tolist()
        for row, old_values, pooled in zip(ending, record.pooled, result.pooled, strict=True):
            if row not in complete:
                outcome.num_skipped += 1
                continue
            outcome.num_compared += 1
            new_values = np.array(first_values(pooled), np.float32)
            if not np.allclose(old_values, new_values, rtol=CLOSE, atol=CLOSE, equal_nan=True):
                return f"step {plan.step}: row {row} has {new_values.tolist()}, the recording {old_values.tolist()}"
    return None


def _prepared(recording: Recording) -> list[StepPlan]:
    """The plans, with an admission of each row that was in use before. Its pages are null pages."""
    plans = [record.plan for record in recording.steps]
    before: list[Admission | PoolAdmission] = [*recording.generated, *recording.pooled]
    missing = {each.row: each for each in before}
    prepared = []
    for plan in plans:
        added = []
        for index, row in enumerate(plan.rows.tolist()):
            each = missing.get(row)
            if each is not None and row not in plan.released:
                start = int(plan.lengths[index] - plan.num_tokens[index])
                added.append(replace(each, num_cached=start))
        # a row that never ran in the recording is not known to the executor
        dropped = [row for row in plan.released.tolist() if row in missing]
        for each in added:
            del missing[each.row]
        for row in dropped:
            del missing[row]
        kept = plan.released[~np.isin(plan.released, dropped)]
        if added or dropped:
            generated = tuple(each for each in added if isinstance(each, Admission))
            plan = replace(plan, released=kept, admitted=(*generated, *plan.admitted))
            pooled = tuple(each for each in added if isinstance(each, PoolAdmission))
            if pooled and plan.pooling is not None:
                plan = replace(plan, pooling=replace(plan.pooling, admitted=(*pooled, *plan.pooling.admitted)))
        prepared.append(plan)
    return prepared


# ReplayedAdapters: reads the LoRA adapters of a recording from their folders while its plans run again.


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
