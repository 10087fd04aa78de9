"""How the cache's memory is laid out: layers into groups, bytes into pages.

Each group has its own pages, and all groups have the same number of them, the null page counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import CacheGroup, CacheSpec


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Layers of one spec form a group; groups come in the order of their first layers. `specs` is in layer order."""
    layers_of: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in layers_of.items())


def bytes_for_pages(groups: Sequence[CacheGroup], num_pages: int) -> int:
    return num_pages * sum(group.bytes_per_page for group in groups)


def pages_in_bytes(groups: Sequence[CacheGroup], num_bytes: int) -> int:
    """Pages of each group that fit. A model without groups needs no memory and gets the smallest pool there is."""
    width = bytes_for_pages(groups, 1)
    return num_bytes // width if width else 2


def pages_for_length(groups: Sequence[CacheGroup], length: int) -> int:
    """Pages each group needs so that one request of this length fits alone, the null page counted."""
    return 1 + max((-(-length // group.spec.page_size) for group in groups), default=1)
