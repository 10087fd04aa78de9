"""The number of CPUs and cores, from the files of Linux as different machines have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.base import host
from slipstream.base.host import num_cores, num_cpus


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch):
    def use(*numbers: int) -> None:
        monkeypatch.setattr(host, "_affinity", lambda: list(numbers))

    return use


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def cpu_file(folder: Path, cpu: int, name: str, text: str) -> None:
    write(folder / f"devices/system/cpu/cpu{cpu}" / name, text)


def test_without_any_file_the_affinity_counts(affinity, tmp_path: Path) -> None:
    affinity(0, 2, 5)
    assert num_cpus(tmp_path, tmp_path) == num_cores(tmp_path, tmp_path) == 3


def test_two_threads_of_a_core_are_one_core(affinity, tmp_path: Path) -> None:
    for cpu in range(8):
        cpu_file(tmp_path, cpu, "topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    affinity(*range(8))
    assert (num_cpus(tmp_path, tmp_path), num_cores(tmp_path, tmp_path)) == (8, 4)
    affinity(0, 4, 1)  # both threads of a core, and one of another
    assert (num_cpus(tmp_path, tmp_path), num_cores(tmp_path, tmp_path)) == (3, 2)


@pytest.mark.parametrize("name", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_efficiency_cores_do_not_count_beside_fast_ones(affinity, tmp_path: Path, name: str) -> None:
    for cpu, speed in enumerate((1000, 1024, 400, 400, 400, 400)):  # fast cores differ a little
        cpu_file(tmp_path, cpu, name, str(speed))
    affinity(*range(6))
    assert (num_cpus(tmp_path, tmp_path), num_cores(tmp_path, tmp_path)) == (6, 2)
    affinity(2, 3, 4)  # only slow ones are allowed
    assert num_cores(tmp_path, tmp_path) == 3


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 8), ("350000 100000", 3), ("20000 100000", 1)])
def test_the_quota_of_a_cgroup_limits_both(affinity, tmp_path: Path, limit: str, expected: int) -> None:
    affinity(*range(8))
    write(tmp_path / "self/cgroup", "0::/kubepods/pod1")
    write(tmp_path / "fs/cgroup/kubepods/pod1/cpu.max", limit)
    assert num_cpus(tmp_path, tmp_path) == num_cores(tmp_path, tmp_path) == expected


def test_the_smallest_quota_on_the_way_to_the_root_counts(affinity, tmp_path: Path) -> None:
    affinity(*range(8))
    write(tmp_path / "self/cgroup", "0::/a/b")
    write(tmp_path / "fs/cgroup/a/cpu.max", "200000 100000")
    write(tmp_path / "fs/cgroup/a/b/cpu.max", "600000 100000")
    assert num_cores(tmp_path, tmp_path) == 2


def test_a_container_sees_its_cgroup_as_the_root(affinity, tmp_path: Path) -> None:
    """The path of the process may be one of the host, which the container does not have."""
    affinity(*range(8))
    write(tmp_path / "self/cgroup", "0::/system.slice/docker-1.scope")
    write(tmp_path / "fs/cgroup/cpu.max", "400000 100000")
    assert num_cores(tmp_path, tmp_path) == 4


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("250000", 2)])
def test_cgroups_of_version_1(affinity, tmp_path: Path, quota: str, expected: int) -> None:
    affinity(*range(8))
    write(tmp_path / "self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x")
    write(tmp_path / "fs/cgroup/cpu/x/cpu.cfs_quota_us", quota)
    write(tmp_path / "fs/cgroup/cpu/x/cpu.cfs_period_us", "100000")
    assert num_cores(tmp_path, tmp_path) == expected


def test_this_machine_has_at_least_one() -> None:
    assert 1 <= num_cores() <= num_cpus()
