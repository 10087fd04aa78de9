"""`slipstream serve --replicas 2` as a process, with one replica killed while it streams."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

from patience import PATIENCE
from serve.server_process import ServerProcess
from serve.test_metrics import samples, total
from serve.test_server_ends import ENDLESS, Stream, core_pid
from tiny import write_tiny

SHORT = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}


def test_a_killed_replica_ends_its_own_streams_only_and_comes_back(tmp_path):
    folder = str(write_tiny(tmp_path, "llama", max_position_embeddings=131072))
    server = ServerProcess(folder, "--replicas", "2", "--log-level", "info", scripted=True)
    streams = [Stream(server, ENDLESS | {"max_tokens": 60_000}) for _ in range(2)]
    (tmp_path / "hold").touch()  # the replica does not come back before all is seen
    os.kill(core_pid(server), signal.SIGKILL)
    server.until("was lost")
    assert server.call("GET", "/health")[1]["status"] == "degraded"
    limit = time.monotonic() + PATIENCE
    while all(_runs(stream) for stream in streams):
        assert time.monotonic() < limit
    (ended,) = [stream for stream in streams if not stream.thread.is_alive()]
    other = next(stream for stream in streams if stream is not ended)
    *_, last, done = ended.end()
    assert done == "[DONE]" and json.loads(last)["error"]["code"] == "replica_lost"
    assert other.thread.is_alive()
    other.connection.sock.shutdown(socket.SHUT_RDWR)
    assert server.call("POST", "/v1/completions", SHORT)[0] == 200
    (tmp_path / "hold").unlink()
    server.until("ready again")
    assert server.call("GET", "/health")[1]["status"] == "ok"
    found = samples(server)
    assert total(found, "slipstream_replica_restarts_total") == 1
    assert total(found, "slipstream_replica_ready") == 2
    assert server.stop() == 0, server.lines[-5:]


def _runs(stream: Stream) -> bool:
    stream.thread.join(0.1)
    return stream.thread.is_alive()
