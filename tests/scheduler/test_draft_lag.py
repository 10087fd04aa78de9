"""A draft model that runs in some plans only: whenever a row has drafts, it has computed all positions before them.

The scripted device also keeps, for each slot, the tokens from which a draft model computed its entry. An entry is right
if those before it were right when it was computed.
"""

from __future__ import annotations

import random

import pytest

from scripted import ScriptedExecutor
from scripted_bench import Bench
from slipstream.contracts.request import NEVER
from slipstream.contracts.step import StepPlan, StepResult
from slipstream.scheduler import drafting
from slipstream.scheduler.cache.manager import DraftGaps
from slipstream.scheduler.draft_length import NUM_CLASSES
from slipstream.scheduler.drafting import DraftLag


class DraftedExecutor(ScriptedExecutor):
    """A scripted device with a draft model."""

    entries: dict[tuple[int, int, int], tuple[int, ...]]  # by group, page and offset
    num_caught_up = num_checked = 0

    def _update_pages(self, plan: StepPlan) -> None:
        super()._update_pages(plan)
        for group, source, target in plan.copies.tolist():
            for offset in range(self.pages.page_size):
                self.entries[group, target, offset] = self.entries.get((group, source, offset), ())

    def _slots(self, row: int, position: int) -> list[tuple[int, int, int]]:
        entry, offset = divmod(position, self.pages.page_size)
        return [(group, table[entry], offset) for group, table in enumerate(self.rows[row].tables)]

    def _tokens(self, row: int, length: int) -> tuple[int, ...]:
        slots = [self._slots(row, position)[0] for position in range(length)]
        # the host's length is an upper bound while drafts are in flight: the last positions may hold nothing yet
        return tuple(self.pages.slots[group].get((page, offset), (-1,))[0] for group, page, offset in slots)

    def _is_right(self, row: int, length: int) -> bool:
        tokens = self._tokens(row, length)
        return all(
            self.entries.get(slot) == tokens[: position + 1]
            for position in range(length)
            for slot in self._slots(row, position)
        )

    def _compute(self, row: int, first: int, num: int) -> None:
        for position in range(first, first + num):
            tokens = self._tokens(row, position + 1) if self._is_right(row, position) else ()
            for slot in self._slots(row, position):
                self.entries[slot] = tokens

    def _sample(self, plan: StepPlan) -> StepResult:
        assert plan.catch_up is not None
        assert not len(plan.catch_up) or plan.num_proposed
        for row, first, num in plan.catch_up.tolist():
            self._compute(row, first, num)
            self.num_caught_up += 1
        drawn = []
        for row, num_drawn in zip(plan.rows.tolist(), plan.num_drawn.tolist(), strict=True):
            if num_drawn > 1:
                assert self._is_right(row, self.rows[row].length - num_drawn), f"row {row} has drafts and lacks entries"
                self.num_checked += 1
            drawn.append((row, self.rows[row].length - num_drawn, num_drawn))
        if plan.num_proposed:  # before the draw: then slots of rejected drafts are no longer known
            for row, first, num_drawn in drawn:
                self._compute(row, first, num_drawn)
        return super()._sample(plan)


class Switched:
    """Replaces `DraftLength`: drafts are on or off for some plans in turn."""

    probed = ()

    def __init__(self, rng: random.Random, num_drafts: int, *, is_resting: bool) -> None:
        self.rng, self.num_drafts, self.is_resting = rng, num_drafts, is_resting
        self.left, self.proposes = 0, True

    def skip(self) -> bool:
        return False

    def choose(self, counts: object, count_matched: object) -> tuple[tuple[int, ...], int]:
        had_proposed = self.proposes
        if not self.left:
            self.left, self.proposes = self.rng.randint(1, 6), not self.proposes
        self.left -= 1
        number = self.num_drafts if had_proposed and self.proposes else 0
        return (number,) * NUM_CLASSES, self.num_drafts if self.proposes else 0

    def add(self, seen: object) -> None:
        pass

    def cost(self, num_rows: int, num_drafts: int) -> float:
        return 0.0


def drafted_bench(rng: random.Random, num_drafts: int = 3, *, is_resting: bool = False, **options: object) -> Bench:
    bench = Bench(num_drafts=num_drafts, **options)  # type: ignore[arg-type]
    bench.executor.__class__ = DraftedExecutor
    bench.executor.entries = {}  # type: ignore[attr-defined]
    planner = bench.scheduler.drafts
    bench.cache.draft_gaps = DraftGaps(len(bench.cache.groups), bench.cache.page_size)
    planner.lag = DraftLag(bench.cache.draft_gaps, bench.scheduler.config.max_num_batched_tokens)
    planner.length = Switched(rng, num_drafts, is_resting=is_resting)  # type: ignore[assignment]
    return bench


@pytest.mark.parametrize("seed", range(24))
def test_rows_with_drafts_lack_no_entries(seed: int) -> None:
    """Over shared prefixes, samples of one prompt, chunks, preemption and steps in flight."""
    rng = random.Random(seed)
    bench = drafted_bench(
        rng,
        depth=seed % 3,
        page_size=rng.choice([2, 4]),
        num_pages=rng.choice([24, 64]),
        num_groups=rng.choice([1, 2]),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        prefix_caching=seed % 4 > 0,
        draft_seed=seed,
    )
    shared = [rng.randrange(90) for _ in range(14)]
    for _ in range(3):
        for _ in range(4):
            prompt = shared[: rng.randint(0, 14)] + [rng.randrange(90) for _ in range(rng.randint(1, 5))]
            bench.submit(prompt, n=rng.choice([1, 1, 2]), max_tokens=rng.randint(1, 16), seed=seed)
            bench.step()
            if rng.random() < 0.5:
                bench.preempt_any(rng)
        bench.run()
    assert bench.scheduler.num_preemptions
    for request in bench.requests:
        bench.check_tokens(request)
    executor = bench.executor
    assert isinstance(executor, DraftedExecutor) and executor.num_caught_up and executor.num_checked


def test_a_request_that_draws_one_token_costs_the_draft_model_nothing_while_drafts_are_off() -> None:
    bench = drafted_bench(random.Random(1))
    bench.scheduler.drafts.length = None
    bench.scheduler.drafts.num_drafts = bench.scheduler.drafts.num_proposed = 0
    (request,) = bench.submit([*range(20)], max_tokens=6)
    bench.run()
    assert all(plan.catch_up is not None and not len(plan.catch_up) for plan in bench.plans)
    assert request.drafted != NEVER


@pytest.mark.parametrize(("sizes", "expected"), [((12, 13, 30), [20, 20, 18, 0]), ((30,), [30, 0, 0, 0])])
def test_a_trial_computes_few_tokens_or_one_request(
    sizes: tuple[int, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "TRIAL_TOKENS", 20)
    bench = drafted_bench(random.Random(1), is_resting=True)
    planner = bench.scheduler.drafts
    length, planner.length = planner.length, None
    planner.num_drafts = planner.num_proposed = 0
    for size in sizes:
        bench.submit([size, *range(size - 1)], max_tokens=20)
    bench.step()
    assert isinstance(length, Switched)
    planner.length, length.proposes, length.left = length, True, 100
    planned = []
    for _ in expected:
        plan = bench.plan()
        assert plan is not None and plan.catch_up is not None
        planned.append(int(plan.catch_up[:, 2].sum()))
        bench.commit()
    assert planned == expected
