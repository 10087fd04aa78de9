from slipstream.cache_spec import CacheGroup, PagedSpec
from slipstream.scheduler.cache.layout import bytes_for_pages, group_layers, pages_for_length, pages_in_bytes

WIDE = PagedSpec(num_kv_heads=4, head_dim=8, itemsize=2, page_size=16)
SLIM = PagedSpec(num_kv_heads=1, head_dim=8, itemsize=2, page_size=16)


def test_layers_of_one_spec_form_a_group():
    assert group_layers([WIDE, SLIM, WIDE]) == (CacheGroup(WIDE, (0, 2)), CacheGroup(SLIM, (1,)))
    assert group_layers([]) == ()


def test_bytes_and_pages_are_inverse():
    groups = group_layers([WIDE, SLIM, WIDE])
    one = 2 * 16 * 8 * 2 * (4 + 4 + 1)  # keys and values of 16 positions over nine heads
    assert bytes_for_pages(groups, 10) == 10 * one
    assert pages_in_bytes(groups, 10 * one) == 10
    assert pages_in_bytes(groups, 10 * one - 1) == 9
    assert pages_in_bytes((), 0) >= 2


def test_pages_for_a_length_count_the_null_page():
    groups = group_layers([WIDE])
    assert [pages_for_length(groups, n) for n in (1, 16, 17)] == [2, 2, 3]
