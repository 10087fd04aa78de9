"""`python -m slipstream.serve.http.worker_main LISTENER CORE [BOARD PLACE]`: one of several front ends.

Settings come on stdin. On the board it writes what it has counted, for the others to read.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from slipstream.engine.link.parent import die_with_parent
from slipstream.metrics.board import Board
from slipstream.serve.http.log import set_up_log
from slipstream.serve.http.settings import Settings
from slipstream.serve.http.worker import run_worker


def main(argv: list[str]) -> int:
    die_with_parent()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    set_up_log(settings.log_level, settings.log_format)
    listener, core = (socket.socket(fileno=int(fd)) for fd in argv[:2])
    board = Board(int(argv[2]), int(argv[3]), settings.workers) if len(argv) > 2 else None
    cause = run_worker(settings, listener, core, board)
    return 0 if cause is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
