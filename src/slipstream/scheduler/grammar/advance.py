"""GrammarAdvancer: the effects of grammars on requests: compiled or wrong ones, complete ones, forced tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason, Request, Status, WaitFor
from slipstream.contracts.step import StepResult
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.in_flight import Launched
from slipstream.scheduler.lifecycle import RequestLifecycle
from slipstream.scheduler.step_outputs import refusal
from slipstream.scheduler.stopping import check_stop
from slipstream.scheduler.waiting import WaitingQueue

MIN_APPENDED = 3
"""Forced tokens that are appended at once. Appending fewer saves no step: the request sits one out."""
ROWS_PER_SAVED_STEP = 8
"""A step with a chunk takes longer for all of its rows. So for so many rows, one more of the request's steps must be
saved."""


class GrammarAdvancer:
    def __init__(self, constraints: Constraints, waiting: WaitingQueue, lifecycle: RequestLifecycle) -> None:
        self._constraints = constraints
        self._waiting = waiting
        self._lifecycle = lifecycle
        self._num_rows = 0  # that drew in the step committed last
        self._deferred: list[Request] = []  # of the step committed last: threads still advance their grammars

    def take_compiled(self) -> Iterator[Output]:
        """Make requests ready whose grammar is compiled, refuse those whose grammar is wrong, and let requests run
        whose masks are filled."""
        for requests, error in self._constraints.take_compiled():
            for request in requests:
                if error is None:
                    self._waiting.ready(request, WaitFor.GRAMMAR)
                else:
                    self._lifecycle.finish(request)
                    yield refusal(request.id, error, request.sample)
        yield from self._apply(self._constraints.settle(self._constraints.wake()))

    def begin(self, launched: Launched, result: StepResult) -> None:
        """The result is committed next: what threads can do meanwhile begins."""
        self._num_rows = len(launched.requests)
        self._constraints.begin(launched, result)

    def advance(self, requests: Sequence[Request]) -> Iterator[Output]:
        """`requests` drew tokens in the step that was just committed. Ends those whose grammar is complete, and appends
        forced tokens. While threads fill masks, this is left to `advance_deferred`."""
        self._constraints.processors.advance(requests)
        own = [each for each in requests if each.session is not None]
        if self._constraints.is_filling:
            self._deferred = own
        else:
            yield from self._advance(own)

    def advance_deferred(self, *, wait: bool) -> list[Output]:
        """The outputs of requests whose grammars threads have advanced. Without `wait`: none while the threads run."""
        if not self._deferred or not (wait or self._constraints.is_filled):
            return []
        deferred, self._deferred = self._deferred, []
        return list(self._advance(deferred))

    def _advance(self, requests: Sequence[Request]) -> Iterator[Output]:
        yield from self._apply(
            self._constraints.advance([each for each in requests if each.status is not Status.FINISHED])
        )

    def _apply(self, changed: Sequence[Request]) -> Iterator[Output]:
        """`changed`: requests whose grammar is complete or forces tokens."""
        for request in changed:
            session = request.session
            assert session is not None
            if session.is_complete:
                self._lifecycle.finish(request)
                yield Output(request.id, request.sample, [], None, FinishReason.STOP, None, request.num_cached)
            elif session.forced and _can_append(request):
                num_saved, num_wanted = len(session.forced), self._num_rows // ROWS_PER_SAVED_STEP
                if not request.pending:
                    if num_saved >= num_wanted:
                        yield self._append(request, session.forced)
                elif num_saved > max(MIN_APPENDED - 1, num_wanted + 1):
                    request.hold()  # the first of them is being drawn; the others are appended when it is committed

    def _append(self, request: Request, forced: list[int]) -> Output:
        """Append tokens that the grammar forces: they are computed as one chunk instead of one step each."""
        assert request.session is not None
        self._waiting.charge(request, request.computed - request.num_known)
        new = forced[: request.max_length - len(request.tokens)]
        request.know_more(new)
        num_kept, reason, stop = check_stop(request, len(new))
        if reason is None:
            request.session.take(new)
            reason = FinishReason.STOP if request.session.is_complete else None
        elif num_kept < len(new):
            del request.tokens[num_kept - len(new) :]
            new = new[:num_kept]
        if reason is not None:
            self._lifecycle.finish(request)
        elif len(request.tokens) > request.short_limit:
            self._lifecycle.requeue(request)
        return Output(request.id, request.sample, new, None, reason, stop, request.num_cached)


def _can_append(request: Request) -> bool:
    is_free = request.params.can_append and request.processors is None
    # a row that sat out the step of its last known token computes that one first
    return request.status is Status.RUNNING and is_free and request.computed >= request.num_known
