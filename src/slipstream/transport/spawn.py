"""Starts a core process, from a process that does not load torch."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from slipstream.base.processes import child_environment, how_it_ended, signals_held
from slipstream.config.options import Options
from slipstream.engine.rank_link import RankLink
from slipstream.transport.frames import Join, frame


class CoreStart(msgspec.Struct, frozen=True):
    """The data that a core process reads from its standard input, as JSON."""

    options: list[Options]  # of each model
    engine: int = 0  # number of this engine among those that share experts
    folder: str | None = None  # of these engines, to find each other; None: the engine is alone
    ranks: RankLink | None = None  # where ranks of other nodes connect; None: the core starts all ranks itself


class CoreHandle:
    """A core process, for the process that started it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def how_it_ended(self) -> str | None:
        """Describes an abnormal end; None while the process runs and after a normal exit."""
        code = self.process.poll()
        how = how_it_ended(code)
        if how is None:
            return None
        return f"the engine core {'was' if code is not None and code < 0 else 'ended with'} {how}"

    def wait(self, seconds: float) -> str | None:
        """Waits for the exit, kills the process after `seconds`, and returns what `how_it_ended` does."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"the engine core did not exit within {seconds:g} s and was killed"
        return self.how_it_ended()


def spawn_core(
    options: list[Options],
    num_front_ends: int = 1,
    supervisor: socket.socket | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    engine: int = 0,
    folder: str | None = None,
) -> tuple[CoreHandle, list[socket.socket]]:
    """Starts a core for these models. Returns its handle, and one socket per front end.

    `supervisor`: the core's end of a socket over which more front ends can join (`join_core`). `environment`: variables
    that the core gets besides ours. `engine`, `folder`: as in CoreStart.
    """
    pairs = [socket.socketpair() for _ in range(num_front_ends)]
    start = CoreStart(options, engine, folder)
    return start_core(start, [pair[1] for pair in pairs], supervisor, environment), [pair[0] for pair in pairs]


def start_core(
    start: CoreStart,
    front_ends: Sequence[socket.socket],
    supervisor: socket.socket | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> CoreHandle:
    """Starts a core process over connected sockets, which are closed here."""
    fds = [-1 if supervisor is None else supervisor.fileno(), *(sock.fileno() for sock in front_ends)]
    others = () if start.ranks is None else (start.ranks.listener,)
    with signals_held():
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.transport.core_process", *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),  # keeps standard output free for the command's own output
            pass_fds=[*(fd for fd in fds if fd >= 0), *others],
            env=child_environment(environment),
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start))
    process.stdin.close()
    for sock in front_ends:
        sock.close()
    return CoreHandle(process)


def join_core(supervisor: socket.socket) -> socket.socket:
    """Connects a new front end to a running core and returns its socket. `supervisor`: our end of that socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(supervisor, [frame([Join()])], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours
