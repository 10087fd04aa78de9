"""Starting a core process, from a process that has no torch."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import msgspec

from slipstream.config.options import Options
from slipstream.transport.child_process import child_environment
from slipstream.transport.frames import Join, frame


class CoreHandle:
    """A core process, as the one who started it sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def how_it_ended(self) -> str | None:
        """None while it runs, and if it ended as it should."""
        code = self.process.poll()
        if not code:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; perhaps the machine ran out of memory" if name == "SIGKILL" else ""
            return f"the engine core was ended by {name}{hint}"
        return f"the engine core ended with exit code {code}"

    def wait(self, seconds: float) -> str | None:
        """As `how_it_ended`, once it has; after that long it is killed."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"the engine core did not end within {seconds:g} s and was killed"
        return self.how_it_ended()


def spawn_core(
    options: list[Options], num_front_ends: int = 1, supervisor: socket.socket | None = None
) -> tuple[CoreHandle, list[socket.socket]]:
    """A core for these models, and our end of a socket for each front end.

    `supervisor`: the core's end of a socket over which more front ends may join (`join_core`).
    """
    pairs = [socket.socketpair() for _ in range(num_front_ends)]
    theirs = [pair[1] for pair in pairs]
    fds = [-1 if supervisor is None else supervisor.fileno(), *(sock.fileno() for sock in theirs)]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.transport.core_process", *map(str, fds)],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),  # standard output belongs to whoever started us
        pass_fds=[fd for fd in fds if fd >= 0],
        env=child_environment(),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(options))
    process.stdin.close()
    for sock in theirs:
        sock.close()
    return CoreHandle(process), [pair[0] for pair in pairs]


def join_core(supervisor: socket.socket) -> socket.socket:
    """A new front end's end of a socket to a running core. `supervisor`: our end of the supervisor's socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(supervisor, [frame([Join()])], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours
