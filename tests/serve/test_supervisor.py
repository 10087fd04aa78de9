"""Several front ends: one that dies is restarted, and admin calls reach all of them."""

from __future__ import annotations

import http.client
import io
import itertools
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from patience import PATIENCE
from serve.asgi import at_door
from serve.server_process import ServerProcess
from serve.test_server_ends import ENDLESS, Stream, core_pid, front_end_of
from slipstream.base.processes import Backoff
from slipstream.metrics.stats import FrontEnds, SharedCounters
from slipstream.serve.http.server import supervisor
from slipstream.serve.http.server.listen import PortClaim
from slipstream.serve.http.server.settings import ServerSettings
from tiny import write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=131072))


def test_a_front_end_stays_down_longer_each_time_and_in_the_end_for_good():
    backoff = Backoff(limit=5, window=600.0, first=0.5, longest=3.0)
    assert [backoff.died(now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.5, 1.0, 2.0, 3.0, None]


def test_deaths_long_ago_do_not_count():
    backoff = Backoff(limit=3, window=600.0, first=0.5)
    assert [backoff.died(now) for now in (0.0, 700.0, 1400.0, 2100.0, 2200.0)] == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert backoff.died(2300.0) is None


class FakeProcess:
    """Ends as often as it is started, with the codes of a list; with None it goes on until it gets a signal."""

    codes: list[int | None] = []
    started: list[FakeProcess] = []

    def __init__(self, command, **more) -> None:
        self.stdin = io.BytesIO()
        self.code = self.codes.pop(0)
        self.signals: list[int] = []
        self.started.append(self)

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.code = -number


@pytest.fixture
def supervised(monkeypatch):
    """Runs a supervisor over fake processes that end with these codes; the clock goes as fast as it is asked."""

    def run(*codes: int | None) -> tuple[str | None, list[FakeProcess], FrontEnds]:
        clock = itertools.count()
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: float(next(clock)))
        monkeypatch.setattr(supervisor.signal, "signal", lambda number, handler: None)
        monkeypatch.setattr(supervisor.subprocess, "Popen", FakeProcess)
        FakeProcess.codes, FakeProcess.started = list(codes), []
        settings = ServerSettings(port=0, workers=2)
        ours, theirs = socket.socketpair()
        socks = [socket.socket() for _ in range(2)]
        under_test = supervisor.Supervisor(settings, PortClaim(settings), ours)
        told = []
        monkeypatch.setattr(under_test._own_counters, "write_front_ends", told.append)
        try:
            return under_test.run(socks), FakeProcess.started, told[-1]
        finally:
            theirs.close()

    return run


def test_one_that_dies_too_often_ends_the_server_and_the_others_in_order(supervised):
    cause, started, told = supervised(None, -9, 1, -11, 0, 1)
    assert "front end 1 exited with exit code 1, for the 5th time within 600 s" in cause
    assert len(started) == 6 and started[0].signals == [signal.SIGTERM] and told == FrontEnds(2, 0, 4)


def test_one_that_says_it_cannot_start_ends_the_server_at_once(supervised):
    cause, started, _ = supervised(None, supervisor.CANNOT_START)
    assert "front end 1 cannot start" in cause and started[0].signals == [signal.SIGTERM] and len(started) == 2


def front_ends(server: ServerProcess) -> list[int]:
    """Process ids, oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == server.process.pid
                and b"slipstream.serve.http.worker_main" in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def test_health_tells_that_a_front_end_is_missing_and_serves_on(folder):
    async def scenario(door):
        assert (await door.get("/health")).json() == {"status": "ok", "stage": None}
        fd = SharedCounters.create(2)
        door.state.server_stats.shared = SharedCounters(fd, 0, 2)
        SharedCounters(fd, 2, 2).write_front_ends(FrontEnds(2, 1, 3))
        found = await door.get("/health")
        wanted = {"status": "degraded", "stage": None, "front_ends": {"wanted": 2, "running": 1, "restarts": 3}}
        assert (found.status, found.json()) == (200, wanted)
        assert (await door.get("/ready")).status == 200

    at_door(Path(folder), scenario)


def until_health(server: ServerProcess, wanted: dict, status: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while (seen := server.call("GET", "/health"))[1] != {"status": status, "stage": None, "front_ends": wanted}:
        assert seen[0] == 200 and time.monotonic() < deadline, seen
        time.sleep(0.02)


def until_metric(server: ServerProcess, name: str, wanted: float) -> None:
    """Wait for a sum over all its labels: front ends tell each other what they have counted twice a second."""
    deadline, seen = time.monotonic() + PATIENCE, -1.0
    while seen != wanted:
        assert time.monotonic() < deadline, (name, seen, wanted)
        _, page = server.call("GET", "/metrics")
        seen = sum(float(line.rsplit(" ", 1)[1]) for line in page.decode().splitlines() if line.startswith(name))


def test_a_front_end_that_dies_is_started_again_while_the_other_serves_on(folder):
    """What the other has under way goes on, /health tells, counters do not fall, and the new one serves. An admin's
    word to end everything reaches all of them, before and after."""
    server = ServerProcess(folder, "--workers", "2", "--admin-key", "root", scripted=True)
    server.until("ready: serving")
    until_health(server, {"wanted": 2, "running": 2, "restarts": 0}, "ok")
    streams = [Stream(server, ENDLESS) for _ in range(12)]
    assert len({stream.front_end for stream in streams}) == 2, "all connections went to one front end"
    assert server.call("POST", "/abort_requests", authorization="Bearer root") == (200, {"aborted": 12})
    for stream in streams:
        *_, last, done = stream.end()
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "abort"
    until_metric(server, "slipstream_requests_aborted_total", 12)
    until_metric(server, 'slipstream_http_requests_total{route="/v1/completions"', 12)

    streams = [Stream(server, ENDLESS) for _ in range(12)]
    first, second = front_ends(server)
    os.kill(second, signal.SIGKILL)
    server.until("front end . exited with SIGKILL; restarting it in 0.5 s")
    server.until("ready: serving")
    until_health(server, {"wanted": 2, "running": 2, "restarts": 1}, "ok")
    assert len(front_ends(server)) == 2 and first in front_ends(server)
    ids = {request_id(server) for _ in range(60)}
    assert len(ids) == 2  # the new one serves too
    until_metric(server, "slipstream_front_end_restarts_total", 1)
    kept = [stream for stream in streams if stream.front_end in ids]
    assert kept and len(kept) < 12, "all connections went to one front end"
    assert server.call("POST", "/abort_requests", authorization="Bearer root") == (200, {"aborted": len(kept)})
    for stream in kept:
        assert json.loads(stream.end()[-2])["choices"][0]["finish_reason"] == "abort"
    until_metric(server, 'slipstream_http_requests_total{route="/v1/completions"', 12 + len(kept))
    assert server.stop() == 0, server.lines[-5:]


def request_id(server: ServerProcess) -> str:
    """The part of a request's id that tells front ends apart."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("GET", "/health")
    found = front_end_of(connection.getresponse())
    connection.close()
    return found


def test_a_front_end_that_dies_while_the_model_loads_is_started_again(folder):
    server = ServerProcess(folder, "--workers", "2", wait=False, scripted=True)
    deadline = time.monotonic() + PATIENCE
    while len(front_ends(server)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(front_ends(server)[0], signal.SIGKILL)
    server.until("restarting it")
    for _ in range(2):
        server.until("ready: serving")
    assert server.stop() == 0, server.lines[-5:]


def test_signals_to_a_whole_group_end_it_in_order(folder):
    """systemd sends SIGTERM to every process of a unit, and the supervisor hands its own on: no drain is cut short."""
    server = ServerProcess(folder, "--workers", "2", scripted=True)
    server.until("ready: serving")
    streams = [Stream(server, ENDLESS | {"max_tokens": 150}) for _ in range(6)]
    for pid in (server.process.pid, *front_ends(server), core_pid(server)):
        os.kill(pid, signal.SIGTERM)
    for stream in streams:
        *_, last, done = stream.end()
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert server.end() == 0, server.lines[-5:]


def test_a_second_signal_ends_all_front_ends_at_once(folder):
    server = ServerProcess(folder, "--workers", "2", "--drain-timeout", "600", scripted=True)
    server.until("ready: serving")
    stream = Stream(server, ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    server.until("draining: 1 requests")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0, server.lines[-5:]
    stream.end()


def test_a_front_end_that_cannot_start_is_not_started_again(folder, tmp_path):
    """As with one front end: the cause is reported, and the server ends."""
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    server = ServerProcess(str(broken), "--workers", "2", wait=False, scripted=True)
    assert server.end() != 0
    assert any("tokenizer.json" in line for line in server.lines)
    assert not any("restarting it" in line for line in server.lines)


def test_an_option_that_a_front_end_refuses_is_one_line_of_the_log(folder, tmp_path):
    (tmp_path / "batches.sqlite").write_bytes(b"not a database")
    server = ServerProcess(folder, "--workers", "2", "--batch-dir", str(tmp_path), wait=False, scripted=True)
    assert server.end() != 0
    (line, *_) = [line for line in server.lines if "a front end cannot start" in line]
    assert "batches.sqlite is damaged" in line and "--batch-dir" in line
    assert not any("restarting it" in line or "Traceback" in line for line in server.lines)
