"""Recorder: an executor around the executor that keeps the last steps in memory, for `slipstream replay`.

Plans are immutable, so a step costs a few references. The ring is bounded in steps and in bytes. Of the steps that have
left it, only the admissions of rows that are still in use are kept. Masks of grammars (19 kB per row and step with a
vocabulary of 152,000 tokens) are not copied: `take` computes them again from the tokens of their requests.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.config.config import EngineConfig
from slipstream.contracts.step import (
    AdapterLoad,
    Admission,
    DrawEdits,
    Executor,
    Handle,
    Ints,
    MaskSource,
    PoolAdmission,
    StepPlan,
    StepResult,
)
from slipstream.record.record_file import (
    MAX_FILES,
    SUFFIX,
    Recording,
    StepRecord,
    describe_late,
    open_folder,
    write_private,
)

MAX_BYTES = 64 * 2**20  # of the plans and results in the ring
_PER_ROW = 40  # bytes of a planned row in the arrays of a plan and of its result
NUM_VALUES = 4  # values of a pooled result that are kept


class Recorder:
    """Has the interface of an executor; the core also gives it the results. `take` returns the recording at any time
    between two steps."""

    def __init__(self, executor: Executor, config: EngineConfig, max_bytes: int = MAX_BYTES) -> None:
        self._executor = executor
        self.config = config
        self._max_steps = config.record.num_steps
        self._max_bytes = max_bytes
        self._ring: deque[StepRecord] = deque()
        self._in_flight: deque[StepRecord] = deque()
        self._num_bytes = 0
        self._is_headless = False  # the head of the newest step is not launched
        self._before: dict[int, Admission | PoolAdmission] = {}  # rows in use at the start of the ring
        self._adapters: dict[int, AdapterLoad] = {}  # by slot: LoRA adapters on the device at the start of the ring
        self._exchanged = False
        every = config.record.every_mb
        self._writer = RecordWriter(every * 2**20) if every else None
        self._sources: dict[int, MaskSources] = {}  # by step: how to compute its masks again

    def launch(self, plan: StepPlan) -> None:
        ring, size = self._ring, _size(plan)
        self._is_headless = True
        step = StepRecord(plan, None, None, None, None, None, size)
        ring.append(step)
        self._in_flight.append(step)
        self._num_bytes += size
        while len(ring) > self._max_steps or (self._num_bytes > self._max_bytes and len(ring) > 1):
            self._evict()
        self._executor.launch(plan)

    def finish(self, late: DrawEdits | None = None) -> Handle:
        step = self._ring[-1]
        self._is_headless = False
        if late is not None:
            step.late = describe_late(late)
            if late.sources is not None and late.lengths is not None:
                self._sources[step.plan.step] = MaskSources(late.sources, late.lengths, late.bits.shape[1])
            step.size += (size := step.late.bits.nbytes)
            self._num_bytes += size
        return self._executor.finish(late)

    def committed(self, result: StepResult) -> None:
        """The result of the oldest step without one."""
        step = self._in_flight.popleft()
        step.tokens, step.counts, step.failed = result.tokens, result.counts, result.failed
        if result.logprobs is not None or result.prompt_logprobs is not None:
            # views of one buffer with the logprobs, which would stay in memory
            step.tokens, step.failed = result.tokens.copy(), result.failed.copy()
        if result.pooled:
            step.pooled = np.array([first_values(each) for each in result.pooled], np.float32)
        if self._writer is not None and self._writer.is_due(step.size):
            self._writer.write(self.take(committed=True))

    def free_queries(self, queries: tuple[int, ...]) -> None:
        self._executor.free_queries(queries)

    def close(self) -> None:
        self.clear()
        self._executor.close()

    def clear(self) -> None:
        """Drop all steps, and end the writer of files."""
        if self._writer is not None:
            self._writer.close()
        self._ring.clear()
        self._in_flight.clear()
        self._before.clear()
        self._adapters.clear()
        self._sources.clear()
        self._num_bytes = 0

    def weights_changed(self, *, from_files: bool) -> None:
        """The weights are exchanged, and no step is in flight: drop all steps, which ran with other weights.
        `from_files`: the new ones are those of the model's files."""
        assert not self._in_flight, f"weights were exchanged under {len(self._in_flight)} steps in flight"
        while self._ring:
            self._evict()
        self._exchanged = not from_files

    def take(self, failure: str | None = None, *, committed: bool = False) -> Recording:
        """The recording so far, with all masks, and without a step whose masks are not filled yet. It has fewer steps
        than the ring if their masks would take more than the bytes of the ring. `failure`: the error that ended the
        engine; `committed`: without steps in flight."""
        steps, before, adapters = list(self._ring), self._before, self._adapters
        if committed:
            steps = steps[: max(0, len(steps) - len(self._in_flight))]
        elif self._is_headless and failure is None:
            steps = steps[:-1]
        if self._sources:
            found = [self._sources.get(step.plan.step) for step in steps]
            sizes = [0 if own is None else own.num_bytes for own in found]
            num_bytes, first = self._num_bytes + sum(sizes), 0
            before, adapters = before.copy(), adapters.copy()
            while num_bytes > self._max_bytes and first < len(steps) - 1:
                num_bytes -= steps[first].size + sizes[first]
                _pass(steps[first].plan, before, adapters)
                first += 1
            steps = with_masks(steps[first:], self._sources)
        return Recording.of(
            self.config, list(before.values()), steps, failure, list(adapters.values()), exchanged=self._exchanged
        )

    def _evict(self) -> None:
        step = self._ring.popleft()
        self._num_bytes -= step.size
        self._sources.pop(step.plan.step, None)
        _pass(step.plan, self._before, self._adapters)


def _pass(plan: StepPlan, before: dict[int, Admission | PoolAdmission], adapters: dict[int, AdapterLoad]) -> None:
    """Update the admissions of the rows in use, and the adapters in slots, by a plan that is not kept."""
    if plan.adapters is not None:
        adapters.update((load.slot, load) for load in plan.adapters.loads)
    if len(plan.released):
        for row in plan.released.tolist():
            before.pop(row, None)
    if plan.admitted or plan.pooling is not None:
        for admission in plan.all_admitted:
            before[admission.row] = admission


def first_values(array: np.ndarray[Any, Any]) -> list[float]:
    """The first NUM_VALUES values of a pooled result; zeros where it has fewer."""
    found: list[float] = array.ravel()[:NUM_VALUES].tolist()
    return found + [0.0] * (NUM_VALUES - len(found))


def _size(plan: StepPlan) -> int:
    """About the number of bytes that a plan and its result take."""
    size = 1024 + _PER_ROW * len(plan.rows) + plan.tokens.nbytes
    if plan.embeds is not None:
        size += sum(part.nbytes for part in plan.embeds.values)
    if plan.images is not None:
        size += sum(each.patches.nbytes for each in plan.images.encodings)
    for admission in plan.admitted:
        size += 512 + (0 if admission.history is None else admission.history.nbytes)
    return size


# Masks of grammars in recordings: kept as references to their sources, and computed when a recording is taken.


class MaskSources:
    """Inputs from which the masks of one step can be computed again; see `Late.sources`."""

    __slots__ = ("sources", "lengths", "num_words")

    def __init__(self, sources: Sequence[MaskSource | None], lengths: Sequence[int], num_words: int) -> None:
        self.sources = sources
        self.lengths = lengths
        self.num_words = num_words  # of a mask

    @property
    def num_bytes(self) -> int:
        """Bytes of the masks."""
        return 4 * self.num_words * len(self.sources)

    def __iter__(self) -> Iterator[tuple[MaskSource | None, int]]:
        return zip(self.sources, self.lengths, strict=True)


def with_masks(steps: Sequence[StepRecord], sources: Mapping[int, MaskSources]) -> list[StepRecord]:
    """The steps with their masks. `sources`: by the number of the step; other steps have their masks already.

    A source computes all its masks in one pass, since it has to repeat the tokens of its request.
    """
    wanted: dict[int, tuple[MaskSource, list[int]]] = {}  # by identity of the source: numbers of tokens, ascending
    for step in steps:
        own = sources.get(step.plan.step)
        for source, length in () if own is None else own:
            if source is None:
                continue
            _, lengths = wanted.setdefault(id(source), (source, []))
            if not lengths or lengths[-1] != length:
                lengths.append(length)
    num_words = next((own.num_words for own in sources.values()), 0)
    masks: dict[tuple[int, int], Ints] = {}
    for source, lengths in wanted.values():
        for length, mask in zip(lengths, source.masks_at(lengths, num_words), strict=True):
            masks[id(source), length] = mask
    everything = np.full(num_words, -1, np.int32)

    def mask_of(source: MaskSource | None, length: int) -> Ints:
        return everything if source is None else masks[id(source), length]

    filled = []
    for step in steps:
        own, late = sources.get(step.plan.step), step.late
        if own is not None and late is not None:
            bits = np.array([mask_of(*each) for each in own], np.int32).reshape(-1, num_words)
            step = msgspec.structs.replace(step, late=msgspec.structs.replace(late, bits=bits))
        filled.append(step)
    return filled


# RecordWriter: writes the steps of a running engine to files, each time so many bytes were recorded.
#
# The core's thread copies references only; a thread of the writer encodes and writes. While it is busy, nothing is
# queued: the next file begins later.

log = logging.getLogger(__name__)


class RecordWriter:
    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: recorded between two files."""
        self._num_bytes = num_bytes
        self._recorded = 0  # since the last file
        self._num_files = 0
        self._pool = ThreadPoolExecutor(1, "slipstream-record")
        self._job: Future[None] | None = None

    def is_due(self, num_bytes: int) -> bool:
        """Adds recorded bytes. Returns whether a file is to be written now."""
        self._recorded += num_bytes
        return self._recorded >= self._num_bytes and (self._job is None or self._job.done())

    def write(self, recording: Recording) -> None:
        self._recorded = 0
        self._num_files += 1
        name = f"steps-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._num_files:06}{SUFFIX}"
        self._job = self._pool.submit(_write, recording, name)

    def close(self) -> None:
        """Returns when the last file is written."""
        self._pool.shutdown()


def _write(recording: Recording, name: str) -> None:
    try:
        settings = recording.config.record
        _write_newest(open_folder(settings.folder), name, recording.encode(redact=settings.redact))
    except Exception:  # a full disk must not end the engine
        log.exception("recorded steps could not be written to %s", name)


def _write_newest(folder: Path, name: str, data: bytes) -> Path:
    """Writes a file, and keeps as many others of its kind as there may be: this one too if the clock went back."""
    path = write_private(folder / name, data)
    others = [each for each in folder.glob(f"{name.partition('-')[0]}-*{SUFFIX}") if each != path]
    for old in sorted(others, key=_age)[: 1 - MAX_FILES]:
        old.unlink(missing_ok=True)
    return path


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # removed by another engine
        return 0.0, path.name


# Writes the recording of a failed engine to a file and logs its path.


def save_failure(recorder: Recorder, error: BaseException) -> Path | None:
    """Returns the file, or None if it could not be written: the failure of the engine matters more."""
    try:
        settings = recorder.config.record
        data = recorder.take(f"{type(error).__name__}: {error}").encode(redact=settings.redact)
        name = f"failure-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}"
        path = _write_newest(open_folder(settings.folder), name, data)
    except Exception:
        log.exception("the last steps of the engine could not be written to a file")
        return None
    log.error("the last steps of the engine are in %s; `slipstream replay` checks them", path)
    return path
