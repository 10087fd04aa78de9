"""Starting and ending the server: the port, the core process, and one front end here or several elsewhere."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from slipstream.config.options import Options
from slipstream.engine.link.parent import child_environment
from slipstream.engine.link.spawn import CoreHandle, spawn_core
from slipstream.engine.link.wire import Failed, WireError, from_core_frames
from slipstream.errors import EngineDead
from slipstream.metrics.board import Board
from slipstream.serve.http.listen import PortClaim, raise_file_limit
from slipstream.serve.http.settings import Settings

status = logging.getLogger("slipstream.status")

_CORE_SECONDS = 30.0  # for the core to end once its front ends have gone


def launch(settings: Settings, options: list[Options]) -> None:
    """Serves until it is told to end. Raises EngineDead, with the root cause, if the core ends before."""
    raise_file_limit()
    port = PortClaim(settings)
    settings = msgspec.structs.replace(settings, port=port.port)
    # first of all: it has the longest way to go
    core, socks = spawn_core(options, settings.workers + (settings.workers > 1))
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    status.info("listening on http://%s:%d", host, port.port)
    cause: str | None = None
    try:
        if settings.workers == 1:
            from slipstream.serve.http.worker import run_worker  # while the core starts

            cause = run_worker(settings, port.listener(), socks[0])
        else:
            cause = _Supervisor(core, settings).run([port.listener() for _ in socks[1:]], socks)
    finally:
        ended = core.wait(_CORE_SECONDS)
    if cause is not None or ended is not None:
        raise EngineDead(f"{ended}: {cause}" if ended and cause and cause not in ended else cause or ended)


class _Supervisor:
    """Several front ends in processes of their own; this one only waits, and passes signals on."""

    def __init__(self, core: CoreHandle, settings: Settings) -> None:
        self.core = core
        self.settings = settings
        self.workers: list[subprocess.Popen[bytes]] = []
        self.cause: str | None = None

    def run(self, listeners: list[socket.socket], socks: list[socket.socket]) -> str | None:
        own = socks.pop()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self._pass_on(number))
        board = Board.create(len(socks))
        for place, (listener, sock) in enumerate(zip(listeners, socks, strict=True)):
            self.workers.append(self._start(listener, sock, board, place))
            listener.close()
            sock.close()
        os.close(board)
        own.settimeout(0.1)
        frames = from_core_frames()
        lost = False
        while any(worker.poll() is None for worker in self.workers):
            if lost:
                time.sleep(0.05)
            else:
                lost = not self._hear(own, frames)
            if self.cause is None and any(worker.poll() for worker in self.workers):
                self.cause = "a front end ended on its own; its last lines say why"
                self._pass_on(signal.SIGTERM)
        own.close()
        failed = any(worker.returncode for worker in self.workers)
        return self.cause if failed else None

    def _start(self, listener: socket.socket, sock: socket.socket, board: int, place: int) -> subprocess.Popen[bytes]:
        fds = [listener.fileno(), sock.fileno(), board]
        command = [sys.executable, "-m", "slipstream.serve.http.worker_main", *map(str, fds), str(place)]
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True, env=child_environment()
        )
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(self.settings))  # not as arguments, which all of a machine can read
        worker.stdin.close()
        return worker

    def _hear(self, own: socket.socket, frames: object) -> bool:
        """Wait a moment for the core to say something. False once it has gone."""
        try:
            data = own.recv(2**18)
        except TimeoutError:
            return True
        except OSError:
            data = b""
        if not data:
            return False
        try:
            for message in frames.push(data):  # type: ignore[attr-defined]
                if isinstance(message, Failed):
                    self.cause = message.cause
        except WireError:
            return False
        return True

    def _pass_on(self, number: int) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(number)
