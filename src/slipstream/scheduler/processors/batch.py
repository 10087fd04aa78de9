"""ProcessorBatch: the requests of one batched LogitsProcessor, by their index in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import LogitsEdit
from slipstream.params.processors import BatchUpdate, LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    import torch


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
