from hand_cache import make_spec
from slipstream.config.cache_size import MIN_PREFIXES, CacheSize
from slipstream.scheduler.cache.pages import group_sites

FULL = make_spec(2, 8)
NARROW = make_spec(2, 8, window=64)
PAGE = 2 * 2 * 8 * 4 * 16


def size(specs, length=4096, seqs=8, step=128, caching=False):
    return CacheSize(group_sites(specs), length, seqs, step, caching)


def test_full_layers_alone_share_the_bytes_evenly():
    full = size([FULL, FULL])
    assert full.group_pages(10) == (10,)
    assert full.pages_in(10 * 2 * PAGE) == 10 and full.pages_in(10 * 2 * PAGE - 1) == 9
    assert full.enough == 8 * 256 + 1 and full.least == 257
    assert full.longest(257) == 4096 and full.longest(11) == 160


def test_a_window_takes_what_it_can_hold_and_leaves_the_rest_to_full_layers():
    mixed = size([FULL, NARROW, NARROW])
    held = 8 * (4 + 2) + (8 + 1) + 1  # eight windows begun and ended within a page, a step, the null page
    assert mixed.group_pages(2000) == (2000, held)
    assert mixed.group_pages(20) == (20, 20)
    assert mixed.num_bytes(2000) == (2000 + 2 * held) * PAGE
    assert mixed.pages_in((2000 + 2 * held) * PAGE) == 2000
    assert mixed.pages_in(30 * PAGE) == 10
    assert mixed.enough == 8 * 256 + 1 and mixed.longest(257) == 4096


def test_prefix_caching_keeps_windows_of_requests_that_are_gone():
    few, many = size([FULL, NARROW], seqs=1, caching=False), size([FULL, NARROW], seqs=1, caching=True)
    assert many.group_pages(2000)[1] - few.group_pages(2000)[1] == MIN_PREFIXES * 6


def test_windows_alone_need_no_more_for_a_longer_context():
    short, long = size([NARROW], length=4096), size([NARROW], length=131_072)
    assert short.least == long.least == 1 + 13  # 63 positions seen and 128 of a step, begun and ended within a page
    assert long.longest(14) == 131_072 and long.longest(13) == 12 * 16
    assert short.enough == long.enough
    assert short.group_pages(5000) == (5000,)  # no other group could use them


def test_a_model_without_layers_needs_nothing():
    assert size([]).pages_in(0) == 2 and size([]).longest(2) == 4096
