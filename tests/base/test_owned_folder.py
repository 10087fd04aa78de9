"""Folders of processes that were killed are removed by the next one; those of running ones stay."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from child import child_env
from patience import PATIENCE
from slipstream.base.files import OwnedFolder

_CHILD = """
import sys, time
from slipstream.base.files import OwnedFolder
folder = OwnedFolder("test", sys.argv[1])
(folder.path / "store").write_text("x")
exec(sys.argv[2])
print(folder.path, flush=True)
sys.stdin.read()
"""


def start(parent, more=""):
    command = [sys.executable, "-c", _CHILD, str(parent), more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_env())


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_lives_as_long_as_its_process(tmp_path):
    with start(tmp_path) as killed, start(tmp_path) as running:
        left, kept = (child.stdout.readline().strip() for child in (killed, running))
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert sorted(map(str, tmp_path.iterdir())) == sorted([left, kept])
        own = OwnedFolder("test", str(tmp_path))
        assert set(tmp_path.iterdir()) == {own.path, *(path for path in tmp_path.iterdir() if str(path) == kept)}
        assert (own.path.stat().st_mode & 0o777) == 0o700
    assert list(tmp_path.iterdir()) == [own.path]  # the other process has ended by itself
    own.cleanup()
    own.cleanup()
    assert not list(tmp_path.iterdir())


def test_a_guard_removes_the_folder_of_a_killed_process_at_once(tmp_path):
    with start(tmp_path, "folder.guard()") as killed:
        assert killed.stdout.readline().strip() == str(*tmp_path.iterdir())
        (guard,) = children(killed.pid)
        until(lambda: len(os.listdir(f"/proc/{guard}/fd")) == 1)  # the pipe: no port of the owner stays open
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: not list(tmp_path.iterdir()))


def test_a_guard_ends_with_its_folder(tmp_path):
    before = children(os.getpid())
    folder = OwnedFolder("test", str(tmp_path))
    folder.guard()
    assert len(children(os.getpid())) == len(before) + 1
    folder.cleanup()
    assert not list(tmp_path.iterdir()) and children(os.getpid()) == before


def test_a_folder_without_references_is_removed(tmp_path):
    OwnedFolder("test", str(tmp_path))
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_what_is_not_an_abandoned_folder_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "slipstream-test-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "slipstream-test-file").write_text("x")
    (tmp_path / "slipstream-other-abc").mkdir()
    OwnedFolder("test", str(tmp_path)).cleanup()
    assert len(list(tmp_path.iterdir())) == 4
