"""Host memory that this process may use: of the machine, within the limits of its cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slipstream.config.cgroups import PROC, SYS, Cgroup, cgroups_of, read_text


def total_memory(sys: Path = SYS, proc: Path = PROC) -> int:
    """Bytes of the machine, or the smallest limit of this process's cgroups."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for _, limit in _limits(sys, proc))])


def available_memory(sys: Path = SYS, proc: Path = PROC) -> int:
    """Bytes that can be allocated without swapping: free memory and page cache that the kernel can drop."""
    free = _value(read_text(proc / "meminfo"), "MemAvailable:") * 1024
    if not free:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *(limit - _used(cgroup) for cgroup, limit in _limits(sys, proc))]))


def _limits(sys: Path, proc: Path) -> Iterator[tuple[Cgroup, int]]:
    for cgroup in cgroups_of("memory", sys, proc):
        limit = cgroup.read("memory.max" if cgroup.version == 2 else "memory.limit_in_bytes")
        if limit.isdecimal():  # "max": no limit
            yield cgroup, int(limit)


def _used(cgroup: Cgroup) -> int:
    """Without files in the page cache that were not used lately: they are dropped when memory is short."""
    current, cached = ("memory.current", "inactive_file") if cgroup.version == 2 else _VERSION_1
    used = cgroup.read(current)
    return max(0, int(used) - _value(cgroup.read("memory.stat"), cached)) if used.isdecimal() else 0


_VERSION_1 = ("memory.usage_in_bytes", "total_inactive_file")


def _value(text: str, name: str) -> int:
    """The number after a name at the beginning of a row of text; 0 if it is not there."""
    found = (row.split() for row in text.splitlines())
    return next((int(words[1]) for words in found if len(words) > 1 and words[0] == name), 0)
