"""A signal at any moment of a server's start ends it in order: exit code 0, no traceback, nothing left behind. More
signals when its work has ended change nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from child import child_env
from patience import PATIENCE
from tiny import write_tiny

# the command, in a process that signals itself at an audit event (its name, and a text in its arguments), when the
# event loop is closed, and when the interpreter removes the modules
_CHILD = """
import asyncio, os, sys
words, number, made = sys.argv.pop(1).split(), int(sys.argv.pop(1)), sys.argv.pop(1)

def hook(event, args):
    global words
    if event == "tempfile.mkdtemp":
        open(made, "a").write(args[0] + "\\n")
    if words and event == words[0] and " ".join(map(str, args)).find(words[-1]) >= 0:
        words = []
        os.kill(os.getpid(), number)

def closed(self, close=asyncio.Runner.close):
    close(self)
    os.kill(os.getpid(), number)

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=number):
        kill(pid, number)

asyncio.Runner.close = closed
last = Last()
sys.addaudithook(hook)
from slipstream.serve.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def processes_of(mark: str) -> list[str]:
    """Command lines of the processes whose environment has this variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


class Started:
    def __init__(self, tmp_path: Path, moment: str, number: int, *argv: str) -> None:
        self.made = tmp_path / "made"
        self.made.touch()
        self.tmp = tmp_path / "tmp"
        self.tmp.mkdir()
        self.mark = f"EARLY_SIGNALS_MARK={tmp_path}"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        env = child_env(OMP_NUM_THREADS="1", TMPDIR=str(self.tmp), EARLY_SIGNALS_MARK=str(tmp_path))
        if "--replica-urls" in argv:
            env.pop("SLIPSTREAM_DEVICE", None)  # an option of an engine
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, moment, str(int(number)), str(self.made), "serve", *argv]
            + ["--port", str(self.port)],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def check_end(self) -> None:
        """Waits for the end, and looks for the exit code, a traceback, processes, the port and folders."""
        _, said = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, said
        assert "Traceback" not in said and "Exception" not in said and "slipstream: " not in said, said
        assert processes_of(self.mark) == []
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", self.port))
        kept = {"slipstream-native"}  # no temporary folder: compiled code, for the next start
        assert [path.name for path in self.tmp.iterdir() if path.name not in kept] == []
        for name in self.made.read_text().split():
            path = Path(name)
            assert not list(path.parent.glob(f"*{path.name.removeprefix('slipstream-')}")), name


@pytest.mark.parametrize(
    ("moment", "number", "argv"),
    [
        ("import msgspec", signal.SIGTERM, []),  # among the first imports
        ("import slipstream.serve.http.launch", signal.SIGINT, []),
        ("import uvicorn", signal.SIGTERM, []),  # while the core loads torch
        ("subprocess.Popen core_process", signal.SIGTERM, ["--workers", "2"]),
        ("subprocess.Popen worker_main", signal.SIGTERM, ["--workers", "2"]),
        ("subprocess.Popen core_process", signal.SIGTERM, ["--replicas", "2"]),
    ],
)
def test_a_signal_during_the_start_ends_the_server_in_order(folder, tmp_path, moment, number, argv):
    Started(tmp_path, moment, number, folder, *argv).check_end()


def test_a_signal_during_the_start_of_the_replica_proxy_ends_it_in_order(tmp_path):
    given = ["--replica-urls", "http://127.0.0.1:9"]
    Started(tmp_path, "import slipstream.serve.http.server.replica_proxy", signal.SIGTERM, *given).check_end()
