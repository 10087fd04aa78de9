"""The C library's heap, where it is glibc's: what large texts took is given back to the system.

glibc keeps what was freed in an arena for each thread. A tokenizer allocates a hundred bytes a character, in small
blocks, so a front end that had read a few large texts would hold gigabytes until it ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE = 2**20  # bytes: blocks from this size on are mapped on their own, and unmapped when they are freed
_ARENAS = 4


def bound_heap() -> None:
    """For a front end's process, before it has threads."""
    if (mallopt := _function("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Returns free memory to the system. Takes milliseconds: it looks through all that is allocated."""
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
        return found
    except (AttributeError, OSError, TypeError):  # another C library
        return None
