"""The core process: `python -m slipstream.transport.core_process SUPERVISOR FD…`, one inherited socket for each front
end.

SUPERVISOR is the socket of the process that starts front ends again where they die, or -1 where there is none.
The options of each model come as JSON on standard input. It ends when its last front end has gone, or with the root
cause of a failure as its last message. It never opens a port or a file of its own, and reads nothing but msgpack.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from slipstream.config.locate import locate
from slipstream.config.options import Options
from slipstream.engine.lanes import Lanes
from slipstream.errors import EngineDead, SlipstreamError
from slipstream.log import set_up_child_log
from slipstream.messages import Abort, Output, Submit, SubmitAll
from slipstream.metrics.lane import LaneStats
from slipstream.transport.abort_calls import AbortCalls
from slipstream.transport.admission import submit
from slipstream.transport.child_process import die_with_parent
from slipstream.transport.frames import (
    AbortAll,
    AbortedAll,
    Begun,
    Failed,
    FromCore,
    Join,
    Loading,
    Opening,
    Pulse,
    Ready,
    ToCore,
)
from slipstream.transport.socket_server import Connection, SocketServer

if TYPE_CHECKING:
    from slipstream.engine.core import EngineCore

log = logging.getLogger("slipstream.core")

PULSE_SECONDS = 0.25


class CoreProcess:
    """Models by name, and the requests of each front end."""

    def __init__(self, lanes: Lanes, hub: SocketServer, opening: Opening | None = None) -> None:
        """`opening`: what front ends that join later are told of the models."""
        self.lanes = lanes
        self.hub = hub
        self._opening = opening
        self._abort_calls = AbortCalls(hub)
        self._owners: dict[str, tuple[Connection, int]] = {}  # by request: and its samples under way
        # requests that ended and may have left a query for documents to come
        self._keepers: dict[str, Connection] = {}
        self._last_pulse = 0.0

    def run(self) -> None:
        """Until the last front end has gone."""
        busy = False
        self._pulse(busy)  # whoever watches sees zeros, and not nothing
        while self.hub.connections:
            messages, gone = self.hub.receive(wait=not busy)
            for connection, message in messages:
                self._take(connection, message)
            for connection in gone:
                self._abort_all_of(connection)
                self._abort_calls.leave(connection)
            if self.lanes.has_work():
                self._deliver(self.lanes.step(), self.lanes.take_begun())
            busy = self.lanes.has_work()
            self._pulse(busy)

    def close(self) -> None:
        """Ends in order: what is left is aborted, and nothing may be lost then."""
        for name in self._owners:
            self.lanes.abort(Abort(name))
        while self.lanes.has_work():
            self.lanes.step()
        self.lanes.check()
        self.lanes.close()

    def _take(self, connection: Connection, message: ToCore | Join) -> None:
        if isinstance(message, Submit | SubmitAll):
            if refused := submit(self.lanes, message):
                self.hub.send(connection, refused)
                return
            for each in message.submits:
                self._owners[each.request_id] = connection, each.num_samples
        elif isinstance(message, Abort):
            self._abort(connection, message)
        elif isinstance(message, AbortAll):
            self._abort_calls.ask(connection, message)
        elif isinstance(message, AbortedAll):
            self._abort_calls.answer(connection, message)
        elif (joined := self.hub.join(connection)) is not None and self._opening is not None:
            self.hub.send(joined, [self._opening, Ready()])

    def _abort(self, connection: Connection, message: Abort) -> None:
        name = message.request_id
        owner = self._owners.get(name)
        if owner is not None and owner[0] is not connection:
            return  # somebody else's
        num_ended = self.lanes.abort(message)  # one that has ended may have left a query behind
        self._keepers.pop(name, None)
        if num_ended:
            self._ended(name, num_ended)

    def _deliver(self, outputs: list[Output], begun: Sequence[str] = ()) -> None:
        """One frame for each front end that has something in this step."""
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
                    self._keepers[output.request_id] = owner[0]
        for connection, share in shares.items():
            self.hub.send(connection, share)

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
        for name, connection in list(self._keepers.items()):
            if connection is gone:
                self.lanes.abort(Abort(name))
                del self._keepers[name]

    def _pulse(self, busy: bool) -> None:
        """Every so often while there is work, and once when there is none any more."""
        now = time.monotonic()
        if busy and now - self._last_pulse < PULSE_SECONDS:
            return
        self._last_pulse = now
        if self._keepers:
            self._keepers = {name: own for name, own in self._keepers.items() if self.lanes.keeps_query(name)}
        self.hub.broadcast(Pulse([_lane_stats(name, core) for name, core in self.lanes.cores.items()]))


def _lane_stats(name: str, core: EngineCore) -> LaneStats:
    scheduler, time = core.scheduler, core.account.total
    cache = getattr(scheduler, "cache", None)  # models that compute prompts whole have none
    pool = cache.groups[0].pool if cache is not None and cache.groups else None
    return LaneStats(
        name,
        num_steps=core.num_steps,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_preemptions=getattr(scheduler, "num_preemptions", 0),
        num_free_pages=0 if pool is None else pool.num_free,
        num_pages=0 if pool is None else pool.num_usable,
        page_size=0 if cache is None else cache.page_size,
        prefix_queries=0 if cache is None else cache.num_queries,
        prefix_hits=0 if cache is None else cache.num_hits,
        busy=time.busy,
        turnaround=time.turnaround,
        host_late=time.host_late,
        output=time.output,
        grammar=time.grammar,
        no_work=time.no_work,
        host=time.host,
    )


def main(argv: list[str]) -> int:
    die_with_parent()
    # the front ends decide when to end; a Ctrl-C in the terminal reaches all of a group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_child_log()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks where we are
    supervisor, *front_ends = (socket.socket(fileno=int(fd)) if int(fd) >= 0 else None for fd in argv)
    hub = SocketServer(filter(None, front_ends), supervisor)
    try:
        options = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Options])
        process = _load(options, hub)
        hub.broadcast(Ready())
        process.run()
        process.close()
        return 0
    except BaseException as error:
        if isinstance(error, EngineDead) or not isinstance(error, SlipstreamError):
            log.error("the engine core failed", exc_info=error)  # not for a user's mistake, which says it all
            sys.stderr.flush()
        hub.broadcast(Failed(root_cause(error)))
        return 1
    finally:
        hub.close()


def _load(options: list[Options], hub: SocketServer) -> CoreProcess:
    hub.broadcast(Loading("finding the model"))
    for each in options:  # a name that leads nowhere need not wait for torch
        locate(each.model, each.revision, each.task)
    hub.broadcast(Loading("loading torch"))
    from slipstream.engine.build import build_lanes, open_models  # the first time anyone loads it

    hub.broadcast(Loading("reading the model's files"))
    opened = open_models(options)
    opening = Opening([each.facts for each in opened], os.getpid())
    hub.broadcast(opening)
    lanes = build_lanes(options, opened, tell=lambda name: hub.broadcast(Loading(f"loading {name}")))[0]
    return CoreProcess(lanes, hub, opening)


def root_cause(error: BaseException) -> str:
    """The error and what it came from, in one line."""
    return " ".join("; caused by ".join(_chain(error)).split())


def _chain(error: BaseException) -> Iterator[str]:
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        yield text if text and isinstance(cause, SlipstreamError) else f"{type(cause).__name__}: {text}".rstrip(": ")
        cause = cause.__cause__


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the device need not be waited for
