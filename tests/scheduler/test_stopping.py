from slipstream.contracts.request import FinishReason, Request
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.outputs import check_stop


def request(output: list[int], max_length: int = 9, min_tokens: int = 0) -> Request:
    made = Request("a", [1, 2], SamplingParams(min_tokens=min_tokens), stop_ids=(7, 8), max_length=max_length)
    made.tokens += output
    return made


def test_a_request_without_a_stop_continues():
    assert check_stop(request([5]), 1) == (1, None, None)


def test_a_stop_token_ends_the_request_and_is_returned():
    assert check_stop(request([5, 8]), 1) == (1, FinishReason.STOP, 8)


def test_a_stop_token_does_not_count_before_min_tokens():
    assert check_stop(request([5, 7], min_tokens=3), 1) == (1, None, None)
    assert check_stop(request([5, 5, 7], min_tokens=3), 1) == (1, FinishReason.STOP, 7)


def test_the_maximum_length_ends_the_request():
    assert check_stop(request([5, 5], max_length=4), 1) == (1, FinishReason.LENGTH, None)


def test_a_stop_token_takes_precedence_over_the_length():
    assert check_stop(request([5, 7], max_length=4), 1) == (1, FinishReason.STOP, 7)


def test_the_length_ends_the_request_on_a_stop_token_before_min_tokens():
    assert check_stop(request([7], max_length=3, min_tokens=2), 1) == (1, FinishReason.LENGTH, None)


def test_the_first_of_several_stops_counts():
    assert check_stop(request([5, 5, 7, 8], max_length=20), 3) == (2, FinishReason.STOP, 7)
    assert check_stop(request([5, 7, 5, 5, 5], max_length=6, min_tokens=3), 4) == (3, FinishReason.LENGTH, None)
    assert check_stop(request([7, 5, 5], max_length=20), 2) == (2, None, None), "a token before the new ones"
