"""What the system reports about a process."""

import mmap
import os
import time

import pytest

from slipstream.metrics.prometheus import Metrics, read_process
from slipstream.metrics.stats import FrontStats


def test_this_process_is_as_it_is():
    found = read_process(os.getpid())
    assert 2**20 < found.resident < found.virtual
    assert found.cpu_seconds == pytest.approx(time.process_time(), abs=1.0)
    assert 0 < found.start_time <= time.time() + 1
    with open(os.devnull), open(os.devnull):
        assert read_process(os.getpid()).open_files == found.open_files + 2
    assert found.max_files >= found.open_files


def test_memory_that_is_taken_is_seen():
    """A mapping of its own: an object of that size can reuse memory that the process holds already."""
    before = read_process(os.getpid()).resident
    with mmap.mmap(-1, 2**26) as taken:
        taken.write(b"x" * 2**26)
        assert read_process(os.getpid()).resident - before > 2**25


def test_no_process_is_none():
    assert read_process(2**22 + 1) is None


def test_the_page_names_each_process():
    stats = FrontStats(pids={"core": os.getpid(), "front_end_0": 2**22 + 1})
    page = Metrics(lambda: (stats, []), "1").text("")[0].decode()
    assert 'process_resident_memory_bytes{process="core"}' in page
    assert 'process_cpu_seconds_total{process="core"}' in page and "front_end_0" not in page
