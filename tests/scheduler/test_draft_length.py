"""The number of drafts per row, by simulated acceptance and step times."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from scripted import make_config
from slipstream.config.config import SchedulerConfig
from slipstream.config.draft_config import DraftConfig
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.draft_length import MAX_PROBED, DraftLength
from slipstream.scheduler.drafting import DraftPlanner


class Simulation:
    """Rows whose drafts are accepted with some probability each, on a device with some seconds per step."""

    def __init__(self, num_rows: int, max_drafts: int, seconds: Callable[[int], float], accepts: float) -> None:
        self.length, self.num_rows, self.seconds, self.accepts = DraftLength(max_drafts), num_rows, seconds, accepts
        self.rng = random.Random(1)
        self.tokens, self.time, self.proposed = 0, 0.0, 0
        self.chosen: list[int] = []
        self.late: dict[int, float] = {}  # by positions of a row: what its first step takes longer

    def run(self, steps: int) -> float:
        """Returns tokens per second of these steps, relative to steps without drafts."""
        tokens = time = 0.0
        for _ in range(steps):
            num, proposed = self.length.choose(self.num_rows)
            self.chosen.append(num)
            counts = []
            for _ in range(self.num_rows):
                accepted = 0
                while accepted < min(num, self.proposed) and self.rng.random() < self.accepts:
                    accepted += 1
                counts.append(1 + accepted)
            self.proposed = proposed
            took = self.seconds(self.num_rows * (1 + num))
            if num or not proposed:  # as the pacer does
                self.length.measure(self.num_rows * (1 + num), took + self.late.pop(1 + num, 0.0))
            if num:
                self.length.add([1 + num] * self.num_rows, np.array(counts, np.int32))
            tokens, time = tokens + sum(counts), time + took
        return tokens / time * self.seconds(self.num_rows) / self.num_rows


def memory_bound(positions: int) -> float:
    return 1.0 + 0.002 * positions


def compute_bound(positions: int) -> float:
    return 0.1 + 0.01 * positions


def test_right_drafts_on_an_idle_device_are_as_long_as_allowed() -> None:
    simulation = Simulation(1, 6, memory_bound, 1.0)
    assert simulation.run(400) > 6.5
    assert simulation.chosen[-100:].count(6) >= 98


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
    assert [length.choose(2)[0] for _ in range(12)][-1] == 4


def test_some_drafts_where_later_ones_are_rarely_right() -> None:
    simulation = Simulation(8, 8, lambda positions: 1 + 0.03 * positions, 0.5)
    simulation.run(500)
    assert 0 < np.median(simulation.chosen[-200:]) < 5


def test_a_trial_has_drafts_for_some_rows_only() -> None:
    config = SchedulerConfig(
        max_num_seqs=600, max_num_batched_tokens=8192, max_model_len=64, max_waiting=1, chunked_prefill=True, depth=1,
        seed=0, staged_ints=0, drafts=DraftConfig("ngram", 4), drafts_per_step=4096,
    )  # fmt: skip
    planner = DraftPlanner(config, CacheManager(make_config(page_size=16, num_pages=9)))
    length = planner.length
    assert length is not None
    length.measure(600, 1.0)
    length.add([5] * 600, np.ones(600, np.int32))
    num_drafts = set()
    for _ in range(100):
        planner.begin_plan(600)
        num_drafts.add((bool(planner.num_drafts), planner._left))
    assert num_drafts == {(False, 2400), (True, MAX_PROBED)}


def test_the_first_step_of_a_size_may_take_long() -> None:
    """The host captures it, and the device waits."""
    simulation = Simulation(1, 4, memory_bound, 0.8)
    simulation.late = dict.fromkeys(range(2, 6), 100.0)
    assert simulation.run(40) > 1.8


def test_proposals_are_no_part_of_a_step_without_drafts() -> None:
    """A draft model takes several passes to propose: a step that proposes says nothing about one without drafts."""
    length = DraftLength(4)
    plain = [length.choose(2) for _ in range(2)]
    assert plain == [(0, 0), (0, 0)]


def test_prompts_alone_are_not_drafted_while_drafts_do_not_pay() -> None:
    simulation = Simulation(4, 4, memory_bound, 0.0)
    assert simulation.length.choose(0) == (0, 4)
    simulation.run(300)
    assert simulation.length.choose(0) == (0, 0)


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    simulation = Simulation(4, 4, memory_bound, 0.0)
    simulation.run(2000)
    assert max(simulation.chosen[-20:]) == 0 or simulation.chosen[-200:].count(0) > 150
    simulation.accepts = 0.9
    simulation.run(1500)
    assert np.mean(simulation.chosen[-100:]) > 3
