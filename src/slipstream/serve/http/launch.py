"""Starts and stops the server: the port, the core process, and one front end in this process or several in others."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from functools import partial

import msgspec

from slipstream.base.errors import EngineDead, InvalidOption, UserError
from slipstream.base.log import pass_on_log
from slipstream.checkpoint.generation import override_fields
from slipstream.config.options import Options
from slipstream.serve.http.server.listen import PortClaim, UnixClaim, claim, raise_file_limit
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.signals import exit_at_signals, has_recorded, ignore_signals
from slipstream.transport.replica_start import spawn_core
from slipstream.transport.replicas import ReplicaClient, has_replicas, open_replicas
from slipstream.transport.sockets import SocketClient

status = logging.getLogger("slipstream.status")

_CORE_SECONDS = 30.0  # for the core to exit after its front ends
_LIMIT = "limit_mm_per_prompt"
_OF_IMAGES = ("mm_processor_kwargs", "allowed_media_domains", "allowed_local_media_path")


def launch(settings: ServerSettings, options: list[Options]) -> None:
    """Serves until a signal ends it. Raises the error of an option that the core refused, or EngineDead with the root
    cause of a failure."""
    if has_recorded():
        return
    options = [without_images(each) for each in options]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, exit codes of children would be lost
    raise_file_limit()
    pass_on_log(settings.log_level, settings.log_format)
    claimed = claim(settings)
    try:
        _serve_at(claimed, settings, options)
    finally:
        ignore_signals()
        claimed.close()


def without_images(options: Options) -> Options:
    """No HTTP API takes images yet, so a tower and its rows would take memory from texts."""
    given = [name for name in _OF_IMAGES if getattr(options, name)]
    if any(override_fields(_LIMIT, options.limit_mm_per_prompt).values()):
        given.append(_LIMIT)
    if given:
        raise InvalidOption(
            f"{given[0]} is for images, which the server does not take yet; leave it out, or use LLM or AsyncEngine"
        )
    return msgspec.structs.replace(options, limit_mm_per_prompt={"image": 0})


def launch_proxy(settings: ServerSettings) -> None:
    """Passes requests on to `replica_urls` until a signal ends it."""
    from slipstream.serve.http.server.listen import server_context
    from slipstream.serve.http.server.replica_proxy import ReplicaProxy, run_proxy
    from slipstream.serve.http.server.url_replicas import PrefillFirst, UrlReplicas

    raise_file_limit()
    tls = server_context(settings) if settings.ssl_certfile else None
    claimed = claim(settings)
    try:
        status.info("listening on %s", claimed.shown)

        async def serve() -> None:
            prefill = PrefillFirst(UrlReplicas(settings.prefill_urls)) if settings.prefill_urls else None
            proxy = ReplicaProxy(settings, UrlReplicas(settings.replica_urls), prefill)
            await run_proxy(proxy, claimed.listener(), tls)

        asyncio.run(serve())
    finally:
        claimed.close()


def _serve_at(claimed: PortClaim | UnixClaim, settings: ServerSettings, options: list[Options]) -> None:
    if has_replicas(options):
        _serve_replicas(claimed, settings, options)
        return
    ours, theirs = socket.socketpair() if settings.workers > 1 else (None, None)
    # first, because it takes longest to start
    core, socks = spawn_core(options, settings.workers, theirs)
    status.info("listening on %s", claimed.shown)
    cause: str | None = None
    refused: UserError | None = None
    try:
        if ours is None or theirs is None:
            from slipstream.serve.http.worker import run_worker  # imported while the core starts

            end = run_worker(settings, claimed.listener(), partial(SocketClient.connect, socks[0]))
            cause, refused = (None, None) if end is None else (end.cause, end.refused)
        else:
            from slipstream.serve.http.server.supervisor import Supervisor

            theirs.close()
            supervisor = Supervisor(settings, claimed, ours)
            cause, refused = supervisor.run(socks), supervisor.refused
    finally:
        exit_at_signals()
        ended = core.wait(_CORE_SECONDS)
    if refused is not None:
        raise refused
    if cause is not None or ended is not None:
        raise EngineDead(f"{ended}: {cause}" if ended and cause and cause not in ended else cause or ended)


def _serve_replicas(claimed: PortClaim | UnixClaim, settings: ServerSettings, options: list[Options]) -> None:
    """Serves several replicas from one front end in this process, which starts and restarts them."""
    if settings.workers > 1:
        backend = options[0].distributed_executor_backend
        by_ray = "" if backend is None else f" and distributed_executor_backend {backend}"
        raise InvalidOption(
            f"workers is {settings.workers}, data_parallel_size {options[0].data_parallel_size}{by_ray}; replicas have "
            "one front end: use 1 worker, or one server per replica behind a load balancer"
        )
    from slipstream.serve.http.worker import run_worker

    replicas = open_replicas(options)
    status.info("listening on %s", claimed.shown)

    async def connect() -> ReplicaClient:
        return ReplicaClient(replicas, replicas.count)

    end = run_worker(settings, claimed.listener(), connect)
    if end is not None:
        raise end.refused or EngineDead(end.cause)
