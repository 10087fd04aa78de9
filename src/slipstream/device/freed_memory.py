"""Freed host memory stays with the process, so that steps on a CPU do not fault in the same pages again and again.

For torch on the GNU C library's allocator; `slipstream/__init__.py` sets the option of the allocator in ARM wheels.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of options in malloc.h of the GNU C library
_KEPT = 1 << 29  # bytes at the end of a heap that are not given back to the system
# Heaps of threads are 64 MiB each. The last one is unmapped when it is empty and the one before it has this much room,
# whatever _KEPT says. With 64 MiB none would ever be unmapped.
_ROOM = 48 << 20
_LARGE = (1 << 30, 1 << 25)  # larger tensors have pages of their own, given back at once; old libraries take the second


def keep_freed_memory() -> None:
    """For the whole process. Settings by MALLOC_ variables of the environment stay; other C libraries have no such
    options."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return
    set_option(_TRIM_THRESHOLD, _KEPT)
    set_option(_TOP_PAD, _ROOM)
    for size in _LARGE:
        if set_option(_MMAP_THRESHOLD, size):
            break
