"""Sizes of the second cache tier and of the device buffers through which its pages are copied."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import CacheGroup

NUM_REGIONS = 2
"""Device buffers for pages on their way: one is filled while the other is emptied."""

REGION_BYTES = 2**26
"""Bytes of one of them; at least a page."""

HISTORY_BYTES = 4
"""Bytes per position of token ids, which drafts are found in and which travel with the pages of a group."""


def tier_slots(tier_bytes: int, groups: Sequence[CacheGroup], group_pages: Sequence[int]) -> tuple[int, ...]:
    """Slots of each group: the tier is divided among the groups as the device's cache is."""
    device_bytes = sum(group.bytes_per_page * num for group, num in zip(groups, group_pages, strict=True))
    return tuple(tier_bytes * num // device_bytes for num in group_pages)


def region_pages(group: CacheGroup) -> int:
    """Pages of a group that are copied at once."""
    return max(1, REGION_BYTES // group.bytes_per_page)


def region_bytes(groups: Sequence[CacheGroup]) -> int:
    """Device bytes of one region: it takes pages of any group, with their token ids."""
    return max(region_pages(group) * (group.bytes_per_page + HISTORY_BYTES * group.spec.page_size) for group in groups)
