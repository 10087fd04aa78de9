"""HostProcessors: the requests of a scheduler that have logits processors, and the edits of their next tokens.

As for grammars, a step is launched before the tokens of the step before it are known, and the edits come later, as
`DrawEdits`: the core first commits all older steps, so processors see the true tokens. Requests without processors
are not touched, and a step without such a request commits nothing early.

Processors that see tokens run here, while the device computes the forward. If those of a step take longer than it, the
slowest of its requests are slow from then on: they are planned only when their last token is known and a background
thread has run their processors, so they sit out steps of the others. The draws do not depend on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.base.errors import InvalidParams, SlipstreamError
from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import DrawBias, DrawEdits, LogitsEdit
from slipstream.params.processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.request_processors import RequestProcessors, RowEdit, Words

if TYPE_CHECKING:
    import torch


_NUM_THREADS = 2


class HostProcessors:
    def __init__(
        self,
        vocab_size: int,
        engine: Sequence[LogitsProcessor] = (),
        finished: threading.Event | None = None,
    ) -> None:
        """`engine`: the processors of all requests; `finished`: set when a background thread has run some."""
        self.vocab_size = vocab_size
        # of the newest plan: requests with processors that draw a token, and their rows
        self.drawing: list[tuple[Request, int]] = []
        self.held: list[Request] = []  # slow: a background thread runs their processors
        self._engine = engine
        self._batches = {
            number: ProcessorBatch(each)
            for number, each in enumerate(engine)
            if not isinstance(each, AdapterLogitsProcessor)
        }
        self._finished = finished or threading.Event()
        self._callers: set[int] = set()  # threads in which a processor of a request runs
        self._pool: ThreadPoolExecutor | None = None
        self._budget = 0.0  # seconds
        self._is_used = bool(engine)  # a request may have processors
        self._is_alone = False  # whether all requests that draw in the newest plan have processors

    # Submitting

    def open(self, requests: Sequence[Request]) -> None:
        """Give each sample of a new request its processors, which may have none; raises if one refuses it."""
        params = requests[0].params
        if not self._engine and not params.logits_processors:
            return
        self._is_used = True
        for request in requests:
            own = self._open_one(request, params)
            if own:
                request.processors = own

    def _open_one(self, request: Request, params: SamplingParams) -> RequestProcessors:
        own = RequestProcessors(request.tokens[: request.num_prompt], self._callers)
        for number, each in enumerate(self._engine):
            name = type(each).__name__
            with _Refusing(name, "extra_args"):  # what a request has for processors of the engine
                each.validate_params(params)
                if isinstance(each, AdapterLogitsProcessor):
                    is_scaled = each.needs == "logits" and bool(each.is_argmax_invariant())
                    call = None if is_scaled and params.is_greedy else each.new_req_logits_processor(params)
                    if call is not None:
                        own.add(name, call, needs=each.needs, is_scaled=is_scaled)
                elif each.is_needed_by(params):
                    is_invariant = self._batches[number].is_invariant
                    if not (is_invariant and params.is_greedy):
                        own.batches[number] = is_invariant
        for call in params.logits_processors or ():
            name = getattr(call, "__qualname__", type(call).__name__)
            with _Refusing(name, "logits_processors"):
                clone: Callable[[], Any] | None = getattr(call, "clone", None)
                own.add(
                    name, call if clone is None else clone(), needs=getattr(call, "needs", "logits"), is_scaled=False
                )
        return own

    # Planning and committing

    def plan(self, sampling: Sequence[Request]) -> None:
        """Records that these requests draw in the plan under construction."""
        if not self._is_used:
            return
        self.drawing = [(request, request.row) for request in sampling if request.processors is not None]
        self._is_alone = len(self.drawing) == len(sampling)
        for request, _ in self.drawing:
            if request.processors is not None and request.processors.is_slow:
                request.hold()

    def advance(self, requests: Sequence[Request]) -> None:
        """Handles requests whose drawn tokens are known now: slow processors run in the background."""
        for request in requests if self._is_used else ():
            own = request.processors
            if own is None or not request.held or request.pending or request.status is not Status.RUNNING:
                continue
            if not own.is_slow:
                request.release_hold()
            elif own.job is None:
                own.catch_up(request.tokens)
                own.job = self._run(own)
                self.held.append(request)

    def wake(self) -> None:
        """Let requests run whose processors have run."""
        for request in self.held[:]:
            own = request.processors
            assert own is not None
            if own.job is None or own.job.done() or request.status is not Status.RUNNING:
                self.held.remove(request)
                if request.status is Status.RUNNING:
                    request.release_hold()

    # Edits

    def add_to(self, late: DrawEdits, budget: float, sitting: Sequence[Request] = ()) -> DrawEdits:
        """The edits of the newest plan's rows, added to the masks of grammars. All older steps are committed.
        `budget`: seconds that processors may take without delaying the step. `sitting`: requests that sit it out."""
        drawing, self.drawing = self.drawing, []
        self._budget = budget
        left_out = {id(request) for request in sitting}
        live = [
            (request, row)
            for request, row in drawing
            if request.status is not Status.FINISHED and id(request) not in left_out
        ]
        edits: list[LogitsEdit] = []
        batched: dict[int, list[tuple[Request, int]]] = {}
        for request, row in live:
            own = request.processors
            assert own is not None
            own.catch_up(request.tokens)
            edits += own.logits_edits(row)
            for number in own.batches:
                batched.setdefault(number, []).append((request, row))
        edits += [batch.edit(batched[number]) for number, batch in self._batches.items() if number in batched]
        masks, bias = self._token_edits(live)
        rows, bits = _with_masks(late, masks) if masks else (late.rows, late.bits)
        offsets, sources = late.offsets, None if masks else late.sources
        if offsets is not None and len(rows) > len(offsets):  # rows with processors have no drafts
            offsets = np.concatenate([offsets, np.zeros(len(rows) - len(offsets), np.int32)])
        own_bias = _late_bias(bias) if bias else None
        return replace(late, rows=rows, bits=bits, bias=own_bias, edits=tuple(edits), offsets=offsets, sources=sources)

    def _token_edits(self, live: list[tuple[Request, int]]) -> tuple[dict[int, Words], dict[int, dict[int, float]]]:
        """Masks and biases by row, of processors that see tokens."""
        masks: dict[int, Words] = {}
        bias: dict[int, dict[int, float]] = {}
        times: list[tuple[float, RequestProcessors]] = []
        for request, row in live:
            own = request.processors
            if own is None or not own.by_tokens:
                continue
            edit, seconds = own.timed_edit(self.vocab_size) if own.job is None else own.job.result()
            if own.job is not None:
                own.is_slow = seconds > self._budget / 2
                own.job = None
            elif request.session is None:  # a grammar has its own reason to sit out
                times.append((seconds, own))
            if edit.mask is not None:
                masks[row] = edit.mask
            if edit.bias:
                bias[row] = edit.bias
        self._find_slow(times)
        return masks, bias

    def _find_slow(self, times: list[tuple[float, RequestProcessors]]) -> None:
        """Mark as many of the slowest requests as slow that the others stay within the budget together. In a step
        without other requests only those that exceed it alone: the rest would compete for the interpreter."""
        total = sum(seconds for seconds, _ in times)
        if total > self._budget:
            for seconds, own in sorted(times, key=lambda each: -each[0]):
                if total <= self._budget or (self._is_alone and seconds <= self._budget):
                    break
                own.is_slow = True
                total -= seconds

    def _run(self, own: RequestProcessors) -> Future[tuple[RowEdit, float]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, "slipstream-processor")
        future = self._pool.submit(own.timed_edit, self.vocab_size)
        future.add_done_callback(lambda _: self._finished.set())
        return future

    def is_calling(self) -> bool:
        """Whether a processor of a request runs in this thread."""
        return threading.get_ident() in self._callers

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class _Refusing:
    """Turns an exception of a processor at submission into a refusal of the request."""

    def __init__(self, name: str, param: str) -> None:
        """`param`: the parameter at fault."""
        self._name = name
        self._param = param

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, SlipstreamError):
            raise InvalidParams(
                f"the logits processor {self._name} refuses the request: {type(error).__name__}: {error}",
                param=self._param,
            ) from error


def _with_masks(late: DrawEdits, masks: dict[int, Words]) -> tuple[Any, Any]:
    """Rows and bits with these masks by row: a row of `late` is masked by both."""
    rows = late.rows.tolist()
    bits = late.bits.copy() if rows else late.bits
    for index, row in enumerate(rows):
        if row in masks:
            bits[index] &= masks[row].view(np.int32)
    known = set(rows)
    own = [row for row in masks if row not in known]
    if own:
        bits = np.concatenate([bits, np.stack([masks[row].view(np.int32) for row in own])])
    return np.array(rows + own, np.int32), bits


def _late_bias(bias: dict[int, dict[int, float]]) -> DrawBias:
    width = max(map(len, bias.values()))
    ids = np.zeros((len(bias), width), np.int32)
    values = np.zeros((len(bias), width), np.float32)
    for index, own in enumerate(bias.values()):
        ids[index, : len(own)] = list(own)
        values[index, : len(own)] = list(own.values())
    return DrawBias(np.fromiter(bias, np.int32, len(bias)), ids, values)


# ProcessorBatch: the requests of one batched LogitsProcessor, by their index in its batch.


class ProcessorBatch:
    """Indices are dense. A request keeps its index until it ends or is preempted, or until the last one moves to fill a
    gap. Changes are collected here and passed on with the next edit."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        self.is_invariant = bool(processor.is_argmax_invariant())
        self._requests: list[Request] = []  # by index

    def edit(self, drawing: Sequence[tuple[Request, int]]) -> LogitsEdit:
        """The edit of a step in which these requests of the processor draw, in these rows."""
        update = self._update([request for request, _ in drawing])
        row_of = {id(request): row for request, row in drawing}
        requests = [request for request, _ in drawing]
        processor = self.processor

        def run(logits: torch.Tensor) -> torch.Tensor:
            processor.update_state(update)
            return processor.apply(logits)

        def fail(error: Exception) -> None:
            for request in requests:
                assert request.processors is not None
                request.processors.fail(type(processor).__name__, error)

        rows = tuple(row_of.get(id(request), -1) for request in self._requests)
        return LogitsEdit(rows, run, fail, is_scaled=self.is_invariant, is_batched=True)

    def _update(self, drawing: list[Request]) -> BatchUpdate | None:
        requests = self._requests
        gaps = [index for index, request in enumerate(requests) if request.status is not Status.RUNNING]
        known = {id(request) for request in requests}
        new = [request for request in drawing if id(request) not in known]
        if not gaps and not new:
            return None
        added = []
        for request in new:
            own = request.processors
            assert own is not None
            if gaps:
                requests[index := gaps.pop(0)] = request
            else:
                index = len(requests)
                requests.append(request)
            added.append((index, request.params, own.prompt_ids, own.output_ids))
        removed, moved = tuple(gaps), []
        while gaps:
            last = len(requests) - 1
            request = requests.pop()
            if last == gaps[-1]:
                gaps.pop()
            else:
                requests[index := gaps.pop(0)] = request
                moved.append((last, index, MoveDirectionality.UNIDIRECTIONAL))
        return BatchUpdate(len(requests), removed, added, moved)
