import typing

import pytest

from hand_cache import make_spec
from slipstream.contracts.cache_spec import CacheSpec
from slipstream.contracts.step import NULL_PAGE
from slipstream.scheduler.cache.manager import KINDS
from slipstream.scheduler.cache.pages import PagedCache, WindowCache


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for_a_length(length: int, pages: int):
    assert PagedCache(0, make_spec(1, 8, 4), 8, step_tokens=8).pages_for(length) == pages


def test_match_stops_at_the_first_missing_page():
    group = PagedCache(0, make_spec(1, 8, 4), 8, step_tokens=8)
    pages = group.pool.take(4)
    for index in (0, 1, 3):
        group.pool.publish([pages[index]], [bytes([index])])
    asked = []

    def hash_at(place: int) -> bytes:
        asked.append(place)
        return bytes([place])

    assert group.match(hash_at, 4) == pages[:2]
    assert asked == [0, 1, 2]
    assert group.match(hash_at, 1) == pages[:1]


def window_group(window: int, num_pages: int = 16) -> WindowCache:
    return WindowCache(0, make_spec(1, 8, 4, window=window), num_pages, step_tokens=8)


@pytest.mark.parametrize(
    ("window", "length", "place"), [(8, 0, 0), (8, 7, 0), (8, 10, 0), (8, 11, 1), (8, 15, 2), (1, 7, 1), (1, 8, 2)]
)
def test_first_needed_page_of_a_window(window: int, length: int, place: int):
    assert window_group(window).first_needed(length) == place


def test_a_window_holds_at_most_its_positions_and_a_step():
    group = window_group(8)
    assert [group.pages_for(n) for n in (1, 4, 5, 16, 1000)] == [1, 1, 2, 4, 5]
    for committed in range(60):  # whatever a step of eight adds
        held = -(-(committed + 8) // 4) - group.first_needed(committed)
        assert held <= group.pages_for(1000)


@pytest.mark.parametrize(
    ("there", "limit", "expected"),
    [
        ("11111", 5, "00011"),
        ("00011", 5, "00011"),  # what lies before the window may be gone
        ("11101", 5, "011"),
        ("10110", 5, "0011"),
        ("11000", 5, "11"),
        ("01001", 5, ""),
        ("11111", 1, "1"),
        ("11111", 0, ""),
    ],
)
def test_a_window_matches_the_longest_prefix_whose_last_window_is_cached(there: str, limit: int, expected: str):
    group = window_group(8)
    pages = group.pool.take(5)
    for place, published in enumerate(there):
        if published == "1":
            group.pool.publish([pages[place]], [bytes([place])])
    found = group.match(lambda place: bytes([place]), limit)
    assert found == [page if kept == "1" else NULL_PAGE for page, kept in zip(pages, expected, strict=False)]


def test_every_cache_spec_has_a_kind():
    assert set(KINDS) == set(typing.get_args(CacheSpec))
