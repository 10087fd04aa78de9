"""Messages between ranks: every rank gets every message, either side notices the end of the other."""

from __future__ import annotations

import os
import random
import socket
import threading
from types import SimpleNamespace

import pytest

from patience import PATIENCE
from slipstream.base.errors import EngineDead
from slipstream.ranks.link import (
    END,
    PLAN,
    READY,
    SECRET_BYTES,
    START,
    RankSocket,
    accept_ranks,
    ended_within,
    join_rank,
    receive_exactly,
)
from slipstream.ranks.ranks import Ranks


def open_pairs(num, store="127.0.0.1"):
    """Rank 0's side, and those of the others, which have got their configurations."""
    config = SimpleNamespace(of_rank=lambda rank: None)
    pairs = [socket.socketpair() for _ in range(num)]
    ranks = Ranks(config, [ours for ours, _ in pairs], "no store", "127.0.0.1")
    others = [RankSocket(theirs) for _, theirs in pairs]
    assert all(other.receive()[0] == START for other in others)
    return ranks, others


def test_readers_get_all_messages_until_the_writer_ends():
    rng = random.Random(0)
    sent = [(bytes([rng.randrange(256)]), rng.randbytes(rng.choice((0, 3, 500, 300_000)))) for _ in range(100)]
    ranks, others = open_pairs(2)
    found = [[], []]

    def read(index):
        others[index].send(READY)
        while (message := others[index].receive()) is not None:
            found[index].append(message)

    threads = [threading.Thread(target=read, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    ranks.wait_until_loaded()
    for kind, data in sent:
        ranks.write(kind, data)
    assert ranks.dead_rank() is None
    ranks.kill()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [sent, sent]


def test_a_rank_that_ends_is_named():
    ranks, (_, second) = open_pairs(2)
    second.sock.close()
    assert "rank 2 has ended" in ranks.dead_rank(PATIENCE)
    with pytest.raises(EngineDead, match="rank 2 has ended"):
        ranks.write(PLAN, b"data")
    ranks.kill()


def test_a_rank_that_ends_before_it_is_ready():
    ranks, (first, second) = open_pairs(2)
    first.send(READY)
    second.sock.close()
    with pytest.raises(EngineDead, match="rank 2 did not start"):
        ranks.wait_until_loaded()
    ranks.kill()


def test_a_rank_that_has_loaded_has_not_ended():
    """Also where rank 0 fails before it has read the message."""
    ranks, others = open_pairs(2)
    for other in others:
        other.send(READY)
    assert ranks.dead_rank() is None
    with pytest.raises(OSError, match="of rank 0"):
        ranks.explained(fail)
    ranks.kill()


def fail():
    raise OSError("of rank 0")


def test_a_writer_that_waits_for_room_notices_the_end_of_the_reader():
    ranks, (other,) = open_pairs(1)
    threading.Timer(0.05, other.sock.close).start()
    with pytest.raises(EngineDead, match="rank 1 has ended"):
        ranks.write(PLAN, bytes(2**24))
    ranks.kill()


def test_the_writer_waits_until_all_ranks_have_ended():
    ranks, others = open_pairs(2)
    ended = []

    def run(index):
        while others[index].receive() != (END, b""):
            pass
        ended.append(index)
        others[index].sock.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    ranks.write(PLAN, b"plan")
    ranks.close()
    assert sorted(ended) == [0, 1]


def test_processes_that_a_rank_starts_do_not_have_its_connection():
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)  # as it was for the process of the rank
    assert not os.get_inheritable(RankSocket(theirs).sock.fileno())
    ours.close()
    theirs.close()


def test_a_connection_without_the_secret_is_closed_and_the_next_one_accepted():
    secret = bytes(range(SECRET_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        wrong = join_rank(address, bytes(SECRET_BYTES), 1)
        short = socket.create_connection(address)
        short.shutdown(socket.SHUT_WR)
        right = join_rank(address, secret, 3)
        found = accept_ranks(listener, secret, [3], PATIENCE)
        assert list(found) == [3]
        assert not ended_within([right.fileno()], 0.0)
        found[3].sendall(b"x")
        assert right.recv(1) == b"x" and receive_exactly(wrong, 1) is None and receive_exactly(short, 1) is None
        for each in (wrong, short, right, found[3]):
            each.close()


def test_ranks_that_do_not_connect_are_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        second = join_rank(listener.getsockname()[:2], b"", 2)
        with pytest.raises(EngineDead, match=r"ranks \[1, 3\] did not connect within 0.05 s"):
            accept_ranks(listener, b"", [1, 2, 3], 0.05)
        second.close()
