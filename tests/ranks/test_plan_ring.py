"""PlanRing: every reader gets every message in order, a full ring waits, and the end of either side is noticed."""

from __future__ import annotations

import os
import random
import threading

import pytest

from patience import PATIENCE
from slipstream.base.errors import EngineDead
from slipstream.ranks.plan_ring import PlanReader, PlanWriter


def open_ring(num_readers, size):
    writer = PlanWriter(num_readers, size)
    readers = [PlanReader(os.dup(files.memory), *map(os.dup, list(files)[1:])) for files in writer.files]
    writer.close_inherited()
    return writer, readers


def test_readers_get_all_messages_while_the_ring_is_reused():
    rng = random.Random(0)
    sent = [(bytes([rng.randrange(256)]), rng.randbytes(rng.randrange(500))) for _ in range(500)]
    writer, readers = open_ring(2, 1200)
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
    writer.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [sent, sent]


def close(reader):
    os.close(reader._messages)
    os.close(reader._acknowledgements)


def test_the_end_of_a_reader_is_an_error():
    writer, (reader,) = open_ring(1, 1200)
    writer.write(b"p", b"data")
    close(reader)
    with pytest.raises(EngineDead, match="rank 1 has ended"):
        writer.write(b"p", b"data")


def test_a_reader_that_ends_before_it_is_ready():
    writer, readers = open_ring(2, 1200)
    readers[0].ready()
    close(readers[1])
    assert writer.wait_until_ready() == 2


def test_a_writer_that_waits_for_room_notices_the_end_of_the_reader():
    writer, (reader,) = open_ring(1, 1200)
    writer.write(b"p", bytes(500))
    writer.write(b"p", bytes(500))
    threading.Timer(0.05, close, (reader,)).start()
    with pytest.raises(EngineDead, match="rank 1 has ended"):
        writer.write(b"p", bytes(500))


def test_messages_over_half_of_the_ring_are_refused():
    writer, _ = open_ring(1, 1200)
    with pytest.raises(EngineDead, match="600 can be sent"):
        writer.write(b"p", bytes(600))
