"""Streams run what was queued, in order; events tell how far they have come, and what went wrong."""

from __future__ import annotations

import threading

import pytest

from slipstream.device.streams import PASSED, InlineStream, ThreadedStream


@pytest.fixture
def stream():
    stream = ThreadedStream("test")
    yield stream
    stream.close()


def test_work_runs_in_order_and_off_the_callers_thread(stream):
    seen = []
    for i in range(100):
        stream.run(lambda i=i: seen.append((i, threading.get_ident())))
    stream.record().wait()
    assert [i for i, _ in seen] == list(range(100))
    assert {thread for _, thread in seen} == {stream.thread.ident}


def test_an_event_is_reached_only_after_the_work_before_it(stream):
    gate = threading.Event()
    stream.run(gate.wait)
    event = stream.record()
    assert not event.done()
    gate.set()
    event.wait()
    assert event.done()


def test_one_stream_waits_for_another(stream):
    other = ThreadedStream("other")
    gate, seen = threading.Event(), []
    stream.run(gate.wait)
    stream.run(lambda: seen.append("first"))
    other.wait_for(stream.record())
    other.run(lambda: seen.append("second"))
    done = other.record()
    gate.set()
    done.wait()
    assert seen == ["first", "second"]
    other.close()


def test_a_failure_is_raised_in_waits_and_skips_the_rest():
    stream, seen = ThreadedStream("failing"), []
    before = stream.record()
    before.wait()
    stream.run(lambda: 1 / 0)
    stream.run(lambda: seen.append("never"))
    with pytest.raises(ZeroDivisionError):
        stream.record().wait()
    stream.close()
    assert not seen


def test_inline_runs_at_once():
    stream, seen = InlineStream(), []
    stream.run(lambda: seen.append(1))
    assert seen == [1]
    assert stream.record() is PASSED and PASSED.done()
