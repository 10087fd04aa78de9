"""Cases of a test that repeat, with other values, what its remaining cases check: `scripts/test` leaves them out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that runs with --slow only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def seeds(number: int, kept: int) -> list[Any]:
    """Seeds of a random test, of which the first `kept` run without --slow."""
    return [seed if seed < kept else slow(seed) for seed in range(number)]


def mark_repeats(items: list[pytest.Item]) -> None:
    """Marks every second combination of values as slow where a test is marked `every_second` of its parameters: each
    value is in combinations that are not."""
    places: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)  # by test, parameter and identity of the value
    for item in items:
        pair = item.get_closest_marker("every_second")
        if pair is None or not isinstance(item, pytest.Function):
            continue
        total = 0
        for name in pair.args:
            of_values = places[item.nodeid.partition("[")[0], name]
            total += of_values.setdefault(id(item.callspec.params[name]), len(of_values))
        if total % 2:
            item.add_marker("slow")
