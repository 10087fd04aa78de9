"""Finds the cgroups of this process, versions 1 and 2, from its own up to the root. A limit of each of them applies.

In a container the files of /sys/fs/cgroup may be those of the container's cgroup, while /proc/self/cgroup has the path
on the host: folders of such a path do not exist, and the root has the limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
