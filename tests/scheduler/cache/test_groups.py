import pytest

from slipstream.scheduler.cache.groups import FullGroup


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for_a_length(length: int, pages: int):
    assert FullGroup(4, 8).pages_for(length) == pages


def test_match_stops_at_the_first_page_that_is_missing_and_asks_no_further():
    group = FullGroup(4, 8)
    pages = group.pool.take(4)
    for index in (0, 1, 3):
        group.pool.publish(pages[index], bytes([index]))
    asked = []

    def hash_at(place: int) -> bytes:
        asked.append(place)
        return bytes([place])

    assert group.match(hash_at, 4) == pages[:2]
    assert asked == [0, 1, 2]
    assert group.match(hash_at, 1) == pages[:1]
