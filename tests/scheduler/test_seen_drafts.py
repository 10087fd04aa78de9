"""Drafts that the host sees: rows have drafts while their text repeats, and lose little elsewhere."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from slipstream.scheduler.draft_length import DraftClasses, DraftLength

WRONG, RIGHT, NONE = 5, 7, -1  # first drafts; every row draws the token RIGHT


class Moment(NamedTuple):
    """What a row would find after one of its tokens."""

    is_matched: bool
    num_right: int  # leading drafts that are right


def text(rng: random.Random, length: int, *, runs: float, right: float, stray: float = 0.05) -> list[Moment]:
    """A text that begins to repeat earlier text with the probability `runs`, for 12 tokens. A draft of a run is right
    with the probability `right`; elsewhere there are stray matches, which are wrong."""
    moments: list[Moment] = []
    while len(moments) < length:
        if rng.random() < runs:
            for left in range(12, 0, -1):
                num = 0
                while num < left and rng.random() < right:
                    num += 1
                moments.append(Moment(True, num))
        else:
            moments.append(Moment(rng.random() < stray, 0))
    return moments[:length]


class Engine:
    """One row after another, with a step in flight while a plan is made."""

    def __init__(self, verify: float, max_drafts: int = 4, depth: int = 1, propose: float = 0.0) -> None:
        """Seconds of a step that verifies drafts, and further seconds of one that only proposes some."""
        self.length, self.classes = DraftLength(max_drafts, sees_drafts=True), DraftClasses(1, depth)
        self.verify, self.depth, self.propose = verify, depth, propose
        self.stall = 0.0  # seconds that the next step which only proposes drafts waits for the host
        self.admissions = 0
        self.num_verified = self.num_proposed = 0

    def run(self, moments: list[Moment]) -> float:
        """Tokens per second of a new request with this text, relative to steps without drafts of one second."""
        self.admissions += 1
        request = SimpleNamespace(row=0, admission=self.admissions, num_output=0)
        flight: deque[tuple[int, int, int | None, float]] = deque()
        at, time, proposed, self.num_verified, self.num_proposed = 0, 0.0, 0, 0, 0
        is_new = True
        while at < len(moments):
            num, before = 0, proposed
            if is_new or not self.length.skip():
                is_new = False
                numbers, proposed = self._choose(request)
                num = 0 if self.classes.is_spent(request) else numbers[self.classes.of(request)]
            else:
                proposed = 0
            accepted = min(num, moments[at].num_right) if before else 0
            took = self.verify if num else 1.0 + self.propose * (proposed > 0)
            if proposed and not num:
                took, self.stall = took + self.stall, 0.0
            time += took
            at += 1 + accepted
            draft = None
            if proposed:
                own = moments[min(at, len(moments) - 1)]
                draft = NONE if not own.is_matched else RIGHT if own.num_right else WRONG
            flight.append((num, accepted, draft, took))
            self.num_verified += num > 0
            self.num_proposed += proposed > 0
            if len(flight) > self.depth:
                self._commit(request, *flight.popleft())
        return len(moments) / time

    def _choose(self, request: Any) -> tuple[tuple[int, ...], int]:
        counts = self.classes.count([request])
        return self.length.choose(counts, lambda: self.classes.count_matched([request]))

    def _commit(self, request: Any, num: int, accepted: int, draft: int | None, took: float) -> None:
        self.length.measure(1 + num, took, only_proposes=draft is not None and not num)
        if num:
            (own,) = self.classes.add([request], [1 + num], [1 + accepted], self.length.cost(1, num))
            self.length.add({(own, num, accepted): 1})
        cost = 0.0 if draft is None or num else self.length.proposal_cost(1)
        self.classes.see([request], [[RIGHT] * (1 + accepted)], [] if draft is None else [[draft, draft]], cost)
        request.num_output += 1 + accepted


def rates(engine: Engine, make: Callable[[random.Random], list[Moment]], number: int = 30) -> list[float]:
    rng = random.Random(3)
    return [engine.run(make(rng)) for _ in range(number)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_text_that_repeats_in_parts_gains(depth: int) -> None:
    """A third of the text is in runs. Drafts in every step would lose."""
    engine = Engine(1.4, depth=depth)
    found = rates(engine, lambda rng: text(rng, 250, runs=0.04, right=0.85))
    assert sum(found[5:]) / len(found[5:]) > 1.1
    assert engine.num_verified < 100, "steps outside of runs are plain"
    always = Engine(1.4, depth=depth)
    always._choose = lambda request: ((4, 4, 4), 4)  # type: ignore[method-assign]
    assert sum(rates(always, lambda rng: text(rng, 250, runs=0.04, right=0.85))) / 30 < 1.05


@pytest.mark.parametrize("verify", [1.1, 1.4, 2.5])
@pytest.mark.parametrize("stray", [0.0, 0.3, 1.0])
def test_matches_that_are_wrong_cost_less_than_three_percent(verify: float, stray: float) -> None:
    engine = Engine(verify)
    found = rates(engine, lambda rng: text(rng, 250, runs=0.0, right=0.0, stray=stray))
    assert min(found[1:]) > 0.97


def test_proposals_that_cost_much_are_given_up() -> None:
    """There are matches, which are right, but too rarely to pay for the search."""
    engine = Engine(1.3, propose=0.05)
    found = rates(engine, lambda rng: text(rng, 250, runs=0.002, right=0.9, stray=0.02))
    assert min(found[2:]) > 0.97
    assert engine.num_proposed < 120


def test_the_first_proposal_may_wait_for_the_host() -> None:
    """One slow step says nothing about the time that proposals take: the request had no drafts until its end."""
    quick, slow = Engine(1.3), Engine(1.3)
    slow.stall = 30.0
    for engine in (quick, slow):
        engine.run(text(random.Random(3), 250, runs=0.04, right=0.9))
    assert slow.stall == 0.0 and slow.num_verified == quick.num_verified > 20


@pytest.mark.parametrize("verify", [1.2, 1.5])
def test_wrong_matches_after_repeated_text_cost_less_than_three_percent(verify: float) -> None:
    """A new request begins with the mean of all."""
    engine, rng = Engine(verify), random.Random(3)
    for _ in range(20):
        assert engine.run(text(rng, 250, runs=0.2, right=0.9)) > 1.2
        assert engine.run(text(rng, 250, runs=0.0, right=0.0, stray=0.5)) > 0.97


def test_acceptance_is_measured_without_verifying() -> None:
    """Rows of wrong matches rest. When the text changes they are watched, and the first verified step gains."""
    engine, rng = Engine(2.5), random.Random(3)
    for _ in range(5):
        engine.run(text(rng, 250, runs=0.0, right=0.0, stray=1.0))
    assert engine.num_verified <= 2
    assert 0 < engine.num_proposed < 100, "it proposes nothing most of the time"
    engine.run(text(rng, 250, runs=0.0, right=0.0, stray=0.0))
    gained = [engine.run(text(rng, 250, runs=1.0, right=0.95)) for _ in range(3)]
    assert gained[-1] > 1.3


def test_a_row_without_a_match_waits_for_one() -> None:
    """Its steps propose drafts, so that the step after a match can verify."""
    engine, rng = Engine(1.3), random.Random(3)
    for _ in range(5):
        engine.run(text(rng, 250, runs=0.04, right=0.9))
    request = SimpleNamespace(row=0, admission=99, num_output=0)
    engine._choose(request)
    engine.classes.see([request], [[RIGHT]], [[NONE, NONE]])
    engine.classes.see([request], [[RIGHT]], [[NONE, NONE]])
    numbers, proposed = engine._choose(request)
    assert not numbers[engine.classes.of(request)] and proposed == 4
    engine.classes.see([request], [[RIGHT]], [[RIGHT, RIGHT]])
    numbers, proposed = engine._choose(request)
    assert numbers[engine.classes.of(request)] == 4 == proposed


def test_one_token_of_a_suffix_is_no_match() -> None:
    """A suffix of one token gives one draft, which is mostly wrong."""
    engine, rng = Engine(1.3), random.Random(3)
    for _ in range(5):
        engine.run(text(rng, 250, runs=0.04, right=0.9))
    request = SimpleNamespace(row=0, admission=99, num_output=0)
    engine._choose(request)
    engine.classes.see([request], [[RIGHT]], [[WRONG, NONE]])
    assert not engine._choose(request)[0][engine.classes.of(request)]


def test_the_first_steps_of_an_engine_are_measured_before_drafts_rest() -> None:
    """A size that was measured once looked faster than sizes that never ran, so rows waited for the end of a trial."""
    length, classes = DraftLength(4, sees_drafts=True), DraftClasses(1)
    request: Any = SimpleNamespace(row=0, admission=1, num_output=0)
    num_plain, numbers = 0, (0,)
    while not any(numbers) and num_plain < 20:
        numbers, proposed = length.choose(classes.count([request]), lambda: classes.count_matched([request]))
        num_plain += 1
        length.measure(1, 0.005, only_proposes=proposed > 0)
        classes.see([request], [[RIGHT]], [[RIGHT, RIGHT]] if proposed else [])
    assert num_plain < 8
