"""How the host waits for an event of the driver: it polls during short waits, and sleeps during long ones."""

import pytest

from slipstream.device import streams
from slipstream.device.streams import EventWaits
from slipstream.device.sync_check import watch


class Clock:
    def __init__(self):
        self.now = 5.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds == 0, "the thread gives the interpreter away, and does not sleep"
        self.now += 1e-5


class Event:
    """Is reached at a given time."""

    def __init__(self, clock, after):
        self.clock, self.at = clock, clock.now + after
        self.num_queries = 0
        self.slept = 0.0

    def query(self):
        self.num_queries += 1
        return self.clock.now >= self.at

    def synchronize(self):
        self.slept = max(0.0, self.at - self.clock.now)
        self.clock.now += self.slept


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(streams, "time", clock)
    monkeypatch.setattr(streams, "num_cpus", lambda: 16)
    return clock


def wait(waits, clock, after):
    event = Event(clock, after)
    waits.wait(event)
    assert clock.now >= event.at
    return event


def test_a_short_wait_is_polled_and_a_reached_event_is_asked_once(clock):
    waits = EventWaits()
    event = wait(waits, clock, 0.001)
    assert event.slept == 0 and event.num_queries > 20
    assert wait(waits, clock, 0.0).num_queries == 1


def test_after_a_long_wait_the_next_one_is_slept_until_waits_are_short_again(clock):
    waits = EventWaits()
    assert wait(waits, clock, 0.05).slept > 0.045, "it polls for a few milliseconds at most"
    assert wait(waits, clock, 0.05).slept == pytest.approx(0.05)
    assert wait(waits, clock, 0.001).slept == pytest.approx(0.001)
    assert wait(waits, clock, 0.001).slept == 0


def test_few_cpus_are_left_to_others(clock, monkeypatch):
    monkeypatch.setattr(streams, "num_cpus", lambda: 4)
    assert wait(EventWaits(), clock, 0.001).slept == pytest.approx(0.001)


def test_the_sync_detector_sees_every_wait(clock):
    """It watches `synchronize`."""
    with watch(cpu=False):
        assert wait(EventWaits(), clock, 0.001).slept == pytest.approx(0.001)
