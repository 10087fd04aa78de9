"""Steps of engines that share experts: launched together, without a wait of the host in steady state."""

from __future__ import annotations

import dataclasses
import socket

import numpy as np
import pytest

from scripted_engine import ScriptedDevice, scripted_core, submit, tokens_alone
from slipstream.contracts.step import DrawEdits, StepSizes
from slipstream.engine.core import EngineCore
from slipstream.ranks.lockstep import LockstepExecutor, StepExchange, padding_plan
from slipstream.runner.results import DeviceInterval


class JointDevice(ScriptedDevice):
    """Runs plans by itself: a step is done the second time that the host looks. Keeps the joint sizes of all steps."""

    def __init__(self):
        super().__init__(page_size=4, max_num_seqs=8)
        self.joint = []
        self.is_padding = False
        self.late = []

    def sizes_of(self, plan):
        is_single = plan.total_tokens == len(plan.rows)
        return StepSizes(max(1, plan.total_tokens), max(1, len(plan.rows)), is_single, not is_single, True)

    def launch(self, plan):
        self.joint.append(plan.joint_sizes)
        self.is_padding = not len(plan.rows)
        if not self.is_padding:
            super().launch(dataclasses.replace(plan, joint_sizes=None))

    def finish(self, late=None):
        self.late.append(late)
        if self.is_padding:
            return _Padding()
        handle = super().finish(late)
        return _Looked(handle)


class _Padding:
    has_no_result = True
    interval = None


class _Looked:
    has_no_result = False

    def __init__(self, handle, interval=None):
        self.handle, self.num_looks, self.interval = handle, 0, interval

    def done(self):
        self.num_looks += 1
        if self.num_looks > 1:
            self.handle.wait()
        return self.handle.done()

    def wait(self):
        return self.handle.wait()


class TimedDevice(JointDevice):
    """A step takes three milliseconds, and begins one after the step before."""

    def finish(self, late=None):
        looked = super().finish(late)
        if not self.is_padding:
            begin = 0.004 * len(self.late)
            looked.interval = DeviceInterval(_Moment(looked, begin), _Moment(looked, begin + 0.003))
        return looked


class _Moment:
    def __init__(self, step, time):
        self.step, self.time = step, time

    def done(self):
        return self.step.handle.done()

    def since(self, earlier):
        return self.time - earlier.time


class Engine:
    def __init__(self, exchange, depth, device):
        self.device = device()
        self.exchange = exchange
        self.executor = LockstepExecutor(self.device, exchange, num_groups=1)
        alone = scripted_core(depth)
        self.core = EngineCore(alone.config, self.executor, peers=self.executor)
        self.tokens = {}

    def turn(self):
        """One turn of the loop of a core process. Returns whether there was anything to do."""
        if not self.core.has_requests():
            return False
        for output in self.core.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return True


def engines(count=2, depth=1, device=JointDevice):
    links = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            links[one][other], links[other][one] = socket.socketpair()
    return [Engine(StepExchange(rank, own), depth, device) for rank, own in enumerate(links)]


def run(*group):
    while sum(engine.turn() for engine in group):
        pass
    assert len({engine.exchange.num_posted for engine in group}) == 1
    assert all(engine.device.joint == group[0].device.joint for engine in group)  # the same steps, of the same sizes


MESSAGES = [
    submit("a", [1, 2, 3, 4, 5], max_tokens=9),
    submit("b", [7], max_tokens=20),
    submit("c", [8] * 9, max_tokens=3),
]


@pytest.mark.parametrize("depth", [1, 2])
def test_busy_engines_step_together_and_never_wait_for_each_other(depth):
    group = engines(3, depth)
    for engine, message in zip(group, MESSAGES, strict=True):
        engine.core.submit(message)
    run(*group)
    for engine, message in zip(group, MESSAGES, strict=True):
        assert engine.tokens == {message.request_id: tokens_alone(message, 0)[0]}
        assert engine.exchange.num_waits == 0
    first, *_, last = group[0].device.joint
    assert (first.tokens, first.is_single) == (9, False) and (last.tokens, last.is_single) == (1, True)


def test_device_time_is_read_once_a_step_was_launched():
    """Also of steps that wait for sizes of other engines when their handle is followed."""
    group = engines(2, depth=2, device=TimedDevice)
    for engine, message in zip(group, MESSAGES, strict=False):
        engine.core.submit(message)
    run(*group)
    for engine in group:
        time = engine.core.timer.total
        assert time.num_steps == engine.core.num_steps and time.busy == pytest.approx(0.003 * time.num_steps)
        assert time.idle + time.no_requests == pytest.approx(0.001 * (time.num_steps - 1))


def test_a_synchronous_engine_gives_the_same_tokens():
    a, b = engines(depth=0)
    a.core.submit(MESSAGES[0])
    a.exchange.sleep = lambda seconds: b.turn()  # the host of a waits for each step of b
    run(a, b)
    assert a.tokens == {"a": tokens_alone(MESSAGES[0], 0)[0]}


def test_a_peer_that_answers_late_delays_only_the_step_that_needs_it():
    a, b = engines()
    a.core.submit(MESSAGES[1])
    b.core.submit(MESSAGES[0])
    for engine in (a, b) * 4:
        engine.turn()
    num_tokens = len(a.tokens["b"])
    a.turn()  # plans the next step and commits the step before, whose tokens arrive although b does not answer
    assert len(a.tokens["b"]) == num_tokens + 1 and a.exchange.num_waits == 0
    num_launched = len(a.device.joint)
    assert num_launched == a.exchange.num_posted - 1  # the planned step waits for b
    a.exchange.sleep = lambda seconds: b.turn()
    a.turn()
    assert a.exchange.num_waits == 1 and len(a.device.joint) > num_launched
    run(a, b)
    assert a.exchange.num_waits == 1 and b.exchange.num_waits == 0
    assert a.tokens["b"] == tokens_alone(MESSAGES[1], 0)[0]


def test_an_idle_engine_sleeps_wakes_with_padding_and_sleeps_again():
    a, b = engines()
    assert not a.turn() and not b.turn()  # nothing to do: both sleep
    a.core.submit(MESSAGES[0])
    run(a, b)
    assert b.executor.num_padding_steps == a.core.num_steps == 9 and b.core.num_steps == 0
    assert not a.turn() and not b.turn()  # asleep again: no step without a request
    assert b.executor.num_padding_steps == 9 and a.executor.num_padding_steps == 0
    b.core.submit(MESSAGES[2])
    run(a, b)
    assert a.executor.num_padding_steps == b.core.num_steps == 3 and b.executor.num_padding_steps == 9
    assert a.exchange.num_waits == b.exchange.num_waits == 0


def test_an_engine_whose_requests_wait_for_the_host_takes_part_with_padding(monkeypatch):
    a, b = engines()
    a.core.submit(MESSAGES[0])
    b.core.submit(MESSAGES[1])
    with monkeypatch.context() as patch:
        patch.setattr(b.core.scheduler, "plan", lambda: None)  # as while a grammar is compiled
        while len(a.tokens.get("a", ())) < 9:
            assert a.turn() and b.turn()
    assert b.executor.num_padding_steps == 9
    run(a, b)
    assert b.tokens["b"] == tokens_alone(MESSAGES[1], 0)[0]


def test_late_data_of_a_step_that_waits_for_a_peer_is_kept():
    a, b = engines()
    ones = np.ones(2, np.int32)
    a.executor.launch(padding_plan(1))
    handle = a.executor.finish(DrawEdits(ones, ones[:, None]))
    assert a.device.late == [] and not handle.done()
    ones[:] = 5  # the owner reuses its arrays
    b.executor.follow()
    assert a.executor.is_waited_for()
    a.executor.follow()
    (late,) = a.device.late
    assert late.rows.tolist() == [1, 1] and late.bits.tolist() == [[1], [1]]
