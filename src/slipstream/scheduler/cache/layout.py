"""How the cache is laid out: layers into groups. Each group has its own pages; `config/cache_size.py` says how many."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import CacheGroup, CacheSpec


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Layers of one spec form a group; groups come in the order of their first layers. `specs` is in layer order."""
    layers_of: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in layers_of.items())
