"""Supervisor: runs several front-end processes, restarts those that die, and forwards signals."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time

import msgspec

from slipstream.base.errors import InvalidOption, UserError
from slipstream.base.files import OwnedFolder
from slipstream.base.processes import Backoff, start_child
from slipstream.metrics.stats import FrontEnds, SharedCounters
from slipstream.serve.http.server.listen import PortClaim, UnixClaim
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.signals import ENDING, has_recorded
from slipstream.transport.frames import Failed, FrameError, from_core_frames, refused_option
from slipstream.transport.replica_start import join_core

status = logging.getLogger("slipstream.status")

CANNOT_START = 4
"""Exit code of a front end that would fail again after a restart; its log has the reason."""
AT_ONCE = signal.SIGUSR2
"""Makes a front end exit without draining. A second SIGTERM does not: systemd sends one to every process of a unit."""


class _FrontEnd:
    """One front end, over all its processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.due = 0.0  # monotonic seconds of the next restart, where no process runs
        self.backoff = Backoff()


class Supervisor:
    def __init__(self, settings: ServerSettings, port: PortClaim | UnixClaim, core: socket.socket) -> None:
        """`core`: our end of the socket over which front ends join the core."""
        self.settings = settings
        self.port = port
        self.core = core
        self.front_ends = [_FrontEnd(number) for number in range(settings.workers)]
        self.cause: str | None = None  # of a failure
        self.refused: UserError | None = None  # of the options, at the start of the core
        self._counters_fd = SharedCounters.create(settings.workers)
        self._own_counters = SharedCounters(self._counters_fd, settings.workers, settings.workers)
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # conversations are not written to a disk
        self._folder = OwnedFolder("front-ends", shared)
        self._folder.guard()
        self._num_restarts = 0
        self._num_signals = 0
        self._core_is_lost = False
        self._frames = from_core_frames()

    def run(self, socks: list[socket.socket]) -> str | None:
        """Runs until a signal ends it, or until a failure, whose cause it returns.

        `socks`: connections to the core, one per front end.
        """
        for number in ENDING:
            signal.signal(number, lambda number, frame: self._end())
        self.core.settimeout(0.1)
        try:
            if has_recorded():
                for sock in socks:
                    sock.close()
                return None
            for front_end, sock in zip(self.front_ends, socks, strict=True):
                self._start(front_end, self.port.listener(), sock)
            self._publish()
            while self._is_needed():
                self._read_core()
                for front_end in self.front_ends:
                    self._check(front_end)
            return self.cause
        finally:
            self.core.close()
            os.close(self._counters_fd)
            self._folder.cleanup()

    @property
    def _is_ending(self) -> bool:
        return self._num_signals > 0 or self.cause is not None or self._core_is_lost

    def _is_needed(self) -> bool:
        return any(front_end.process is not None for front_end in self.front_ends) or not self._is_ending

    def _check(self, front_end: _FrontEnd) -> None:
        """Restarts a front end that has exited, or ends the server."""
        if front_end.process is None:
            if not self._is_ending and time.monotonic() >= front_end.due:
                self._restart(front_end)
            return
        code = front_end.process.poll()
        if code is None:
            return
        front_end.process = None
        self._publish()
        if self._is_ending:
            return
        end = f"front end {front_end.number} exited with {_named(code)}"
        if code == CANNOT_START:
            self._give_up(f"front end {front_end.number} cannot start; see its last lines in the log")
            return
        delay = front_end.backoff.died(time.monotonic())
        if delay is None:
            backoff = front_end.backoff
            fact = f"{end}, for the {backoff.limit}th time within {backoff.window:g} s"
            self._give_up(f"{fact}; see its last lines in the log")
            return
        status.error("%s; restarting it in %g s", end, delay)
        front_end.due = time.monotonic() + delay

    def _restart(self, front_end: _FrontEnd) -> None:
        try:
            # it listens once it is up; until then the others get all connections
            self._start(front_end, self.port.listener(listens=False), join_core(self.core))
        except (InvalidOption, OSError) as error:
            self._give_up(f"front end {front_end.number} cannot be restarted: {error}")
            return
        self._num_restarts += 1
        self._publish()

    def _start(self, front_end: _FrontEnd, listener: socket.socket, sock: socket.socket) -> None:
        with listener, sock:
            files = [listener.fileno(), sock.fileno(), self._counters_fd]
            given = [*files, front_end.number, f"{self._folder.path}/responses.sqlite"]
            name, module = f"front end {front_end.number}", "slipstream.serve.http.worker_main"
            start = msgspec.json.encode(self.settings)
            front_end.process = start_child(name, module, given, files, start, in_session=False).process
        if self._num_signals:
            self._send(signal.SIGTERM)  # a signal that arrived while it started

    def _read_core(self) -> None:
        """Reads messages of the core, for 0.1 s at most."""
        if self._core_is_lost:
            time.sleep(0.05)
            return
        try:
            data = self.core.recv(2**18)
        except TimeoutError:
            return
        except OSError:
            data = b""
        try:
            for message in self._frames.push(data):
                if isinstance(message, Failed):
                    self.cause = message.cause
                    self.refused = refused_option(message.error())
        except FrameError:
            data = b""
        self._core_is_lost = not data

    def _publish(self) -> None:
        """Writes the number of running front ends for /health and /metrics."""
        running = sum(front_end.process is not None for front_end in self.front_ends)
        self._own_counters.write_front_ends(FrontEnds(len(self.front_ends), running, self._num_restarts))

    def _give_up(self, cause: str) -> None:
        self.cause = cause
        self._send(signal.SIGTERM)

    def _end(self) -> None:
        """Handles a signal: the first drains, the second ends at once."""
        self._num_signals += 1
        self._send(signal.SIGTERM if self._num_signals == 1 else AT_ONCE)

    def _send(self, number: int) -> None:
        for front_end in self.front_ends:
            if front_end.process is not None and front_end.process.poll() is None:
                front_end.process.send_signal(number)


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
