"""Sizes of the second cache tier and of the device buffers through which its pages are copied."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import CacheGroup
from slipstream.config.config import CacheConfig, StateConfig

NUM_REGIONS = 2
"""Device buffers for pages on their way: one is filled while the other is emptied."""

REGION_BYTES = 2**26
"""Bytes of one of them; at least a page."""

HISTORY_BYTES = 4
"""Bytes per position of token ids, which drafts are found in and which travel with the pages of a group."""


def tier_slots(config: CacheConfig) -> tuple[int, ...]:
    """Slots of each group, and last those of checkpoints of recurrent states, if there are any: the tier is divided as
    the device's cache is."""
    sizes = [(group.bytes_per_page, num) for group, num in zip(config.groups, config.group_pages, strict=True)]
    if config.states is not None:
        sizes.append((config.states.checkpoint_bytes, config.states.num_checkpoints))
    device_bytes = sum(size * num for size, num in sizes)
    return tuple(config.tier_bytes * num // device_bytes for _, num in sizes)


def region_pages(group: CacheGroup) -> int:
    """Pages of a group that are copied at once."""
    return max(1, REGION_BYTES // group.bytes_per_page)


def region_checkpoints(states: StateConfig) -> int:
    """Checkpoints that are copied at once."""
    return max(1, REGION_BYTES // states.checkpoint_bytes)


def mirror_bytes(config: CacheConfig) -> int:
    """Upper bound of the device bytes of all slots, with the token ids of their positions."""
    num_pages = max((config.tier_bytes // group.bytes_per_page for group in config.groups), default=0)
    return config.tier_bytes + num_pages * HISTORY_BYTES * config.page_size


def region_bytes(groups: Sequence[CacheGroup], states: StateConfig | None = None) -> int:
    """Device bytes of one region: it takes pages of any group, with their token ids, or checkpoints."""
    pages = [region_pages(group) * (group.bytes_per_page + HISTORY_BYTES * group.spec.page_size) for group in groups]
    checkpoints = [] if states is None else [region_checkpoints(states) * states.checkpoint_bytes]
    return max([*pages, *checkpoints], default=0)
