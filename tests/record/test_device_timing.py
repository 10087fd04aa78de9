"""Device time accounting, on scripted clocks."""

import pytest

from scripted_engine import scripted_core, submit
from slipstream import LLM
from slipstream.contracts.messages import Abort
from slipstream.record.device_timing import DeviceTime, DeviceTimer
from tiny_encoder import write_tiny_encoder


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class Point:
    def __init__(self, time, reached=True):
        self.time = time
        self.reached = reached

    def done(self):
        return self.reached

    def since(self, earlier):
        return self.time - earlier.time


class Span:
    def __init__(self, start, end, ended=True, late=None):
        self.started, self.ended = Point(start), Point(end, ended)
        self.late = late and (Point(late[0]), Point(late[1]))


class Engine:
    """Calls a DeviceTimer as a core does."""

    def __init__(self):
        self.clock = Clock()
        self.timer = DeviceTimer(self.clock)

    def step(self, span, inside=0.001, outside=0.0, has_requests=True):
        self.clock.advance(outside)
        self.timer.enter()
        self.clock.advance(inside)
        cause = self.timer.launched()
        self.timer.follow(span)
        self.timer.record(span, cause)
        self.timer.leave(has_requests)
        return cause


def test_time_between_forward_and_head_is_that_of_late_data():
    engine = Engine()
    for span in (Span(0, 2, late=(1, 1.5)), Span(2, 5), Span(5, 9, late=(6, 5.9))):  # the clock's resolution is coarse
        engine.step(span)
    total = engine.timer.total
    assert (total.busy, total.grammar, total.idle) == (1.5 + 3 + 4, 0.5, 0.5)


def test_busy_time_and_gaps_add_up_to_the_time_between_first_and_last():
    engine = Engine()
    for span in (Span(0, 2), Span(2.5, 4), Span(4, 7)):
        engine.step(span)
    total = engine.timer.total
    assert (total.num_steps, total.busy, total.idle) == (3, 6.5, 0.5)
    assert total.busy_share == 6.5 / 7


def test_a_gap_is_the_devices_own_if_the_step_before_was_still_there():
    engine = Engine()
    engine.step(Span(0, 2, ended=False))
    assert engine.step(Span(2.25, 3)) == "turnaround"
    assert engine.timer.total.turnaround == 0.25


def test_a_gap_is_assigned_to_the_core_or_its_caller_whichever_took_longer():
    engine = Engine()
    engine.step(Span(0, 2))
    assert engine.step(Span(3, 4), inside=0.01, outside=0.002) == "host_late"
    assert engine.step(Span(6, 7), inside=0.01, outside=0.5) == "output"
    total = engine.timer.total
    assert (total.host_late, total.output) == (1, 2)


def test_a_gap_after_there_was_nothing_to_do_counts_as_no_requests():
    engine = Engine()
    assert engine.step(Span(0, 2), has_requests=False) == "no_requests"
    assert engine.step(Span(100, 101), outside=98) == "no_requests"
    assert engine.step(Span(102, 103), inside=0.5) == "host_late"
    total = engine.timer.total
    assert (total.no_requests, total.host_late) == (98, 1)
    assert total.busy_share == 4 / 5  # of the time with work


def test_a_device_that_is_still_at_work_had_no_rest():
    engine = Engine()
    engine.step(Span(0, 2, ended=False), has_requests=False)
    assert engine.step(Span(2.25, 3), outside=1) == "turnaround"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("how", ["ended", "aborted"])
def test_without_open_requests_idle_time_is_no_requests_even_with_steps_in_flight(depth, how):
    core = scripted_core(depth)
    causes, launched = [], core.timer.launched
    core.timer.launched = lambda: causes.append(launched()) or causes[-1]
    core.submit(submit("a", [1, 2, 3], max_tokens=9))
    while not core.step():
        pass
    if how == "aborted":
        core.abort(Abort("a"))
    else:
        while core.scheduler.serves("a"):
            core.step()
    num = len(causes)
    core.submit(submit("b", [1], max_tokens=2))
    core.step()
    assert causes[num:] == ["no_requests"] and "no_requests" not in causes[1:num]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_call_that_has_more_prompts_is_work(depth, tmp_path):
    folder = write_tiny_encoder(tmp_path)
    with LLM(str(folder), depth=depth, max_num_seqs=4, num_threads=1, use_tqdm_on_load=False, device="cpu") as llm:
        causes, launched = [], llm.core.timer.launched
        llm.core.timer.launched = lambda: causes.append(launched()) or causes[-1]
        for _ in range(2):
            llm.embed([[5, 6, 7 + i] for i in range(20)], use_tqdm=False)
    assert len(causes) >= 10
    assert [place for place, cause in enumerate(causes) if cause == "no_requests"] == [0, len(causes) // 2]


def test_waiting_for_the_device_is_not_the_hosts_time():
    engine = Engine()
    timer, clock = engine.timer, engine.clock
    timer.enter()
    clock.advance(1)
    timer.waits()
    clock.advance(50)
    timer.waited()
    clock.advance(2)
    timer.leave(True)
    assert timer.total.host == 3
    clock.advance(10)
    timer.enter()
    timer.launched()
    assert timer.host_seconds == 3


def test_cores_that_share_a_device_are_not_idle_while_another_has_it():
    first, second = Engine(), Engine()
    second.clock = first.clock
    second.timer.timeline = first.timer.timeline
    for start in range(0, 8, 4):  # one after another, without a gap but for a second before the last
        first.step(Span(start, start + 1))
        second.step(Span(start + 1, start + 4 if start else start + 3))
    totals = first.timer.total, second.timer.total
    assert [total.busy for total in totals] == [2, 5]
    assert [total.idle for total in totals] == [1, 0]


def test_nothing_to_do_for_one_of_several_is_no_rest_for_the_device():
    first, second = Engine(), Engine()
    second.clock = first.clock
    second.timer.timeline = first.timer.timeline
    first.step(Span(0, 1))
    second.step(Span(1, 2), has_requests=False)
    assert first.step(Span(3, 4), inside=0.5, has_requests=False) == "host_late"
    assert second.step(Span(9, 10), has_requests=False) == "no_requests"


def test_a_step_without_events_is_skipped():
    engine = Engine()
    engine.step(None)
    engine.step(Span(0, 1))
    assert engine.timer.total.num_steps == 1


def test_a_difference_is_that_of_every_field():
    now, before = DeviceTime(5, 9.0, 1.0), DeviceTime(2, 4.0, 0.5)
    assert now.since(before) == DeviceTime(3, 5.0, 0.5)
    copy = now.copy()
    now.busy += 1
    assert copy.busy == 9.0


@pytest.mark.parametrize("grain", [-1e-6, 0.0])
def test_the_clocks_grain_makes_no_negative_gap(grain):
    engine = Engine()
    engine.step(Span(0, 2))
    engine.step(Span(2 + grain, 3))
    assert engine.timer.total.idle == 0
