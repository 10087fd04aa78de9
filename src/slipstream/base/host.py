"""Counts the CPUs that this process may use: its affinity, its cgroup quota, and cores instead of hardware threads.

A model runs one thread per physical core: a second thread on a core shares its vector units, and a thread beyond the
quota is stopped in the middle of a step while the others wait for it. All files are those of Linux; elsewhere
`os.cpu_count` is the answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Finds the cgroups of this process, versions 1 and 2, from its own up to the root. A limit of each of them applies.
#
# In a container the files of /sys/fs/cgroup may be those of the container's cgroup, while /proc/self/cgroup has the
# path on the host: folders of such a path do not exist, and the root has the limits.

SYS, PROC = Path("/sys"), Path("/proc")


class Cgroup(NamedTuple):
    version: int
    folder: Path

    def read(self, name: str) -> str:
        return read_text(self.folder / name)


def cgroups_of(controller: str, sys: Path = SYS, proc: Path = PROC) -> Iterator[Cgroup]:
    """The cgroups of this process that `controller` (cpu, memory) limits, the innermost first."""
    root = sys / "fs/cgroup"
    for text in read_text(proc / "self/cgroup").splitlines():
        _, _, rest = text.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        version, top = (1, root / controller) if controllers else (2, root)
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            yield Cgroup(version, top.joinpath(*parts[:depth]))


def read_text(path: Path) -> str:
    """Empty if the file cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


_SLOW = 0.75  # cores below this share of the fastest core's capacity are efficiency cores


def num_cpus(sys: Path = SYS, proc: Path = PROC) -> int:
    """Hardware threads in the affinity mask of this process, within its cgroup quota; at least 1."""
    return _within_quota(len(_affinity()), sys, proc)


def num_cores(sys: Path = SYS, proc: Path = PROC) -> int:
    """Physical cores in the affinity mask of this process, without efficiency cores of hybrid processors, within its
    cgroup quota; at least 1."""
    cpus = _affinity()
    capacities = {cpu: _capacity(cpu, sys) for cpu in cpus}
    fast = [cpu for cpu in cpus if capacities[cpu] >= _SLOW * max(capacities.values())]
    return _within_quota(len({_siblings(cpu, sys) for cpu in fast}), sys, proc)


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(cpu: int, sys: Path) -> str:
    """Names the core of a CPU: the list of its hardware threads."""
    return read_text(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _capacity(cpu: int, sys: Path) -> float:
    """Relative speed: the scheduler's capacity (ARM), or the highest clock; 1 if the system gives neither."""
    folder = sys / f"devices/system/cpu/cpu{cpu}"
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        if (text := read_text(folder / name)).isdecimal():
            return float(text)
    return 1.0


def _within_quota(count: int, sys: Path, proc: Path) -> int:
    return max(1, min([count, *(int(quota) for quota in _quotas(sys, proc))]))


def _quotas(sys: Path, proc: Path) -> Iterator[float]:
    """CPUs that each cgroup of this process allows."""
    for cgroup in cgroups_of("cpu", sys, proc):
        if cgroup.version == 2:
            quota, _, period = cgroup.read("cpu.max").partition(" ")
        else:
            quota, period = cgroup.read("cpu.cfs_quota_us"), cgroup.read("cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1: no limit
            yield int(quota) / int(period)


# Host memory that this process may use: of the machine, within the limits of its cgroups.


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
