from __future__ import annotations

import math
import random

import pytest

from count_calls import count_calls
from slipstream.text.detokenizer import StopMatcher


def run(stops: list[str], increments: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    out = [matcher.push(text) for text in increments]
    return [*out, matcher.finish()], matcher.matched


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def test_text_passes_at_once_when_nothing_can_stop_it() -> None:
    assert run([], ["ab", "c"]) == (["ab", "c", ""], None)
    assert run(["xyz"], ["ab", "c"]) == (["ab", "c", ""], None)


def test_a_stop_over_three_increments_is_never_shown() -> None:
    assert run(["STOP"], ["hi S", "TO", "P there"]) == (["hi ", "", "", ""], "STOP")


def test_the_stop_is_kept_when_asked_and_what_follows_is_not() -> None:
    assert run(["STOP"], ["hi S", "TOP there", "more"], include=True) == (["hi ", "STOP", "", ""], "STOP")


def test_a_false_beginning_is_released() -> None:
    assert run(["STOP"], ["ST", "ILL", " S"]) == (["", "STILL", " ", "S"], None)


def test_a_beginning_inside_a_beginning_is_held() -> None:
    assert run(["aab"], ["aa", "ab", "c"]) == (["", "a", "", ""], "aab")


def test_the_stop_that_is_complete_first_wins_in_any_order_of_the_list() -> None:
    for stops in (["late", "xab"], ["xab", "late"]):
        assert run(stops, ["--xab late"]) == (["--", ""], "xab")


def test_of_two_that_end_together_the_longer_wins() -> None:
    for stops in (["b", "aab"], ["aab", "b"]):
        assert run(stops, ["xaab"]) == (["x", ""], "aab")


def test_finish_gives_what_was_held_once() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("a<en") == "a"
    assert matcher.finish() == "<en"
    assert matcher.finish() == ""


@pytest.mark.parametrize("include", [False, True])
def test_any_cutting_gives_the_same_text(include: bool) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choice("ab<") for _ in range(rng.randrange(30)))
        stops = ["".join(rng.choice("ab<") for _ in range(rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        increments = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected, stop = reference(text, stops)
        if include and stop:
            expected += stop
        shown, matched = run(stops, increments, include)
        assert ("".join(shown), matched) == (expected, stop), (text, stops, increments)


def num_calls(stops: list[str], text: str, limit: float = math.inf) -> int:
    """Calls of Python and C functions for matching the text character by character; ends above the limit."""
    matcher = StopMatcher(stops)
    with count_calls() as calls:
        for character in text:
            matcher.push(character)
            if calls.number > limit:
                break
    assert matcher.matched is None
    return calls.number


ENDS = [chr(0x4E00 + index) for index in range(128)]


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["a" * length for length in range(897, 1025)], ("a" * 896 + "b") * 5),
        (["a" * 1000 + end for end in ENDS], "a" * 5000),
        (["a" * length + end for length, end in zip(range(1, 1000, 8), ENDS, strict=False)], ("a" * 992 + "b") * 5),
        (["a" * length + "b" * (1000 - length) for length in range(1, 1000, 8)], ("a" * 999 + "b" * 6) * 5),
        (["ab" * 499 + "a" + end for end in ENDS], "ab" * 1000 + "b" + "ba" * 1500),
    ],
)
def test_the_steps_per_character_do_not_grow_with_the_stop_strings(stops: list[str], text: str) -> None:
    limit = 10 * num_calls(["xyz"], text)
    assert num_calls(stops, text, limit) < limit
