"""The front end is killed under load: all replicas, or the core and its ranks, end, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from child import is_alive
from patience import PATIENCE
from serve.server_process import ServerProcess
from serve.test_server_ends import ENDLESS, Stream
from tiny import write_tiny


@pytest.mark.parametrize(
    ("argv", "scripted"),
    [
        (["--replicas", "2"], True),
        (["--workers", "2"], True),
        (["--tensor-parallel-size", "2", "--num-pages", "16384"], False),  # a core, and another rank
    ],
    ids=["replicas", "workers", "ranks"],
)
def test_nothing_is_left_when_the_front_end_is_killed_under_load(tmp_path, argv, scripted, monkeypatch):
    folder = str(write_tiny(tmp_path / "model", "llama", max_position_embeddings=131072))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    memory = set(Path("/dev/shm").glob("*slipstream*"))
    server = ServerProcess(folder, *argv, scripted=scripted)
    streams = [Stream(server, ENDLESS | {"max_tokens": 60_000}) for _ in range(4)]
    family, listeners = descendants(server.process.pid), listening(server.port)
    assert len(family) >= 2 and listeners
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    for stream in streams:
        stream.thread.join(PATIENCE)
        assert not stream.thread.is_alive()
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in family if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{len(left)} processes are left"
        time.sleep(0.05)
    assert not listeners & listening(server.port)
    assert not list((tmp_path / "temporary").iterdir())
    deadline = time.monotonic() + PATIENCE
    while more := set(Path("/dev/shm").glob("*slipstream*")) - memory:  # those of tests that run beside this one go
        assert time.monotonic() < deadline, f"{more} are left"
        time.sleep(0.05)


def listening(port: int) -> set[str]:
    """Sockets that listen on a port, by inode: another process may take the port when it is free."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}


def descendants(pid: int) -> list[int]:
    found = [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(name) for name in (task / "children").read_text().split() if int(name) not in found]
    return found + [each for child in found for each in descendants(child)]
