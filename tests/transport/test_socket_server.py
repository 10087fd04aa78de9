"""SocketServer: the core's sockets, which never block it."""

from __future__ import annotations

import socket
import threading

import pytest

from patience import PATIENCE
from slipstream.contracts.messages import Abort, Output
from slipstream.contracts.request import FinishReason
from slipstream.transport.frames import Failed, Join, frame, from_core_frames
from slipstream.transport.replica_start import join_core
from slipstream.transport.sockets import SocketServer


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    hub = SocketServer([theirs])
    yield hub, ours
    hub.close()
    ours.close()


def test_messages_are_returned_with_their_connection(line):
    hub, front = line
    assert hub.receive(wait=False) == ([], [])
    front.sendall(frame([Abort("a"), Abort("b")]))
    messages, gone = hub.receive(wait=True)
    assert messages == [(hub.connections[0], Abort("a")), (hub.connections[0], Abort("b"))] and not gone


def test_a_front_end_that_does_not_read_blocks_no_other_and_loses_nothing(line):
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


def test_a_lost_connection_is_reported_once(line):
    hub, front = line
    connection = hub.connections[0]
    front.close()
    assert hub.receive(wait=True) == ([], [connection])
    assert not hub.connections
    hub.send(connection, [Output("a", 0, [1])])  # without a reader
    assert hub.receive(wait=True) == ([], [])


def test_invalid_data_closes_the_connection(line):
    hub, front = line
    front.sendall(b"GET / HTTP/1.1\r\n\r\n")
    _, gone = hub.receive(wait=True)
    assert len(gone) == 1 and not hub.connections


def test_buffered_messages_are_sent_before_close(line):
    hub, front = line
    hub.broadcast(Output("a", 0, [1]))
    hub.close()
    assert from_core_frames().push(front.recv(1000)) == [Output("a", 0, [1])]


def test_the_supervisor_brings_a_front_end_and_another_connection_cannot():
    ours, theirs = socket.socketpair()
    front, other = socket.socketpair()
    hub = SocketServer([other], supervisor=theirs)
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
    hub = SocketServer([], supervisor=theirs)
    joined = join_core(ours)
    hub.receive(wait=True)
    ours.close()
    hub.receive(wait=True)
    assert not hub.connections and joined.recv(1) == b""
    joined.close()
    hub.close()


def test_a_step_with_an_output_that_no_frame_holds_reaches_the_front_end(line, monkeypatch):
    monkeypatch.setattr("slipstream.transport.frames.MAX_FRAME", 1000)
    hub, front = line
    hub.send(hub.connections[0], [Output("a", 0, [1]), Output("b", 0, [2] * 2000), Output("c", 0, [3])])
    got = from_core_frames().push(front.recv(10_000))
    assert [(one.request_id, one.finish_reason) for one in got] == [("a", None), ("b", FinishReason.ERROR), ("c", None)]


@pytest.mark.parametrize("how", ["send", "broadcast"])
def test_what_a_full_socket_did_not_take_is_sent_before_the_end(line, how):
    """The reason of our end comes behind outputs that a slow front end has not read yet."""
    hub, front = line
    (connection,) = hub.connections
    sent = []
    while len(connection.unsent) < 4 * 2**20:  # more than the socket takes at once
        sent += [Output(f"request-{len(sent)}", 0, [1] * 10_000)] * 10
        hub.send(connection, sent[-10:])
    sent.append(Failed("the root cause"))
    if how == "send":
        hub.send(connection, sent[-1:])
    else:
        hub.broadcast(sent[-1])
    reader, got = from_core_frames(), []

    def read() -> None:
        while data := front.recv(2**16):
            got.extend(reader.push(data))

    thread = threading.Thread(target=read)
    thread.start()
    hub.close()
    thread.join(PATIENCE)
    assert not thread.is_alive() and got == sent


def test_a_front_end_that_reads_nothing_does_not_hold_up_the_end_of_others():
    pairs = [socket.socketpair() for _ in range(2)]
    hub = SocketServer([theirs for _, theirs in pairs])
    stuck, reading = hub.connections
    while not stuck.unsent:
        hub.send(stuck, [Output("a", 0, [1] * 1000)])
    hub.broadcast(Failed("the root cause"))
    hub.close()
    assert from_core_frames().push(pairs[1][0].recv(10_000)) == [Failed("the root cause")]
    assert not hub.connections and pairs[1][0].recv(10) == b""
    for ours, _ in pairs:
        ours.close()
