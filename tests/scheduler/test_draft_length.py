"""The number of drafts per row, by simulated acceptance and step times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripted_bench import make_config
from slipstream.config.config import DraftConfig, SchedulerConfig
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.draft_length import MAX_PROBED, ClassCounts, DraftClasses, DraftLength
from slipstream.scheduler.drafting import DraftPlanner


class Simulation:
    """Rows whose drafts are accepted with some probability each, on a device with some seconds per step. With several
    probabilities the rows have them in turn."""

    def __init__(self, num_rows: int, max_drafts: int, seconds: Callable[[int], float], *accepts: float) -> None:
        self.length, self.classes, self.seconds = DraftLength(max_drafts), DraftClasses(num_rows), seconds
        self.rows: list[Any] = [new_request(row) for row in range(num_rows)]
        self.num_rows, self.accepts = num_rows, accepts
        self.counted: list[Any] = []
        self.rng = np.random.default_rng(1)
        self.tokens, self.time, self.proposed = 0, 0.0, 0
        self.chosen: list[float] = []  # mean of all rows
        self.by_row = np.zeros(num_rows)  # drafts of all steps
        self.late: dict[int, float] = {}  # by positions of a row: what its first step takes longer

    def run(self, steps: int) -> float:
        """Returns tokens per second of these steps, relative to steps without drafts."""
        tokens = time = 0.0
        for _ in range(steps):
            rests = self.rows == self.counted and self.length.skip()  # as the planner does
            self.counted = list(self.rows)
            numbers, proposed = ((0, 0, 0), 0) if rests else self.length.choose(self.classes.count(self.rows))
            wanted = [0 if self.classes.is_spent(row) else numbers[self.classes.of(row)] for row in self.rows]
            num = np.array(wanted, np.int32)
            if self.length.probed:
                rows = self.classes.take_least_tried(self.rows, self.length.probed, self.length.num_probed)
                left_out = [self.classes.of(row) in self.length.probed and row.row not in rows for row in self.rows]
                num[left_out] = 0
            self.chosen.append(float(num.mean()))
            self.by_row += num
            drafts = np.arange(self.length.max_drafts) < np.minimum(num, self.proposed)[:, None]
            right = self.rng.random(drafts.shape) < np.resize(self.accepts, self.num_rows)[:, None]
            accepted = np.cumprod(drafts & right, 1, dtype=np.int32).sum(1)
            self.proposed = proposed
            positions = self.num_rows + int(num.sum())
            took = self.seconds(positions)
            if num.any() or not proposed:  # as the pacer does
                self.length.measure(positions, took + self.late.pop(positions // self.num_rows, 0.0))
            if num.any():
                drawn, counts = (1 + num).tolist(), (1 + accepted).tolist()
                cost = self.length.cost(self.num_rows, int(num.sum()))
                classes = self.classes.add(self.rows, drawn, counts, cost)
                seen = Counter(zip(classes, num.tolist(), accepted.tolist(), strict=True))
                self.length.add({key: rows for key, rows in seen.items() if key[1]})
            for row, more in zip(self.rows, accepted.tolist(), strict=True):
                row.num_output += 1 + more
            tokens, time = tokens + self.num_rows + accepted.sum(), time + took
        return tokens / time * self.seconds(self.num_rows) / self.num_rows


def new_request(row: int, admission: int | None = None) -> Any:
    return SimpleNamespace(row=row, admission=row if admission is None else admission, num_output=0)


def plain(num_rows: int) -> ClassCounts:
    """Rows before any measurement."""
    return ClassCounts((0, 0, num_rows), (0, 0, num_rows), (0.6, 0.6, 0.6))


def memory_bound(positions: int) -> float:
    return 1.0 + 0.002 * positions


def compute_bound(positions: int) -> float:
    return 0.1 + 0.01 * positions


def between(positions: int) -> float:
    return 1.0 + 0.01 * positions


def test_right_drafts_on_an_idle_device_are_as_long_as_allowed() -> None:
    simulation = Simulation(1, 6, memory_bound, 1.0)
    assert simulation.run(400) > 6.5
    assert simulation.chosen[-100:].count(6) >= 98


@pytest.mark.every_second("num_rows", "seconds")
@pytest.mark.parametrize("num_rows", [1, 16, 200])
@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
def test_wrong_drafts_cost_less_than_three_percent(num_rows: int, seconds: Callable[[int], float]) -> None:
    simulation = Simulation(num_rows, 8, seconds, 0.0)
    simulation.run(300)
    assert simulation.run(3000) > 0.97
    assert 0 < sum(num > 0 for num in simulation.chosen[300:]) < 60, "it should still try from time to time"


@pytest.mark.parametrize("accepts", [0.2, 0.5, 0.8])
def test_a_large_batch_loses_nothing_and_a_small_one_gains(accepts: float) -> None:
    large = Simulation(256, 4, compute_bound, accepts)
    large.run(300)
    assert large.run(2000) > 0.97
    small = Simulation(2, 4, memory_bound, accepts)
    small.run(300)
    assert small.run(2000) > 1 + 0.8 * accepts


def test_drafts_on_a_device_whose_times_are_not_known() -> None:
    length = DraftLength(4)
    assert [length.choose(plain(2))[0] for _ in range(12)][-1][2] == 4


def test_some_drafts_where_later_ones_are_rarely_right() -> None:
    simulation = Simulation(8, 8, lambda positions: 1 + 0.03 * positions, 0.5)
    simulation.run(500)
    assert 0 < np.median(simulation.chosen[-200:]) < 5


def test_a_trial_has_drafts_for_some_rows_only() -> None:
    config = SchedulerConfig(
        max_num_seqs=600, max_num_batched_tokens=8192, max_model_len=64, max_waiting=1, chunked_prefill=True, depth=1,
        seed=0, staged_ints=0, drafts=DraftConfig("mtp", 4), drafts_per_step=4096,
    )  # fmt: skip
    planner = DraftPlanner(config, CacheManager(make_config(page_size=16, num_pages=9)))
    length = planner.length
    assert length is not None
    length.measure(600, 1.0)
    rows = [new_request(row) for row in range(600)]
    planner.begin_plan(rows)
    planner.counts.add(rows, [5] * 600, np.ones(600, np.int32))
    tried: list[set[int]] = []
    for _ in range(100):
        if planner.begin_plan(rows):
            tried.append({request.row for request in rows if planner._wanted(request)})
            drawn = [1 + planner._wanted(request) for request in rows]
            assert 600 < sum(drawn) <= 600 + MAX_PROBED
            planner.counts.add(rows, drawn, np.ones(600, np.int32))
    assert len(tried) == 8
    assert len(set.union(*tried)) == 600, "rows that were tried least are next"


def test_the_first_step_of_a_size_may_take_long() -> None:
    """The host captures it, and the device waits."""
    simulation = Simulation(1, 4, memory_bound, 0.8)
    simulation.late = dict.fromkeys(range(2, 6), 100.0)
    assert simulation.run(40) > 1.8


def test_proposals_are_no_part_of_a_step_without_drafts() -> None:
    """A draft model takes several passes to propose: a step that proposes says nothing about one without drafts."""
    length = DraftLength(4)
    assert [length.choose(plain(2)) for _ in range(2)] == [((0, 0, 0), 0)] * 2


def test_prompts_alone_are_not_drafted_while_drafts_do_not_pay() -> None:
    simulation = Simulation(4, 4, memory_bound, 0.0)
    assert simulation.length.choose(plain(0)) == ((0, 0, 0), 4)
    simulation.run(300)
    assert simulation.length.choose(plain(0)) == ((0, 0, 0), 0)


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    simulation = Simulation(4, 4, memory_bound, 0.0)
    simulation.run(2000)
    assert max(simulation.chosen[-20:]) == 0 or simulation.chosen[-200:].count(0) > 150
    simulation.accepts = (0.9,)
    simulation.run(1500)
    assert np.mean(simulation.chosen[-100:]) > 3


def test_rows_that_accept_drafts_have_them_beside_rows_that_do_not() -> None:
    """Drafts for all rows would not pay."""
    simulation = Simulation(64, 4, between, 0.0, 0.0, 0.0, 0.9)
    simulation.run(1000)
    before = simulation.by_row.copy()
    assert simulation.run(1000) > 1.15
    drafts = (simulation.by_row - before).reshape(-1, 4).sum(0)
    assert drafts[3] > 16 * 3500 and drafts[:3].max() < 16 * 200


def test_a_row_that_becomes_predictable_is_noticed_among_others() -> None:
    simulation = Simulation(64, 4, between, 0.0, 0.0, 0.0, 0.9)
    simulation.run(500)
    simulation.accepts = (0.0, 0.9, 0.0, 0.9)
    simulation.run(2500)
    assert simulation.run(500) > 1.3


def test_a_new_request_does_not_inherit_the_class_of_its_row() -> None:
    simulation = Simulation(8, 4, memory_bound, 0.0, 1.0)
    simulation.run(200)
    classes = simulation.classes
    assert [classes.of(row) for row in simulation.rows] == [0, 2] * 4
    simulation.rows[0] = new_request(0, 100)
    assert sum(classes.count(simulation.rows).num_new) == 1
    assert classes.of(simulation.rows[0]) > 0, "it begins with the mean of all rows"


def test_a_new_request_is_tried_soon() -> None:
    """Trials have become rare, and the request has another kind of text."""
    simulation = Simulation(1, 4, memory_bound, 0.0)
    simulation.run(3000)
    simulation.rows[0] = new_request(0, 100)
    simulation.accepts = (0.9,)
    assert simulation.run(60) > 2.5


def test_requests_of_one_text_after_another_cost_less_than_three_percent() -> None:
    simulation = Simulation(4, 4, between, 0.0)
    simulation.run(200)
    total = 0.0
    for number in range(100):
        simulation.rows[number % 4] = new_request(number % 4, 10 + number)
        total += simulation.run(10)
    assert total > 97.0


@pytest.mark.parametrize("verify", [1.3, 1.5])
def test_free_text_between_repeated_text_costs_less_than_three_percent(verify: float) -> None:
    """A new request begins with the mean of all, and learns that its drafts are wrong by steps that cost time."""
    simulation = Simulation(1, 4, lambda positions: 1.0 if positions == 1 else verify, 0.0)
    rates: dict[float, list[float]] = {0.0: [], 0.7: []}
    for number in range(60):
        simulation.rows[0] = new_request(0, number)
        simulation.accepts = (0.7 if number % 3 else 0.0,)
        rates[simulation.accepts[0]].append(simulation.run(128 if number % 3 == 0 else 60))
    assert min(rates[0.0][1:]) > 0.97
    assert np.mean(rates[0.7]) > 1.2, "rows that repeat their input still have drafts"


def test_a_new_request_is_tried_where_a_step_with_drafts_takes_twice_as_long() -> None:
    """A trial of four steps would take more time than is saved up."""
    simulation = Simulation(1, 8, lambda positions: 1.0 if positions == 1 else 2.0, 0.0)
    simulation.run(3000)
    simulation.rows[0] = new_request(0, 100)
    simulation.run(8)
    assert any(simulation.chosen[-8:])


def test_trials_take_a_bounded_share_of_the_time() -> None:
    simulation = Simulation(1, 4, lambda positions: 1.0 if positions == 1 else 1.6, 0.9)
    simulation.run(100)
    simulation.accepts = (0.0,)
    simulation.rows[0] = new_request(0, 1)
    assert simulation.run(200) > 0.975


def test_a_row_that_lost_too_much_has_no_drafts_beside_rows_that_gain() -> None:
    classes = DraftClasses(2)
    rows = [new_request(0), new_request(1)]
    classes.count(rows)
    for _ in range(4):
        classes.add(rows, [5, 5], [1, 5], cost=0.1)
    assert classes.count(rows).num_spent == 1
    assert [classes.is_spent(row) for row in rows] == [True, False]
    assert classes.take_least_tried(rows, range(3), 2) == {1}
    rows[0].num_output = 100
    assert classes.count(rows).num_spent == 0, "it may lose more as it grows"


def test_rows_that_never_have_drafts_leave_the_trials_to_others() -> None:
    """As those with a logits processor: no trial ends with drafts of theirs."""
    classes, length = DraftClasses(2), DraftLength(4)
    for positions, seconds in ((2, 1.0), (4, 1.2), (8, 1.3)):
        for _ in range(3):
            length.measure(positions, seconds)
    rows = [new_request(0), new_request(1)]
    classes.count(rows)
    for _ in range(20):
        length.add({(classes.add([rows[1]], [4], [1], cost=0.01)[0], 3, 0): 1})
    tried = [set[int]()]
    for _ in range(600):
        if length.skip():
            continue
        length.choose(classes.count(rows))
        if length.probed:
            tried.append(classes.take_least_tried(rows, length.probed, length.num_probed))
    assert sum(chosen == {0} for chosen in tried) <= 12
    assert {0, 1} in tried[-40:]
