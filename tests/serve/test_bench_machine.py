"""Measured rates of a GPU."""

import pytest

from slipstream.serve.bench import tables
from slipstream.serve.bench.tables import measure_gpu, rates, sustained


def test_rates_count_two_operations_a_number_and_bytes_both_ways():
    found = rates(product=2 * 8192**3 / 778e12, copy=2 * tables.COPIED / 4.2e12)
    assert (found.product_tflops, found.copy_tbs) == (pytest.approx(778), pytest.approx(4.2))
    assert str(found) == "this GPU reaches 778 TFLOP/s and 4.20 TB/s"


def test_work_is_timed_when_the_clock_has_followed_the_load():
    asked = []

    def clock(operation, count):
        asked.append(count)
        slow = 0.010 if sum(asked) <= 1 else 0.002 if sum(asked) <= 105 else 0.004  # the first, cold, under load
        return count * slow

    assert sustained(lambda: None, 0.2, clock) == pytest.approx(0.004)
    assert asked == [1, 4, 100, 100]  # 0.2 s of load and 0.2 timed, by what it takes cold


@pytest.mark.cuda
def test_the_rates_of_a_gpu_are_positive():
    found = measure_gpu()
    assert 0.1 < found.product_tflops < 10_000 and 0.01 < found.copy_tbs < 100
