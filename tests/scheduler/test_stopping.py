import random

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


def ends(output: list[int], **detection: int) -> int | None:
    """How many tokens are output before the request ends for a repetition; None: it goes on."""
    made = Request("a", [5, 5], SamplingParams(repetition_detection=detection), max_length=10_000)
    for place, token in enumerate(output):
        made.tokens.append(token)
        if check_stop(made, 1)[1] is FinishReason.REPETITION:
            return place + 1
    return None


def is_repeated(tokens: list[int], sizes: range, count: int) -> bool:
    return any(len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count for size in sizes)


def test_a_pattern_that_comes_often_enough_ends_the_request():
    assert ends([1, 2, 3, 1, 2, 3, 1, 2, 3], max_pattern_size=3, min_count=3) == 9
    assert ends([9, 1, 2, 1, 2, 7], max_pattern_size=4, min_count=2) == 5
    assert ends([4, 4, 4, 4], max_pattern_size=1, min_count=4) == 4
    assert ends([5, 5], max_pattern_size=1, min_count=3) is None, "the prompt is no part of it"
    assert ends([4, 4, 4, 4], max_pattern_size=3, min_pattern_size=2, min_count=2) == 4
    assert ends([1, 2, 3, 1, 2, 3], max_pattern_size=2, min_count=2) is None
    assert ends([1] * 50) is None, "it is off without a size"


def test_repetitions_are_those_of_the_definition():
    rng = random.Random(3)
    for _ in range(200):
        low = rng.randint(1, 4)
        sizes, count = range(low, rng.randint(low, 7) + 1), rng.randint(2, 4)
        output = [rng.choice([0, 0, 1, 1, 2]) for _ in range(60)]
        found = ends(output, max_pattern_size=sizes[-1], min_pattern_size=low, min_count=count)
        wanted = (end for end in range(1, 61) if is_repeated(output[:end], sizes, count))
        assert found == next(wanted, None), (output, sizes, count)


def test_several_new_tokens_are_cut_behind_the_repetition():
    params = SamplingParams(repetition_detection={"max_pattern_size": 2, "min_count": 2}, min_tokens=5)
    made = Request("a", [1], params, stop_ids=(7,), max_length=99)
    made.tokens += [3, 4, 3, 4]
    assert check_stop(made, 4) == (4, None, None), "min_tokens come first"
    made.tokens += [3, 4, 7]
    assert check_stop(made, 3) == (1, FinishReason.REPETITION, None)
