"""AbortCalls: one front end aborts the requests of all others and gets their number."""

from __future__ import annotations

import pytest

from slipstream.transport.core_process import AbortCalls
from slipstream.transport.frames import AbortAll, AbortedAll


class SocketServer:
    def __init__(self, *names: str) -> None:
        self.front_ends = list(names)
        self.sent: list[tuple[str, object]] = []

    def send(self, connection, messages) -> None:
        self.sent += [(connection, message) for message in messages]


@pytest.fixture
def hub():
    return SocketServer("a", "b", "c")


def test_the_call_reaches_all_others_and_counts_are_summed(hub):
    calls = AbortCalls(hub)
    calls.start("a", AbortAll("x"))
    assert hub.sent == [("b", AbortAll("x")), ("c", AbortAll("x"))]
    calls.reply("b", AbortedAll("x", 2))
    calls.reply("b", AbortedAll("x", 2))  # once is enough
    assert len(hub.sent) == 2
    calls.reply("c", AbortedAll("x", 3))
    assert hub.sent[2:] == [("a", AbortedAll("x", 5))]
    calls.reply("c", AbortedAll("x", 3))
    assert len(hub.sent) == 3


def test_a_single_front_end_gets_a_reply_at_once():
    hub = SocketServer("a")
    AbortCalls(hub).start("a", AbortAll("x"))
    assert hub.sent == [("a", AbortedAll("x", 0))]


def test_a_front_end_that_disconnects_is_dropped_from_calls(hub):
    calls = AbortCalls(hub)
    calls.start("a", AbortAll("x"))
    calls.start("b", AbortAll("y"))
    calls.reply("b", AbortedAll("x", 2))
    calls.reply("a", AbortedAll("y", 1))
    hub.sent.clear()
    calls.disconnect("c")
    assert hub.sent == [("a", AbortedAll("x", 2)), ("b", AbortedAll("y", 1))]
    calls.start("a", AbortAll("z"))
    hub.sent.clear()
    calls.disconnect("a")
    calls.reply("b", AbortedAll("z", 1))
    calls.reply("c", AbortedAll("z", 1))
    assert not hub.sent
