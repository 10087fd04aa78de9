"""How far ahead a core runs and how much prompt it gives a step, on a scripted clock."""

import dataclasses

import numpy as np
import pytest

from slipstream.contracts.step import NO_INTS, StepPlan
from slipstream.engine.pacing import MAX_WAIT, MIN_AHEAD, MIN_CHUNK, MIN_WAIT, Pacer


def plan(num_rows, chunk=0):
    """Rows that decode, and a chunk of given tokens."""
    num_tokens = np.array([1] * num_rows + [chunk] * bool(chunk), np.int32)
    return StepPlan(
        step=0,
        released=NO_INTS,
        admitted=(),
        rows=np.arange(len(num_tokens), dtype=np.int32),
        num_tokens=num_tokens,
        lengths=num_tokens,
        num_drawn=np.ones(len(num_tokens), np.int32),
        num_host_tokens=num_tokens,
        tokens=np.zeros(chunk, np.int32),
        new_pages=(),
    )


class World:
    def __init__(self, max_itl=None):
        self.now = 100.0
        self.waits = []
        self.pace = Pacer(max_itl, lambda: self.now, self.sleep)

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds

    def run(self, step, busy, times=30, host=0.001):
        """Steps one after another, as the device reports them, each after a rest."""
        for _ in range(times):
            self.pace.launched(step, host)
            self.now += busy
            self.pace.committed(busy)

    def run_on(self, step, *busy):
        """Steps that follow each other without one, the first of them after one."""
        self.pace.launched(step, 0.001)
        for seconds, is_last in zip(busy, [False] * (len(busy) - 1) + [True], strict=True):
            if not is_last:
                self.pace.launched(step, 0.001)
            self.now += seconds
            self.pace.committed(seconds)


def test_nothing_is_held_back_before_anything_is_known():
    world = World()
    assert not world.pace.is_early()
    world.pace.launched(plan(8, 4000), 0.001)
    assert not world.pace.is_early() and world.pace.max_num_tokens() is None


def test_short_steps_are_launched_as_far_ahead_as_depth_allows():
    world = World()
    world.run(plan(8), busy=MIN_AHEAD / 2)
    world.pace.launched(plan(8), 0.001)
    assert not world.pace.is_early()


def test_a_long_step_is_followed_only_shortly_before_its_end():
    world = World()
    world.run(plan(8, 4000), busy=0.35)
    world.pace.launched(plan(8, 4000), 0.001)
    start = world.now
    while world.pace.is_early():
        world.pace.wait_until_due()
    assert world.now - start == pytest.approx(0.35 - MIN_AHEAD, abs=MIN_WAIT)
    assert max(world.waits) <= MAX_WAIT  # a request may arrive meanwhile


def test_a_smaller_step_is_expected_to_take_less():
    world = World()
    world.run(plan(1, 7999), busy=0.4)
    world.pace.launched(plan(1, 4999), 0.001)  # of the same kind
    assert world.pace.too_early() == pytest.approx(0.25 - MIN_AHEAD)


def test_a_step_that_took_less_is_believed_at_once_and_one_that_took_more_is_not():
    world = World()
    world.run(plan(8, 4000), busy=0.4)
    world.run(plan(8, 4000), busy=0.3, times=1)
    world.pace.launched(plan(8, 4000), 0.001)
    assert world.pace.too_early() == pytest.approx(0.3 - MIN_AHEAD)
    world.now += 0.4
    world.pace.committed(0.4)
    world.pace.launched(plan(8, 4000), 0.001)
    assert 0.3 < world.pace.too_early() + MIN_AHEAD < 0.35


def test_the_first_step_after_a_rest_is_expected_to_take_what_such_steps_took():
    """A GPU that has cooled is quicker, and must not wait for the second step because later ones took longer."""
    world = World()
    warm = [0.24] * 30
    for first in (0.19, 0.2):
        world.run_on(plan(8, 4000), first, *warm)
    world.now += 60
    world.pace.launched(plan(8, 4000), 0.001)
    assert world.pace.too_early() == pytest.approx(0.193 - MIN_AHEAD)
    world.pace.launched(plan(8, 4000), 0.001)  # this one is on its heels
    assert world.pace.too_early() == pytest.approx(0.193 + 0.24 - MIN_AHEAD, rel=0.01)


def test_a_step_of_a_kind_that_never_came_after_a_rest_holds_nothing_back():
    world = World()
    world.run_on(plan(8, 4000), *[0.24] * 30)
    world.pace.launched(plan(8, 1000), 0.001)
    world.pace.launched(plan(8, 2000), 0.001)
    world.now += 0.1
    world.pace.committed(0.1)
    world.now += 0.1
    world.pace.committed(0.1)
    world.pace.launched(plan(8, 2000), 0.001)
    assert not world.pace.is_early()


def test_a_step_that_was_captured_says_nothing_of_the_next():
    world = World()
    world.run(plan(8, 4000), busy=0.05, times=1, host=0.035)
    world.pace.launched(plan(8, 4000), 0.002)
    assert not world.pace.is_early()


def test_a_step_that_waited_for_the_host_shows_how_little_the_next_may_take():
    """It took no more than it tells, so what was learnt of longer ones is unlearnt."""
    world = World(max_itl=0.05)
    world.run(plan(8, 4000), busy=0.35)
    world.run(plan(8, 4000), busy=0.003, times=1, host=0.002)
    world.pace.launched(plan(8, 4000), 0.002)
    assert not world.pace.is_early()
    world.run(plan(8, 4000), busy=0.003, host=0.002)
    assert world.pace.max_num_tokens() > 40_000


def test_a_step_that_was_captured_cuts_no_prompts():
    world = World(max_itl=0.05)
    world.run(plan(8, 4000), busy=1.0, times=1, host=0.9)
    assert world.pace.max_num_tokens() is None
    world.run(plan(8, 4000), busy=0.05)
    world.run(plan(8, 4000), busy=1.0, times=1, host=0.9)
    assert world.pace.max_num_tokens() == 4008


def test_a_slow_host_starts_earlier():
    world = World()
    world.run(plan(8, 4000), busy=0.35, host=0.05)
    world.pace.launched(plan(8, 4000), 0.05)
    assert world.pace.too_early() == pytest.approx(0.35 - 0.1, rel=0.01)


def test_time_counts_from_when_the_device_got_to_the_step():
    world = World()
    world.run(plan(8, 4000), busy=0.3)
    world.pace.launched(plan(8, 4000), 0.001)
    world.pace.launched(plan(8, 4000), 0.001)
    assert world.pace.too_early() == pytest.approx(0.6 - MIN_AHEAD)
    world.now += 0.3
    world.pace.committed(0.3)
    assert world.pace.too_early() == pytest.approx(0.3 - MIN_AHEAD)


def test_prompts_are_cut_to_what_the_readers_bear():
    world = World(max_itl=0.05)
    world.run(plan(8, 8000), busy=0.2 * 8008 / 8000)
    assert world.pace.max_num_tokens() == pytest.approx(2000, abs=2)


def test_a_steps_fixed_cost_is_learnt():
    """Steps of 10 ms and 25 us a token: 1,600 tokens take 50 ms."""
    world = World(max_itl=0.05)
    tokens = 8000
    for _ in range(60):
        world.run(plan(1, tokens - 1), busy=0.01 + 25e-6 * tokens, times=1)
        tokens = min(8000, world.pace.max_num_tokens())
    assert tokens == pytest.approx(1600, rel=0.01)


def test_some_prompt_moves_in_any_case():
    world = World(max_itl=0.001)
    world.run(plan(8, 8000), busy=5.0)
    assert world.pace.max_num_tokens() == MIN_CHUNK


def test_decodes_say_nothing_of_prompts():
    world = World(max_itl=0.05)
    world.run(plan(256), busy=0.01)
    assert world.pace.max_num_tokens() is None


def test_steps_are_measured_with_the_time_in_which_the_device_waited_for_the_host():
    world, seen = World(), []
    world.pace.on_decode = lambda *measured: seen.append(measured)
    for idle, num_proposed in ((0.0, 0), (0.002, 0), (0.0, 4)):
        world.pace.launched(dataclasses.replace(plan(8), num_proposed=num_proposed), 0.001)
        world.pace.committed(0.003, idle)
    assert seen == [(8, 0.003, False), (8, 0.005, False), (8, 0.003, True)]
    assert world.pace.expected(plan(8)) == pytest.approx(0.003)  # how long the device is busy
