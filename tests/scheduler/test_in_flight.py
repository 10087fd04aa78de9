import numpy as np
import pytest

from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import StepResult
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.outputs import InFlight, Launched


def running(admission: int, pending: int) -> Request:
    request = Request("a", [1], SamplingParams(), max_length=9)
    request.status, request.admission, request.pending = Status.RUNNING, admission, pending
    return request


def test_results_belong_to_the_admission_that_was_launched():
    flights, request = InFlight(), running(admission=3, pending=1)
    flights.launch(0, [request])
    flights.launch(1, [])
    request.admission = 8
    oldest = flights.oldest()
    assert (oldest.step, oldest.requests, oldest.admissions) == (0, [request], [3])
    assert len(flights) == 1


def test_check_counts_tokens_in_flight_per_request():
    flights, request = InFlight(), running(admission=0, pending=2)
    flights.launch(0, [request])
    with pytest.raises(AssertionError, match="1 tokens are in flight"):
        flights.check([request])
    flights.launch(1, [request])
    flights.check([request])


def test_check_finds_a_request_admitted_again_too_early():
    flights, request = InFlight(), running(admission=0, pending=1)
    flights.launch(0, [request])
    request.admission = 1
    with pytest.raises(AssertionError, match="admitted again while a token of admission 0 is in flight"):
        flights.check([request])


def test_a_result_without_a_plan_is_an_assertion_error():
    with pytest.raises(AssertionError, match="no plan is in flight"):
        InFlight().oldest()


@pytest.mark.parametrize("drawn", [None, [1, 3, 2]])
def test_a_row_that_sits_out_draws_nothing_and_does_not_fail(drawn):
    """What it drew without its mask is dropped, a failure too; others fail."""
    rows = [running(admission, pending=1) for admission in range(3)]
    result = StepResult(
        np.zeros(3 if drawn is None else 6, np.int32),
        np.array([True, True, False]),
        None,
        counts=None if drawn is None else np.array([0, 2, 1], np.int32),
    )
    launched = Launched(0, rows, [0, 1, 2], drawn, [], [], [], sitting=[rows[0], rows[2]])
    num_drawn, found = launched.without_sitting(result)
    assert num_drawn == (drawn or [1, 1, 1])
    assert found.counts.tolist() == ([0, 0, 0] if drawn is None else [0, 2, 0])
    assert found.failed.tolist() == [False, True, False]
    assert result.failed.tolist() == [True, True, False], "the result of the step is as it was"
