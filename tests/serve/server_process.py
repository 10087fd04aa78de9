"""`slipstream serve` as a process, for tests that want all of it: real sockets, real signals, a real end."""

from __future__ import annotations

import http.client
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from child import child_env
from patience import PATIENCE
from slipstream.base.processes import die_with_parent

COMMAND = (sys.executable, "-m", "slipstream.serve.cli.main")
SCRIPTED = str(Path(__file__).parents[1] / "scripted_server")
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD)


def _before() -> None:
    """No test that fails leaves a server behind. Signals are ignored, as a process started in the background or by a
    supervisor may inherit them: the server sets what it needs."""
    die_with_parent()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


class ServerProcess:
    def __init__(
        self,
        *argv: str,
        wait: bool = True,
        command: Sequence[str] = COMMAND,
        cwd: Path | None = None,
        port: int | None = 0,
        scripted: bool = False,
    ) -> None:
        """`port` None: it listens elsewhere. `scripted`: its core has no model, see tests/scripted_server."""
        place = () if port is None else ("--port", str(port))
        self.process = subprocess.Popen(
            [*command, "serve", *argv, *place, "--num-threads", "1"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=child_env(*([SCRIPTED] if scripted else []), OMP_NUM_THREADS="1"),
            preexec_fn=_before,
        )
        self.lines: list[str] = []
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the log has ended
        threading.Thread(target=self._read, daemon=True).start()
        found = self.until(r"listening on (?:unix:\S+|(https?)://[\d.]+:(\d+))")
        if port is not None:
            self.port = int(found[2])
            self.url = f"{found[1]}://127.0.0.1:{self.port}"
        if wait:
            self.until("ready: serving")

    def until(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """Wait for a line of the log."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._news.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {pattern!r} in {seconds:.0f} s; the last: {self.lines[-5:]}") from None
            if line is None:
                self._news.put(None)
                raise AssertionError(f"the server ended without a line {pattern!r}; the last: {self.lines[-5:]}")
            if found := re.search(pattern, line):
                return found

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = None if body is None else json.dumps(body)
        known = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, data, known | headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, json.loads(content) if content[:1] in b"{[" else content

    def end(self, seconds: float = PATIENCE) -> int:
        """Wait for its end."""
        code = self.process.wait(seconds)
        self._reader_done.wait(PATIENCE)
        return code

    def stop(self) -> int:
        self.process.terminate()
        return self.end()

    def _read(self) -> None:
        self._reader_done = threading.Event()
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._news.put(line)
        self._news.put(None)
        self._reader_done.set()
