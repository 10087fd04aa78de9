"""Arrays of strings in a GGUF file. A string is its length, 8 bytes, and then its text in UTF-8.

A vocabulary has hundreds of thousands of strings, so numpy finds and decodes them together. A length from 1 to 255 is a
byte and seven zeros, and a text rarely has zeros: the zeros in a part of the file give the offsets of all its strings.
Each offset is checked against the end of the string before it. Where that fails, strings are read one by one.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_WINDOW = 1 << 18  # bytes in which zeros are searched at a time
_PREFIX = 8  # bytes of a length
_length_at = struct.Struct("<Q").unpack_from


class StringOffsets(NamedTuple):
    """Start and end of each text of an array, in bytes from the start of the file."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def find_strings(data: mmap.mmap, offset: int, count: int) -> StringOffsets | None:
    """The offsets of `count` strings, the first of which begins at `offset`; None if the file ends before the last."""
    view = np.frombuffer(data, np.uint8)
    offsets = StringOffsets(np.empty(count, np.int64), np.empty(count, np.int64))
    num_found, num_single = 0, 1
    while num_found < count:
        starts, ends = _find_short(view, offset)
        num = min(len(starts), count - num_found)
        if num:
            offsets.starts[num_found : num_found + num] = starts[:num]
            offsets.ends[num_found : num_found + num] = ends[:num]
            num_found, offset = num_found + num, int(ends[num - 1])
            continue
        for index in range(num_found, min(num_found + num_single, count)):
            start = offset + _PREFIX
            if start > len(data) or (offset := start + _length_at(data, offset)[0]) > len(data):
                return None
            offsets.starts[index], offsets.ends[index] = start, offset
        num_found = min(num_found + num_single, count)
        num_single *= 2  # so that a file of empty or long strings is not searched again for each of them
    return offsets


def decode_strings(data: mmap.mmap, offsets: StringOffsets) -> list[str]:
    """Raises UnicodeDecodeError if a text is not UTF-8; `first_bad_string` finds it."""
    if not len(offsets.starts):
        return []
    first = int(offsets.starts[0]) - _PREFIX
    # a copy with one zero before each text instead of its length
    joined = np.frombuffer(data, np.uint8)[first : int(offsets.ends[-1])].copy()
    prefixes = offsets.starts - (first + _PREFIX)
    joined[prefixes + (_PREFIX - 1)] = 0
    kept = np.ones(len(joined), np.bool_)
    for byte in range(_PREFIX - 1):
        kept[prefixes + byte] = False
    strings = joined[kept].tobytes().decode().split("\0")
    if len(strings) == len(offsets.starts) + 1:
        return strings[1:]
    return [data[start:end].decode() for start, end in zip(*offsets, strict=True)]  # a text contains a zero


def first_bad_string(data: mmap.mmap, offsets: StringOffsets) -> int:
    """The first string that is not UTF-8."""
    for index, (start, end) in enumerate(zip(*offsets, strict=True)):
        try:
            data[start:end].decode()
        except UnicodeDecodeError:
            return index
    raise AssertionError("all strings are UTF-8")


def _find_short(view: NDArray[np.uint8], offset: int) -> StringOffsets:
    """The offsets of the strings of 1 to 255 bytes at `offset`, up to the first other one or to the window's end."""
    window = view[offset : offset + _WINDOW]
    zeros = np.flatnonzero(window == 0)
    zeros = zeros[: len(zeros) // 7 * 7].reshape(-1, 7)
    lengths_at, starts = zeros[:, 0] - 1, zeros[:, 6] + 1
    ends = starts + window[lengths_at]  # the first may be -1: it is refused below
    begins = np.concatenate(([0], ends[:-1]))  # of each string, if the one before it is right
    right = (lengths_at == begins[: len(starts)]) & (starts - lengths_at == _PREFIX) & (ends <= len(view) - offset)
    num = len(right) if right.all() else int(right.argmin())
    return StringOffsets(starts[:num] + offset, ends[:num] + offset)
