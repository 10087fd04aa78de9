import pytest

from slipstream.contracts.request import Request, Status
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.in_flight import InFlight


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
