"""The exchange of step sizes: order, joint sizes, waits that are counted, and engines that leave or die."""

from __future__ import annotations

import socket
import threading

import pytest

from slipstream.base.errors import EngineDead
from slipstream.contracts.step import StepSizes
from slipstream.ranks.lockstep import StepExchange, connect_peers, listen_for_peers


def exchanges(count=2):
    links = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            links[one][other], links[other][one] = socket.socketpair()
    return [StepExchange(rank, own) for rank, own in enumerate(links)]


def sizes(tokens, *, last=None, single=True, only_last=False, replay=True):
    return StepSizes(tokens, tokens if last is None else last, single, only_last, replay)


def test_every_engine_takes_the_largest_sizes_in_the_order_of_steps():
    a, b, c = exchanges(3)
    own = [[sizes(3), sizes(70, last=2, single=False, only_last=True)], [sizes(5), sizes(1)], [sizes(1), sizes(9)]]
    for engine, posted in zip((a, b, c), own, strict=True):
        for each in posted:
            engine.post(each)
    for engine, posted in zip((a, b, c), own, strict=True):
        assert engine.take(posted[0]) == sizes(5)
        assert engine.take(posted[1]) == StepSizes(70, 9, is_single=False, only_last=False, can_replay=True)
        assert engine.num_waits == 0 and not engine.is_behind()


def test_one_engine_that_cannot_replay_makes_all_run_eagerly():
    a, b = exchanges()
    a.post(sizes(4))
    b.post(sizes(900, replay=False))
    assert not a.take(sizes(4)).can_replay and not b.take(sizes(900, replay=False)).can_replay


def test_an_engine_without_a_plan_sees_what_others_post():
    a, b = exchanges()
    assert not b.is_behind() and not b.has_all()
    a.post(sizes(4))
    assert b.is_behind() and not a.is_behind() and not a.has_all()
    b.post(sizes(1))
    assert not b.is_behind() and a.has_all() and a.take(sizes(4)) == b.take(sizes(1)) == sizes(4)


def test_only_a_missing_answer_makes_the_host_wait():
    a, b = exchanges()
    a.post(sizes(4))
    late = threading.Thread(target=lambda: (b.post(sizes(6)), b.post(sizes(7))))
    a.sleep = lambda seconds: late.start() if late.ident is None else late.join()  # `take` waits: now b answers
    assert a.take(sizes(4)).tokens == 6 and a.num_waits == 1
    late.join()
    a.post(sizes(4))
    assert a.take(sizes(4)).tokens == 7 and a.num_waits == 1


def test_an_engine_that_died_is_named():
    a, b, c = exchanges(3)
    for peer in b._peers:
        peer.link.close()
    with pytest.raises(EngineDead, match="rank 1 has ended"):
        a.is_behind()
    c.post(sizes(1))  # a broken connection does not fail the engine that posts
    with pytest.raises(EngineDead, match="rank 1 has ended"):
        c.take(sizes(1))


def test_an_engine_that_was_closed_fails_only_those_that_need_it():
    a, b = exchanges()
    b.post(sizes(1))
    b.leave()
    a.post(sizes(2))
    assert a.take(sizes(2)) == sizes(2) and not a.is_behind()  # what b posted counts
    a.post(sizes(2))
    with pytest.raises(EngineDead, match="rank 1 was closed"):
        a.take(sizes(2))


def test_engines_find_each_other_in_a_folder(tmp_path):
    listeners = [listen_for_peers(rank, tmp_path) for rank in range(3)]
    found = {}

    def connect(rank):
        found[rank] = connect_peers(rank, 3, listeners[rank], tmp_path)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        found[rank].post(sizes(10 + rank))
    assert {found[rank].take(sizes(10 + rank)).tokens for rank in range(3)} == {12}
