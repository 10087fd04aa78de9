"""The hub: the core's sockets, which never make it wait."""

from __future__ import annotations

import socket

import pytest

from slipstream.engine.link.hub import Hub
from slipstream.engine.link.spawn import join_core
from slipstream.engine.link.wire import Join, frame, from_core_frames
from slipstream.messages import Abort, Output
from slipstream.request import FinishReason


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    hub = Hub([theirs])
    yield hub, ours
    hub.close()
    ours.close()


def test_messages_come_with_who_sent_them(line):
    hub, front = line
    assert hub.receive(wait=False) == ([], [])
    front.sendall(frame([Abort("a"), Abort("b")]))
    messages, gone = hub.receive(wait=True)
    assert messages == [(hub.connections[0], Abort("a")), (hub.connections[0], Abort("b"))] and not gone


def test_a_front_end_that_does_not_read_holds_nobody_and_loses_nothing(line):
    hub, front = line
    sent = [Output(f"request-{i}", 0, [i] * 50) for i in range(20_000)]
    for start in range(0, len(sent), 100):
        hub.send(hub.connections[0], sent[start : start + 100])  # returns at once, far beyond what a socket holds
    assert hub.connections[0].unsent
    reader, got = from_core_frames(), []
    while len(got) < len(sent):
        got += reader.push(front.recv(2**20))
        hub.receive(wait=False)
    assert got == sent and not hub.connections[0].unsent


def test_a_front_end_that_has_gone_is_named_once(line):
    hub, front = line
    connection = hub.connections[0]
    front.close()
    assert hub.receive(wait=True) == ([], [connection])
    assert not hub.connections
    hub.send(connection, [Output("a", 0, [1])])  # nobody to hear it
    assert hub.receive(wait=True) == ([], [])


def test_one_that_talks_nonsense_is_dropped(line):
    hub, front = line
    front.sendall(b"GET / HTTP/1.1\r\n\r\n")
    _, gone = hub.receive(wait=True)
    assert len(gone) == 1 and not hub.connections


def test_the_last_words_are_sent_before_the_end(line):
    hub, front = line
    hub.broadcast(Output("a", 0, [1]))
    hub.close()
    assert from_core_frames().push(front.recv(1000)) == [Output("a", 0, [1])]


def test_the_supervisor_brings_a_front_end_and_another_connection_cannot():
    ours, theirs = socket.socketpair()
    front, other = socket.socketpair()
    hub = Hub([other], supervisor=theirs)
    assert [each.is_supervisor for each in hub.connections] == [False, True] and len(hub.front_ends) == 1
    joined = join_core(ours)
    ((connection, message),), _ = hub.receive(wait=True)
    assert connection.is_supervisor and message == Join()
    new = hub.join(connection)
    hub.send(new, [Output("a", 0, [1])])
    assert from_core_frames().push(joined.recv(1000)) == [Output("a", 0, [1])]
    joined.sendall(frame([Abort("b")]))
    assert hub.receive(wait=True)[0] == [(new, Abort("b"))]
    front.sendall(frame([Join()]))  # no socket comes with it
    ((connection, message),), _ = hub.receive(wait=True)
    assert message == Join() and hub.join(connection) is None and len(hub.front_ends) == 2
    hub.close()
    for sock in (ours, front, joined):
        sock.close()


def test_a_socket_that_came_and_did_not_join_is_closed_with_its_supervisor():
    ours, theirs = socket.socketpair()
    hub = Hub([], supervisor=theirs)
    joined = join_core(ours)
    hub.receive(wait=True)
    ours.close()
    hub.receive(wait=True)
    assert not hub.connections and joined.recv(1) == b""
    joined.close()
    hub.close()


def test_a_step_with_an_output_that_no_frame_holds_reaches_the_front_end(line, monkeypatch):
    monkeypatch.setattr("slipstream.engine.link.wire.MAX_FRAME", 1000)
    hub, front = line
    hub.send(hub.connections[0], [Output("a", 0, [1]), Output("b", 0, [2] * 2000), Output("c", 0, [3])])
    got = from_core_frames().push(front.recv(10_000))
    assert [(one.request_id, one.finish_reason) for one in got] == [("a", None), ("b", FinishReason.ERROR), ("c", None)]
