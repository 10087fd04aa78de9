"""A core that loads ends when its front ends have disconnected."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from child import child_env
from patience import PATIENCE
from slipstream.base.processes import signals_deferred

_LOADS = """
import sys, tempfile, time
from slipstream.transport.core_process import FrontEndsGone, LoadWatch

try:
    with LoadWatch(map(int, sys.argv[1:])), tempfile.TemporaryDirectory():
        print("loading", flush=True)
        time.sleep(1e6)
except FrontEndsGone:
    print("stopped", flush=True)
"""


def test_the_last_front_end_that_disconnects_stops_the_load(tmp_path):
    (a, core_a), (b, core_b) = socket.socketpair(), socket.socketpair()
    files = [core_a.fileno(), core_b.fileno()]
    process = subprocess.Popen(
        [sys.executable, "-c", _LOADS, *map(str, files)],
        stdout=subprocess.PIPE, text=True, pass_fds=files, env=child_env(TMPDIR=str(tmp_path)),
    )  # fmt: skip
    core_a.close(), core_b.close()
    assert process.stdout.readline() == "loading\n"
    a.sendall(b"unread")
    a.close()
    assert len(list(tmp_path.iterdir())) == 1  # one front end is left
    b.close()
    assert process.communicate(timeout=PATIENCE)[0] == "stopped\n"
    assert process.returncode == 0 and not list(tmp_path.iterdir())


_STARTS = """
import signal, time
from slipstream.base.processes import release_signals

print("started", flush=True)
input()
signal.signal(signal.SIGTERM, lambda *args: print("handled", flush=True))
release_signals()
"""


def test_a_signal_waits_until_a_child_has_its_handlers():
    with signals_deferred():
        process = subprocess.Popen(
            [sys.executable, "-c", _STARTS],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_env(),
        )  # fmt: skip
    process.send_signal(signal.SIGTERM)
    assert process.communicate("\n", PATIENCE)[0] == "started\nhandled\n"
    assert process.returncode == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
