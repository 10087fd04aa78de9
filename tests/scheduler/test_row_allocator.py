"""RowAllocator: which request has which row, in which order, and which releases a plan reports."""

from __future__ import annotations

import pytest

from slipstream.contracts.request import Request, Status
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.lifecycle import RowAllocator


def seated(rows: RowAllocator, number: int, priority: int = 0, **params: object) -> Request:
    request = Request(f"r{number}", [1, 2, 3], SamplingParams(**params), priority=priority, max_length=9)
    request.number = number
    rows.assign(request, num_cached=2)
    return request


def test_the_request_to_preempt_first_is_the_last():
    rows = RowAllocator(4)
    old, low, young, high = (seated(rows, n, p) for n, p in ((0, 0), (1, 5), (2, 0), (3, -1)))
    assert rows.running == [high, old, young, low]
    rows.check([old, low, young, high])
    assert rows.num_free == 0 and sorted(request.row for request in rows.running) == [0, 1, 2, 3]


def test_a_new_request_starts_after_its_cached_positions():
    request = seated(RowAllocator(1), 0)
    assert (request.status, request.computed, request.committed, request.num_known) == (Status.RUNNING, 2, 2, 3)


def test_a_freed_row_is_free_at_once_and_reported_once():
    rows = RowAllocator(1)
    first = seated(rows, 0)
    rows.free(first)
    assert first.row == first.admission == -1 and first.computed == 0
    second = seated(rows, 1)
    assert (second.row, second.admission) == (0, 1)
    assert rows.take_released() == [0] and rows.take_released() == []


def test_running_requests_with_logprobs_are_counted():
    rows = RowAllocator(3)
    curious, _ = seated(rows, 0, logprobs=2), seated(rows, 1)
    assert rows.num_with_logprobs == 1
    rows.free(curious)
    assert rows.num_with_logprobs == 0


def test_check_finds_a_lost_row():
    rows = RowAllocator(2)
    request = seated(rows, 0)
    rows.check([request])
    request.row = 1
    with pytest.raises(AssertionError, match="rows are lost"):
        rows.check([request])
