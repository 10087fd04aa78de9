"""InFlight: the plans that are launched and not committed, and the requests that their results belong to.

A row may have another owner by the time its result arrives. So each launched plan keeps the requests that draw tokens
in it, with their admission numbers, and the requests that are pooled in it. Results are assigned by these lists only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import StepResult


@dataclass(frozen=True, slots=True)
class Launched:
    """One plan in flight. `requests` are those that draw tokens, in the plan's order."""

    step: int
    requests: list[Request]
    admissions: list[int]
    drawn: list[int] | None  # number of tokens that each request draws; None: one each
    scored: list[tuple[Request, int, int]]  # requests with scored prompt tokens, the first of them, how many
    chunks: list[tuple[Request, int, int]]  # requests that draw nothing, their admissions and lengths
    pooled: list[Request]  # requests whose pooled result is part of the result, in the plan's order
    sitting: list[Request] = field(default_factory=list)  # requests whose draws are dropped: see `SitOut`

    def without_sitting(self, result: StepResult) -> tuple[list[int] | None, StepResult]:
        """`drawn`, and a result in which the requests that sit out have accepted nothing."""
        if not self.sitting:
            return self.drawn, result
        counts = np.ones(len(self.requests), np.int32) if result.counts is None else result.counts.copy()
        failed = result.failed.copy()
        sitting = {id(request) for request in self.sitting}
        for index, request in enumerate(self.requests):
            if id(request) in sitting:
                counts[index], failed[index] = 0, False
            elif result.counts is None and failed[index]:
                counts[index] = 0
        return self.drawn or [1] * len(self.requests), replace(result, counts=counts, failed=failed)


class InFlight:
    def __init__(self) -> None:
        self._steps: deque[Launched] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(
        self,
        step: int,
        requests: list[Request],
        drawn: list[int] | None = None,
        scored: list[tuple[Request, int, int]] | None = None,
        chunks: list[tuple[Request, int, int]] | None = None,
        pooled: list[Request] | None = None,
    ) -> None:
        """`requests` draw tokens in this step, and have counted them as pending."""
        admissions = [request.admission for request in requests]
        self._steps.append(Launched(step, requests, admissions, drawn, scored or [], chunks or [], pooled or []))

    def oldest(self) -> Launched:
        """Remove and return the plan whose result arrives next."""
        assert self._steps, "a result came back while no plan is in flight"
        return self._steps.popleft()

    def sit_out(self, step: int, requests: Sequence[Request]) -> None:
        """These requests draw nothing in this step, which is launched."""
        next(launched for launched in self._steps if launched.step == step).sitting.extend(requests)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that each request's `pending` equals the number of its tokens in flight."""
        owed: Counter[int] = Counter()
        for launched in self._steps:
            drawn = launched.drawn or [1] * len(launched.requests)
            for request, admission, num in zip(launched.requests, launched.admissions, drawn, strict=True):
                owed[id(request)] += num
                assert request.status is not Status.RUNNING or request.admission == admission, (
                    f"{request} was admitted again while a token of admission {admission} is in flight"
                )
        leaving = {id(request) for launched in self._steps for request in launched.pooled}
        for request in requests:
            assert (request.status is not Status.DRAINING) or id(request) in leaving, f"{request}: its result is lost"
            assert request.pending == owed[id(request)], f"{request}: {owed[id(request)]} tokens are in flight"
