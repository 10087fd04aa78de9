"""Groups layers by cache spec. Each group has pages of its own; `config/cache_size.py` computes how many."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import CacheGroup, CacheSpec


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Layers with equal specs form a group. `specs` is in layer order; groups are ordered by their first layers."""
    layers_of: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in layers_of.items())
