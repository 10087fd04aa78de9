"""Reads values of options that several options share: positive numbers, and sizes in bytes."""

from __future__ import annotations

import re

from slipstream.errors import InvalidOption

_MAX = {"num_threads": 1024, "max_num_seqs": 65_536}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def positive(name: str, value: int | str | None, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    limit = _MAX.get(name)
    if limit is not None and isinstance(value, int) and value > limit:
        raise InvalidOption(f"{name} is {value}; give at most {limit}")
    if not isinstance(value, int) or value < 1:
        raise InvalidOption(f"{name} is {value!r}; give a whole number from 1 up")
    return value


def parse_bytes(value: int | str) -> int:
    """A number of bytes, or a text such as 512MiB or 2GB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?)B?\s*", str(value).upper())
    if match is None or match[2] == "I" or (size := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise InvalidOption(f"{value!r} is not a size; give bytes, or a text like 512MiB or 2GiB")
    return size
