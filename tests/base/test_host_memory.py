"""Memory that a process may use, from the files of Linux as different machines have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.base.host import available_memory, total_memory

MIB = 1 << 20


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def machine(folder: Path, own_cgroup: str) -> Path:
    write(folder, {"meminfo": "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 819200 kB", "self/cgroup": own_cgroup})
    return folder


def test_without_cgroups_the_machines_memory_counts(tmp_path: Path) -> None:
    assert available_memory(tmp_path, machine(tmp_path, "")) == 800 * MIB
    assert total_memory(tmp_path, tmp_path) > 0
    assert available_memory(tmp_path, tmp_path / "nothing") > 0


@pytest.mark.parametrize("folder", ["", "user.slice/", "user.slice/app/"])
def test_the_limit_of_each_cgroup_up_to_the_root_counts(tmp_path: Path, folder: str) -> None:
    machine(tmp_path, "0::/user.slice/app")
    for each in ("", "user.slice/", "user.slice/app/"):
        write(tmp_path / "fs/cgroup", {f"{each}memory.max": "max", f"{each}memory.current": str(500 * MIB)})
    assert available_memory(tmp_path, tmp_path) == 800 * MIB
    write(tmp_path / "fs/cgroup", {f"{folder}memory.max": str(600 * MIB)})
    assert available_memory(tmp_path, tmp_path) == 100 * MIB
    assert total_memory(tmp_path, tmp_path) == 600 * MIB


def test_the_tightest_of_several_limits_counts(tmp_path: Path) -> None:
    machine(tmp_path, "0::/a/b")
    for folder, limit, used in (("a", 700, 650), ("a/b", 600, 100)):
        files = {"memory.max": limit, "memory.current": used}
        write(tmp_path / "fs/cgroup" / folder, {name: str(value * MIB) for name, value in files.items()})
    assert available_memory(tmp_path, tmp_path) == 50 * MIB
    assert total_memory(tmp_path, tmp_path) == 600 * MIB


def test_files_in_the_page_cache_are_not_in_use(tmp_path: Path) -> None:
    machine(tmp_path, "0::/a")
    files = {"memory.max": f"{400 * MIB}", "memory.current": f"{390 * MIB}"}
    write(tmp_path / "fs/cgroup/a", files | {"memory.stat": f"anon 5\ninactive_file {300 * MIB}"})
    assert available_memory(tmp_path, tmp_path) == 310 * MIB
    write(tmp_path / "fs/cgroup/a", {"memory.current": f"{800 * MIB}"})  # above a limit that was lowered
    assert available_memory(tmp_path, tmp_path) == 0


@pytest.mark.parametrize(("limit", "expected"), [(300 * MIB, 150 * MIB), (9223372036854771712, 800 * MIB)])
def test_memory_cgroups_of_version_1(tmp_path: Path, limit: int, expected: int) -> None:
    machine(tmp_path, "4:cpu,cpuacct:/x\n5:memory:/x")
    files = {"memory.limit_in_bytes": f"{limit}", "memory.usage_in_bytes": f"{200 * MIB}"}
    write(tmp_path / "fs/cgroup/memory/x", files | {"memory.stat": f"cache 9\ntotal_inactive_file {50 * MIB}"})
    assert available_memory(tmp_path, tmp_path) == expected
