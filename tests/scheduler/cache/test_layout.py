from slipstream.cache_spec import CacheGroup, PagedSpec
from slipstream.scheduler.cache.layout import group_layers

WIDE = PagedSpec(num_kv_heads=4, head_dim=8, itemsize=2, page_size=16)
SLIM = PagedSpec(num_kv_heads=1, head_dim=8, itemsize=2, page_size=16)


def test_layers_of_one_spec_form_a_group():
    assert group_layers([WIDE, SLIM, WIDE]) == (CacheGroup(WIDE, (0, 2)), CacheGroup(SLIM, (1,)))
    assert group_layers([]) == ()
