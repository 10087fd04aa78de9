from hand_cache import make_spec
from slipstream.contracts.cache_spec import CacheGroup
from slipstream.scheduler.cache.pages import group_sites

WIDE = make_spec(4, 8)
SLIM = make_spec(1, 8)


def test_sites_of_one_spec_form_a_group():
    assert group_sites([WIDE, SLIM, WIDE]) == (CacheGroup(WIDE, (0, 2)), CacheGroup(SLIM, (1,)))
    assert group_sites([]) == ()
