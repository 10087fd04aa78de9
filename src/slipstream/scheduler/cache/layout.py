"""Groups the cache sites of a model. Each group has its own pages; `config/cache_size.py` says how many."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.contracts.cache_spec import CacheGroup, CacheSpec


def group_sites(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Sites of one spec form a group; groups are in the order of their first sites. `specs` is indexed by site."""
    sites_of: dict[CacheSpec, list[int]] = {}
    for site, spec in enumerate(specs):
        sites_of.setdefault(spec, []).append(site)
    return tuple(CacheGroup(spec, tuple(sites)) for spec, sites in sites_of.items())
