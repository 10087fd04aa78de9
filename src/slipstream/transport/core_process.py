"""The core process: `python -m slipstream.transport.core_process SUPERVISOR FD…`, one inherited socket per front end.

SUPERVISOR is the socket of the process that restarts front ends, or -1. Standard input has a CoreStart as JSON. The
process exits when the last front end has disconnected, also while it loads, or after a failure, whose root cause is its
last message. It opens no port, and decodes only msgpack of known types.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import msgspec

from slipstream.base.errors import EngineDead, SlipstreamError
from slipstream.base.processes import enter_child, loading
from slipstream.checkpoint.locate import locate
from slipstream.contracts.messages import Abort, Output, Submit, SubmitAll
from slipstream.engine.lanes import Lanes, lane_stats
from slipstream.transport.client import CoreServer
from slipstream.transport.frames import (
    AbortAll,
    AbortedAll,
    Begun,
    Failed,
    FromCore,
    Join,
    Loading,
    ModelDescriptions,
    Pulse,
    Ready,
    ToCore,
)
from slipstream.transport.replica_start import CoreStart
from slipstream.transport.sockets import Connection, SocketServer

log = logging.getLogger("slipstream.core")

PULSE_SECONDS = 0.25


class CoreProcess:
    """Steps the lanes, and routes messages between them and the front ends."""

    def __init__(self, lanes: Lanes, server: SocketServer, opening: ModelDescriptions | None = None) -> None:
        """`opening`: the message about the models, for front ends that join later."""
        self.lanes = lanes
        self.server = server
        self._opening = opening
        self._abort_calls = AbortCalls(server)
        self._core_server = CoreServer(lanes)
        self._owners: dict[str, tuple[Connection, int]] = {}  # by request id: its front end and unfinished samples
        # late-interaction queries that are finished and that the core may still keep for documents, by request id
        self._kept_queries: dict[str, Connection] = {}
        self._last_pulse = 0.0

    def run(self) -> None:
        """Notifies the front ends that the core is ready, and runs until the last one has disconnected."""
        busy = is_following = False
        self._pulse(busy)  # before Ready: metrics start with zeros
        self.server.broadcast(Ready())
        for file in self.lanes.files:
            self.server.watch(file)
        while self.server.connections:
            messages, gone = self.server.receive(wait=not busy)
            # steps for other engines that share experts change nothing in the statistics
            is_following = (is_following or not busy) and not messages and not gone
            for connection, message in messages:
                self._handle(connection, message)
            for connection in gone:
                self._abort_all_of(connection)
                self._abort_calls.disconnect(connection)
            if self.lanes.has_requests():
                self._deliver(self.lanes.step(), self.lanes.take_begun())
            busy = self.lanes.has_requests()
            if not is_following:
                self._pulse(busy)

    def close(self) -> None:
        """Aborts the remaining requests, completes the steps in flight, and checks that nothing leaked."""
        for name in self._owners:
            self.lanes.abort(Abort(name))
        try:
            while self.lanes.has_requests():
                self.lanes.step()
            self.lanes.check()
        except EngineDead:
            if not self.lanes.files:
                raise  # else: a process that shares the model has ended first
        self.lanes.close()

    def _handle(self, connection: Connection, message: ToCore | Join) -> None:
        """Executes a message of one front end; parts that depend on the others are here, not in the `CoreServer`."""
        if isinstance(message, Abort):
            self._abort(connection, message)
        elif isinstance(message, AbortAll):
            self._abort_calls.start(connection, message)
        elif isinstance(message, AbortedAll):
            self._abort_calls.reply(connection, message)
        elif isinstance(message, Join):
            if (joined := self.server.join(connection)) is not None and self._opening is not None:
                self.server.send(joined, [self._opening, self._statistics(), Ready()])
        else:
            replies = self._core_server.handle(message)
            if isinstance(message, Submit | SubmitAll) and not replies:
                self._owners |= {each.request_id: (connection, each.num_samples) for each in message.submits}
            self._deliver([reply for reply in replies if isinstance(reply, Output)])
            if others := [reply for reply in replies if not isinstance(reply, Output)]:
                self.server.send(connection, others)

    def _abort(self, connection: Connection, message: Abort) -> None:
        name = message.request_id
        owner = self._owners.get(name)
        if owner is not None and owner[0] is not connection:
            return  # a request of another front end
        num_ended = self.lanes.abort(message)  # also of finished requests: it drops a query that the core keeps
        self._kept_queries.pop(name, None)
        if num_ended:
            self._ended(name, num_ended)

    def _deliver(self, outputs: list[Output], begun: Sequence[str] = ()) -> None:
        """Sends each front end its outputs of a step, in one frame."""
        shares: dict[Connection, list[FromCore]] = {}
        for name in begun:
            if (owner := self._owners.get(name)) is not None:
                shares.setdefault(owner[0], []).append(Begun([name]))
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            shares.setdefault(owner[0], []).append(output)
            if output.finish_reason is not None:
                self._ended(output.request_id, 1)
                if output.pooled is not None and self.lanes.keeps_query(output.request_id):
                    self._kept_queries[output.request_id] = owner[0]
        for connection, share in shares.items():
            self.server.send(connection, share)

    def _ended(self, name: str, num_samples: int) -> None:
        connection, left = self._owners[name]
        if left > num_samples:
            self._owners[name] = connection, left - num_samples
        else:
            del self._owners[name]

    def _abort_all_of(self, gone: Connection) -> None:
        for name, (connection, _) in list(self._owners.items()):
            if connection is gone:
                self.lanes.abort(Abort(name))
                del self._owners[name]
        for name, connection in list(self._kept_queries.items()):
            if connection is gone:
                self.lanes.abort(Abort(name))
                del self._kept_queries[name]

    def _pulse(self, busy: bool) -> None:
        """Broadcasts statistics: at an interval while there are requests, and once when they have ended."""
        now = time.monotonic()
        if busy and now - self._last_pulse < PULSE_SECONDS:
            return
        self._last_pulse = now
        self._core_server.inspector.drop_unread()
        if self._kept_queries:
            self._kept_queries = {name: own for name, own in self._kept_queries.items() if self.lanes.keeps_query(name)}
        self.server.broadcast(self._statistics())

    def _statistics(self) -> Pulse:
        lanes = [lane_stats(name, core) for name, core in self.lanes.cores.items()]
        return Pulse(lanes, is_asleep=not self.lanes.can_run)


def main(argv: list[str]) -> int:
    enter_child()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the watchdog of a front end
    supervisor, *front_ends = (socket.socket(fileno=int(fd)) if int(fd) >= 0 else None for fd in argv)
    server = SocketServer(filter(None, front_ends), supervisor)
    process: CoreProcess | None = None
    watch = LoadWatch(connection.sock.fileno() for connection in server.connections)
    try:
        start = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreStart)
        with watch, loading():
            process = _load(start, server)
        process.lanes.enter_thread()
        process.run()
        process.close()
        return 0
    except BaseException as error:
        if watch.has_fired:
            return 0  # whatever the interrupted load has raised
        if isinstance(error, EngineDead) or not isinstance(error, SlipstreamError):
            log.error("the engine core failed", exc_info=error)  # user errors need no traceback
            sys.stderr.flush()
        cause = root_cause(error)
        server.broadcast(Failed.at_start(cause, error) if process is None else Failed(cause))
        return 1
    finally:
        server.close()


def _load(start: CoreStart, server: SocketServer) -> CoreProcess:
    options = start.options
    server.broadcast(Loading("finding the model"))
    for each in options:  # a wrong name fails before torch is imported
        locate(each.model, each.revision, each.task, each.download_dir)
    server.broadcast(Loading("loading torch"))
    from slipstream.engine.build import build_lanes, open_models  # imports torch

    server.broadcast(Loading("reading the model's files"))
    opened = open_models(options, start.engine)
    opening = ModelDescriptions([each.description for each in opened], os.getpid())
    server.broadcast(opening)
    lanes, _ = build_lanes(
        options,
        opened,
        on_load=lambda name: server.broadcast(Loading(f"loading {name}")),
        folder=None if start.folder is None else Path(start.folder),
        link=start.ranks,
    )
    return CoreProcess(lanes, server, opening)


def root_cause(error: BaseException) -> str:
    """The error and its causes, in one line."""
    return " ".join("; caused by ".join(_chain(error)).split())


def _chain(error: BaseException) -> Iterator[str]:
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        yield text if text and isinstance(cause, SlipstreamError) else f"{type(cause).__name__}: {text}".rstrip(": ")
        cause = cause.__cause__


# LoadWatch: ends a core that loads its models when the last front end has disconnected.
#
# A core reads its sockets between steps, so during the load, which may take minutes, it would not notice. A thread
# does: it interrupts the load with an exception, so that temporary folders and children of the load are removed, and
# exits the process if that does not end it.

_POLL_MS = 100
_UNWIND_SECONDS = 5.0  # for the load to end by the exception
_INTERRUPT = signal.SIGUSR2


class FrontEndsGone(BaseException):
    """No front end is left that waits for the load."""


class LoadWatch:
    """A context manager around the load, in the main thread."""

    def __init__(self, sockets: Iterable[int]) -> None:
        """`sockets`: file descriptors of all connections."""
        self.has_fired = False
        self._sockets = set(sockets)
        self._loaded = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        signal.signal(_INTERRUPT, _raise)
        threading.Thread(target=self._watch, name="slipstream-load-watch", daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:  # from here on the thread sends no signal
            self._loaded.set()
        signal.signal(_INTERRUPT, signal.SIG_IGN)

    def _watch(self) -> None:
        poll = select.poll()
        for file in self._sockets:
            poll.register(file, getattr(select, "POLLRDHUP", 0))  # hang-ups are always reported
        while self._sockets:
            for file, _ in poll.poll(_POLL_MS):
                poll.unregister(file)
                self._sockets.discard(file)
            if self._loaded.is_set():
                return
        with self._lock:
            if self._loaded.is_set():
                return
            self.has_fired = True
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
        time.sleep(_UNWIND_SECONDS)
        os._exit(0)


def _raise(number: int, frame: FrameType | None) -> None:
    raise FrontEndsGone


# AbortCalls: lets one front end abort the requests of all front ends, and returns their number to it.
#
# It runs in the core process, the only one with a connection to every front end.


class AbortCalls:
    """The front end that sends the call aborts its own requests itself."""

    def __init__(self, server: SocketServer) -> None:
        self._server = server
        self._calls: dict[str, _AbortCall] = {}

    def start(self, sender: Connection, message: AbortAll) -> None:
        """Passes the call on to the other front ends."""
        others = [each for each in self._server.front_ends if each is not sender]
        self._calls[message.call] = _AbortCall(sender, set(others))
        for other in others:
            self._server.send(other, [message])
        self._finish_if_complete(message.call)

    def reply(self, connection: Connection, message: AbortedAll) -> None:
        """Handles the reply of one front end."""
        call = self._calls.get(message.call)
        if call is not None and connection in call.waiting:
            call.waiting.discard(connection)
            call.count += message.count
            self._finish_if_complete(message.call)

    def disconnect(self, gone: Connection) -> None:
        """Drops a front end that has disconnected, as the sender of calls and among those that have to reply."""
        for name, call in list(self._calls.items()):
            call.waiting.discard(gone)
            if call.sender is gone:
                del self._calls[name]
            else:
                self._finish_if_complete(name)

    def _finish_if_complete(self, name: str) -> None:
        call = self._calls[name]
        if not call.waiting:
            del self._calls[name]
            self._server.send(call.sender, [AbortedAll(name, call.count)])


class _AbortCall:
    def __init__(self, sender: Connection, waiting: set[Connection]) -> None:
        self.sender = sender
        self.waiting = waiting  # front ends that have not replied
        self.count = 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads of the device
