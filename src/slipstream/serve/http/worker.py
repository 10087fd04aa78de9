"""One front-end process: the event loop with the HTTP server, signal handling, draining and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from slipstream.base.errors import UserError
from slipstream.base.processes import release_signals
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.prompts import bound_heap
from slipstream.metrics.stats import SharedCounters
from slipstream.serve.early_signals import ENDING, call_at_signals, has_recorded, ignore_signals
from slipstream.serve.http.app import App
from slipstream.serve.http.batch.runner import BatchRunner
from slipstream.serve.http.batch.service import BatchService
from slipstream.serve.http.cors import Cors
from slipstream.serve.http.server import Server
from slipstream.serve.http.settings import ServerSettings
from slipstream.serve.http.state import State
from slipstream.serve.http.supervisor import AT_ONCE
from slipstream.serve.http.table import all_routes
from slipstream.serve.http.tls import server_context
from slipstream.serve.http.watchdog import Watchdog
from slipstream.transport.frames import refused_option
from slipstream.transport.replicas import ReplicaClient
from slipstream.transport.sockets import SocketClient

status = logging.getLogger("slipstream.status")

_LOST_SECONDS = 1.0  # after the loss of the core, for open requests to fail and for /health to report it


class WorkerEnd(NamedTuple):
    """The reason why a front end ended without a signal."""

    cause: str
    by_core: bool  # the core exited or its connection was lost; else this front end could not start
    refused: UserError | None = None  # of the options, at the start of the core


def run_worker(
    settings: ServerSettings,
    listener: socket.socket,
    connect: Callable[[], Awaitable[SocketClient | ReplicaClient]],
    shared: SharedCounters | None = None,
    responses: Path | None = None,
) -> WorkerEnd | None:
    """Serves until a signal ends it; returns None then. `connect` makes the client of the core or of its replicas. With
    `shared` it is one of several under a supervisor, which share the store `responses`."""
    bound_heap()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Worker(settings, shared, responses).run(listener, connect))


class _Worker:
    def __init__(self, settings: ServerSettings, shared: SharedCounters | None, responses: Path | None) -> None:
        self.settings = settings
        self.shared = shared
        self.responses = responses
        self.drain: asyncio.Task[None] | None = None
        self.runner: BatchRunner | None = None

    async def run(
        self, listener: socket.socket, connect: Callable[[], Awaitable[SocketClient | ReplicaClient]]
    ) -> WorkerEnd | None:
        try:
            return await self._serve(listener, connect)
        finally:
            await asyncio.get_running_loop().shutdown_default_executor()
            ignore_signals(AT_ONCE)

    async def _serve(
        self, listener: socket.socket, connect: Callable[[], Awaitable[SocketClient | ReplicaClient]]
    ) -> WorkerEnd | None:
        client = await connect()
        engine = AsyncEngine(client=client)
        self.state = State(self.settings, engine, self.shared, self.responses)
        plain = App(self.state, all_routes())
        if self.settings.batch_dir is not None:
            self.state.batches = BatchService(self.settings)
            self.runner = BatchRunner(plain, self.state.batches)
        app = Cors(plain, self.settings) if self.settings.allowed_origins else plain
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            **_parser(self.settings.max_header_bytes, app),
        )
        self.server = Server(config, server_context(self.settings))
        loop = asyncio.get_running_loop()
        call_at_signals(loop, dict.fromkeys(ENDING, self._on_signal) | {AT_ONCE: self._end_at_once})
        release_signals()
        if has_recorded():
            self._on_signal()
        helpers = [loop.create_task(self._announce()), loop.create_task(self._until_lost())]
        if self.shared is not None or self.settings.status_interval > 0:
            helpers.append(loop.create_task(self.state.server_stats.run()))
        if self.settings.watchdog_timeout > 0:
            helpers.append(loop.create_task(Watchdog(self.state, self.settings.watchdog_timeout).run()))
        if self.runner is not None:
            helpers.append(loop.create_task(self.runner.run()))
        try:
            await self.server.serve(sockets=[listener])
        finally:
            for helper in helpers:
                helper.cancel()
            if self.runner is not None:
                await self.runner.stop()
        failure, by_core = engine.failure, client.is_lost
        await engine.close()
        if self.state.batches is not None:
            self.state.batches.close()
        self.state.responses.close()
        self.state.beam_grammars.close()
        if self.state.traces is not None:
            await asyncio.to_thread(self.state.traces.close)
        if failure is None:
            return None
        return WorkerEnd(client.cause or str(failure), by_core, refused_option(failure))

    async def _announce(self) -> None:
        with contextlib.suppress(Exception):  # a failed start is reported by its cause
            await self.state.engine.until_ready()
            gc.freeze()  # loaded objects are permanent, so the collector need not scan them
            status.info("ready: serving %s", ", ".join(self.state.engine.models))

    async def _until_lost(self) -> None:
        await self.state.engine.until_lost()
        await asyncio.sleep(_LOST_SECONDS)
        self.server.should_exit = True

    def _on_signal(self) -> None:
        """The first signal drains, the second exits at once. Under a supervisor, which counts signals, each drains."""
        if self.drain is None:
            self.drain = asyncio.get_running_loop().create_task(self._drain())
        elif self.shared is None:
            self._end_at_once()

    def _end_at_once(self) -> None:
        self.server.should_exit = self.server.force_exit = True

    async def _drain(self) -> None:
        """Refuses new requests, waits for the open ones up to the drain timeout, and aborts the rest."""
        self.state.drain()
        running, deadline = self.server.server_state.tasks, time.monotonic() + self.settings.drain_timeout
        if running:
            status.info("draining: %d requests have %g s", len(running), self.settings.drain_timeout)
        while running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.runner is not None:
            await self.runner.stop()  # else an aborted line would be stored as a result
        count = await self.state.engine.abort_all()
        self.state.counters.aborted["drain"] += count
        self.server.should_exit = True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    return factory


def _parser(max_header_bytes: int, app: App | Cors) -> dict[str, Any]:
    try:
        from slipstream.serve.http.protocol import bounded_protocol  # needs httptools
    except ImportError:
        return {"http": "h11", "h11_max_incomplete_event_size": max_header_bytes}
    return {"http": bounded_protocol(max_header_bytes, app)}
