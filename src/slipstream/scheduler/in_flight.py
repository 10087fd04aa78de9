"""InFlight: the plans launched and not yet committed, and whom their results belong to.

A row may have changed hands by the time its result is seen. So each launched plan keeps the requests that sample in
it, with the number of the admission they sampled under, and those that pool in it; results are handed out by these
lists alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.request import Request, Status


@dataclass(frozen=True, slots=True)
class Launched:
    """One plan on its way: those that sample in it, in the plan's order."""

    step: int
    requests: list[Request]
    admissions: list[int]
    drawn: list[int] | None  # tokens each of them draws; None: one
    scored: list[tuple[Request, int, int]]  # prompts it scores: the first of their tokens, and how many
    chunks: list[tuple[Request, int, int]]  # requests that compute and do not sample, their admissions and lengths
    pooled: list[Request]  # those whose pooled result it brings, in the plan's order


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
        """`requests` sample in this step, and each has counted the tokens that it draws as pending."""
        admissions = [request.admission for request in requests]
        self._steps.append(Launched(step, requests, admissions, drawn, scored or [], chunks or [], pooled or []))

    def oldest(self) -> Launched:
        """The plan whose result is due, taken out."""
        assert self._steps, "a result came back while no plan is in flight"
        return self._steps.popleft()

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the account of placeholders: each request is owed exactly the tokens that are on their way."""
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
            assert (request.status is not Status.LEAVING) or id(request) in leaving, f"{request}: its result is lost"
            assert request.pending == owed[id(request)], f"{request}: {owed[id(request)]} tokens are in flight"
