"""`python -m slipstream.serve.http.worker_main LISTENER CORE [BOARD PLACE RESPONSES]`: one of several front ends.

Standard input has the ServerSettings as JSON. BOARD is shared memory for the counters of all front ends, RESPONSES the
database of stored responses.
"""

from __future__ import annotations

import logging
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec

from slipstream.base.errors import UserError
from slipstream.base.log import set_up_log
from slipstream.base.processes import die_with_parent
from slipstream.metrics.stats import SharedCounters
from slipstream.serve.http.server.errors import Flags
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.supervisor import CANNOT_START
from slipstream.serve.http.worker import run_worker
from slipstream.transport.sockets import SocketClient

status = logging.getLogger("slipstream.status")


def main(argv: list[str]) -> int:
    die_with_parent()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerSettings)
    set_up_log(settings.log_level, settings.log_format)
    listener, core = (socket.socket(fileno=int(fd)) for fd in argv[:2])
    shared = SharedCounters(int(argv[2]), int(argv[3]), settings.workers) if len(argv) > 2 else None
    responses = Path(argv[4]) if len(argv) > 4 else None
    try:
        end = run_worker(settings, listener, partial(SocketClient.connect, core), shared, responses)
    except UserError as error:
        status.error("a front end cannot start: %s", Flags(ServerSettings.__struct_fields__)(str(error)))
        return CANNOT_START
    if end is None:
        return 0
    status.error("a front end ended: %s", end.cause)
    return 1 if end.by_core else CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
