"""ProcessStats: what /proc says about a process. Linux only: elsewhere nothing is known."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class ProcessStats(msgspec.Struct, frozen=True):
    resident: int  # bytes
    virtual: int  # bytes
    cpu_seconds: float
    start_time: float  # seconds since 1970
    open_files: int
    max_files: int


def read_process(pid: int) -> ProcessStats | None:
    """None if there is no such process, or no /proc."""
    folder = Path("/proc") / str(pid)
    try:
        fields = (
            (folder / "stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        )  # from the third field on: the process name before them may contain anything
        limits = (folder / "limits").read_text(encoding="ascii").splitlines()
        open_files = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    user, system, started, virtual, resident = (int(fields[index]) for index in (11, 12, 19, 20, 21))
    soft = next(line.split()[3] for line in limits if line.startswith("Max open files"))
    return ProcessStats(
        resident=resident * page,
        virtual=virtual,
        cpu_seconds=(user + system) / ticks,
        start_time=_boot_time() + started / ticks,
        open_files=open_files,
        max_files=int(soft) if soft.isdigit() else -1,
    )


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
