"""Counts the CPUs that this process may use: its affinity, its cgroup quota, and cores instead of hardware threads.

A model runs one thread per physical core: a second thread on a core shares its vector units, and a thread beyond the
quota is stopped in the middle of a step while the others wait for it. All files are those of Linux; elsewhere
`os.cpu_count` is the answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slipstream.config.cgroups import PROC, SYS, cgroups_of, read_text

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
