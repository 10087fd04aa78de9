"""Plans over sockets: every rank gets every message, either side notices the end of the other, secrets are checked."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from patience import PATIENCE
from slipstream.base.errors import EngineDead
from slipstream.ranks.link import SECRET_BYTES, accept_rank, join_rank, receive_exactly
from slipstream.ranks.plan_ring import PlanSocketReader, PlanSockets


def open_pairs(num):
    pairs = [socket.socketpair() for _ in range(num)]
    return PlanSockets([ours for ours, _ in pairs]), [PlanSocketReader(their, receive_exactly) for _, their in pairs]


def test_readers_get_all_messages_until_the_writer_ends():
    rng = random.Random(0)
    sent = [(bytes([rng.randrange(256)]), rng.randbytes(rng.choice((0, 3, 500, 300_000)))) for _ in range(100)]
    writer, readers = open_pairs(2)
    found = [[], []]

    def read(index):
        readers[index].ready()
        while (message := readers[index].read()) is not None:
            found[index].append(message)

    threads = [threading.Thread(target=read, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    assert writer.wait_until_ready() is None
    for kind, data in sent:
        writer.write(kind, data)
    assert writer.ended(0.0) is None
    writer.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [sent, sent]


def test_a_rank_that_ends_is_named():
    writer, readers = open_pairs(2)
    readers[0].ready()
    readers[1]._sock.close()
    assert writer.wait_until_ready() == 2
    assert writer.ended(5.0) == 2
    with pytest.raises(EngineDead, match="rank 2 has ended"):
        writer.write(b"p", b"data")
    writer.close()


def test_the_writer_waits_until_all_ranks_have_ended():
    writer, readers = open_pairs(2)
    ended = []

    def run(index):
        while readers[index].read() != (b"e", b""):
            pass
        ended.append(index)
        readers[index]._sock.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    writer.write(b"p", b"plan")
    writer.write(b"e")
    writer.wait_until_ended(PATIENCE)
    assert sorted(ended) == [0, 1]
    writer.close()


def test_a_connection_without_the_secret_is_closed_and_the_next_one_accepted():
    secret = bytes(range(SECRET_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        address = listener.getsockname()[:2]
        wrong = join_rank(address, bytes(SECRET_BYTES), 1)
        short = socket.create_connection(address)
        short.shutdown(socket.SHUT_WR)
        right = join_rank(address, secret, 3)
        rank, sock = accept_rank(listener, secret)
        assert rank == 3
        sock.sendall(b"x")
        assert right.recv(1) == b"x" and receive_exactly(wrong, 1) is None and receive_exactly(short, 1) is None
        for each in (wrong, short, right, sock):
            each.close()
