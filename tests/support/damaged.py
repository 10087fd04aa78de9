"""Damaged copies of a model's files: other bits, cuts, and JSON with other values."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Damage = Callable[[bytes, random.Random], bytes]

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**40, -(10**30), 0.5, -0.5, 1e308, float("nan"), float("inf"), "",
    "x", "\ud800", "a" * 5000, [], {}, [0], [None], [[]], {"a": 1}, [1] * 2000, "silu", [2**70], {"0": {}}, "1",
)  # fmt: skip
_NUMBERS = (0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def flip(data: bytes, rng: random.Random) -> bytes:
    """Some bits are others, most of them near the beginning."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        damaged[_place(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def number(data: bytes, rng: random.Random) -> bytes:
    """Eight bytes are another number, as lengths and offsets in headers are."""
    place = _place(data, rng)
    return (data[:place] + rng.choice(_NUMBERS).to_bytes(8, "little") + data[place + 8 :])[: len(data)]


def _place(data: bytes, rng: random.Random) -> int:
    return rng.randrange(min(rng.choice((16, 64, 1024, len(data))), len(data)))


def value(data: bytes, rng: random.Random) -> bytes:
    """JSON in which one value at any depth is another, or is gone."""
    found = json.loads(data)
    places = _places(found)
    place, key = rng.choice(places[: rng.choice((10, 100, len(places)))])  # a vocabulary has many, at its end
    old = place[key]
    match rng.randrange(5):
        case 0:
            del place[key]
        case 1:
            place[key] = rng.choice(([old], {"x": old}, str(old), [old, old]))
        case 2 if isinstance(old, int):
            place[key] = rng.choice((-old, old * 1000, old + 1))
        case _:
            place[key] = rng.choice(_VALUES)
    return json.dumps(found).encode()


def _places(found: Any) -> list[tuple[Any, Any]]:
    """Containers and keys of all values, the outer ones first."""
    places: list[tuple[Any, Any]] = []
    level = [found]
    while level:
        inside = [(outer, key) for outer in level for key in (outer if isinstance(outer, dict) else range(len(outer)))]
        places += inside
        level = [outer[key] for outer, key in inside if isinstance(outer[key], dict | list)]
    return places


def header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file in whose header one value is another."""
    end = 8 + int.from_bytes(data[:8], "little")
    damaged = value(data[8:end], rng)
    return len(damaged).to_bytes(8, "little") + damaged + data[end:]


OF_BYTES: tuple[Damage, ...] = (flip, cut, number)
OF_JSON: tuple[Damage, ...] = (value, value, value, flip, cut)
OF_SAFETENSORS: tuple[Damage, ...] = (header, header, flip, cut, number)
