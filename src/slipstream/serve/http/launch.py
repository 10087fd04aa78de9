"""Starting and ending the server: the port, the core process, and one front end here or several elsewhere."""

from __future__ import annotations

import logging
import socket

import msgspec

from slipstream.config.options import Options
from slipstream.engine.link.spawn import spawn_core
from slipstream.errors import EngineDead
from slipstream.serve.http.listen import PortClaim, raise_file_limit
from slipstream.serve.http.settings import Settings

status = logging.getLogger("slipstream.status")

_CORE_SECONDS = 30.0  # for the core to end once its front ends have gone


def launch(settings: Settings, options: list[Options]) -> None:
    """Serves until it is told to end. Raises EngineDead, with the root cause, if it ends before."""
    raise_file_limit()
    port = PortClaim(settings)
    settings = msgspec.structs.replace(settings, port=port.port)
    ours, theirs = socket.socketpair() if settings.workers > 1 else (None, None)
    # first of all: it has the longest way to go
    core, socks = spawn_core(options, settings.workers, theirs)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    status.info("listening on http://%s:%d", host, port.port)
    cause: str | None = None
    try:
        if ours is None or theirs is None:
            from slipstream.serve.http.worker import run_worker  # while the core starts

            end = run_worker(settings, port.listener(), socks[0])
            cause = None if end is None else end.cause
        else:
            from slipstream.serve.http.supervisor import Supervisor

            theirs.close()
            cause = Supervisor(settings, port, ours).run(socks)
    finally:
        ended = core.wait(_CORE_SECONDS)
    if cause is not None or ended is not None:
        raise EngineDead(f"{ended}: {cause}" if ended and cause and cause not in ended else cause or ended)
