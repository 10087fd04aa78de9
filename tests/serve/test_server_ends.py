"""How a server ends: in order, at once, or with the root cause as its last line."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from child import child_env
from patience import PATIENCE
from serve.server_process import COMMAND, ServerProcess
from tiny import write_tiny

ENDLESS = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=131072))


def front_end_of(response: http.client.HTTPResponse) -> str:
    """Which of several front ends it came from: each has a prefix of its own for ids."""
    return response.getheader("x-request-id", "")[:12]


class Stream:
    """A completion that is read in the background."""

    def __init__(self, server: ServerProcess, body: dict) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        self.response = self.connection.getresponse()
        self.front_end = front_end_of(self.response)
        self.data = self.response.readline()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            while part := self.response.read1():
                self.data += part
        except (http.client.HTTPException, OSError) as error:
            self.error = error

    def end(self) -> list[str]:
        self.thread.join(PATIENCE)
        return [part.removeprefix("data: ") for part in self.data.decode().split("\n\n")][:-1]


def core_pid(server: ServerProcess) -> int:
    """The child that is the core, from the list of all processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == server.process.pid
                and b"slipstream.transport.core_process" in (folder / "cmdline").read_bytes()
            ):
                return int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError("there is no core")


def test_sigterm_lets_requests_end_and_exits_in_order(folder):
    server = ServerProcess(folder, scripted=True)
    streams = [Stream(server, ENDLESS | {"max_tokens": 150}) for _ in range(6)]
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        *_, last, done = stream.end()
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert server.end() == 0, server.lines[-5:]


def test_what_does_not_end_within_the_drain_is_ended_with_what_there_is(folder):
    server = ServerProcess(folder, "--drain-timeout", "0.3", scripted=True)
    stream = Stream(server, ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    *_, last, done = stream.end()
    assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "abort"
    assert server.end() == 0, server.lines[-5:]


def test_half_open_sockets_do_not_hold_the_end_and_leave_no_traceback(folder):
    """Half a head, no body, half a body, and an idle connection: the drain may take ten minutes, and takes a moment."""
    server = ServerProcess(folder, "--drain-timeout", "600", scripted=True)
    start = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
    )
    socks = []
    for data in (b"", start, start + b"\r\n", start + b'\r\n{"prompt"'):
        socks.append(sock := socket.create_connection(("127.0.0.1", server.port)))
        sock.sendall(data)
    assert server.call("GET", "/health")[0] == 200  # later than those were read
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0, server.lines[-5:]
    assert not any("Traceback" in line or "Exception" in line for line in server.lines), server.lines
    answers = [sock.recv(2**16) for sock in socks]
    assert [data[:12] for data in answers] == [b"", b"", b"HTTP/1.1 503", b"HTTP/1.1 503"]
    for sock in socks:
        sock.close()


def test_a_second_signal_ends_at_once(folder):
    server = ServerProcess(folder, "--drain-timeout", "600", scripted=True)
    stream = Stream(server, ENDLESS)
    server.process.send_signal(signal.SIGINT)
    server.until("draining: 1 requests")
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0, server.lines[-5:]
    stream.end()


def test_a_core_killed_mid_stream_ends_streams_and_server_with_the_cause(folder):
    """Also in a log of JSON, whose last line is JSON too."""
    server = ServerProcess(folder, "--log-format", "json", scripted=True)
    streams = [Stream(server, ENDLESS) for _ in range(4)]
    os.kill(core_pid(server), signal.SIGKILL)
    for stream in streams:
        *_, last, done = stream.end()
        assert done == "[DONE]" and json.loads(last)["error"]["code"] == "engine_dead"
    assert server.end() == 1
    said = [json.loads(line) for line in server.lines]
    assert said[-1]["level"] == "critical" and "SIGKILL" in said[-1]["message"]


def broken(folder, tmp_path):
    """A model that can be found and not read."""
    copy = shutil.copytree(folder, tmp_path / "broken")
    (copy / "config.json").write_text("{")
    return str(copy)


def test_an_option_that_the_core_refuses_is_an_error_of_options_in_json(folder):
    """Nothing in the log is no JSON, and the exit code says that a restart would not help."""
    server = ServerProcess(folder, "--max-model-len", "1000000000", "--log-format", "json", wait=False)
    assert server.end() == 2
    said = [json.loads(line) for line in server.lines]
    assert said[-1]["level"] == "critical" and said[-1]["message"].startswith("--max-model-len is 1000000000")


def test_liveness_comes_before_the_model_and_a_bad_model_is_the_last_line(folder, tmp_path):
    server = ServerProcess(broken(folder, tmp_path), wait=False)
    assert server.call("GET", "/livez")[0] == 200  # the core has not even loaded torch
    assert server.call("GET", "/health")[0] == 503
    assert server.end() == 1
    assert "config.json" in server.lines[-1]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_taken_port_is_one_line(folder, workers):
    """Also if the process that listens there allows sharing."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = str(sock.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "serve", folder, "--port", port, "--workers", workers],
            capture_output=True, text=True, env=child_env(),
        )  # fmt: skip
    assert done.returncode == 2 and "cannot listen" in done.stderr and "Traceback" not in done.stderr


def test_several_front_ends_share_a_port_and_end_together(folder):
    server = ServerProcess(folder, "--workers", "2", scripted=True)
    server.until("ready: serving")  # the other one
    ids = set()
    for _ in range(40):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("GET", "/health")
        ids.add(front_end_of(connection.getresponse()))
        connection.close()
    assert len(ids) == 2
    streams = [Stream(server, ENDLESS | {"max_tokens": 50}) for _ in range(8)]
    for stream in streams:
        assert stream.end()[-1] == "[DONE]"
    before = None  # new connections: a conversation goes on at either front end
    for _ in range(8):
        body = {"input": "a", "max_output_tokens": 1, "previous_response_id": before}
        status, answer = server.call("POST", "/v1/responses", body)
        assert status == 200, answer
        before = answer["id"]
    assert server.stop() == 0, server.lines[-5:]


def test_several_front_ends_end_with_the_cores_cause(folder):
    server = ServerProcess(folder, "--workers", "2", scripted=True)
    server.until("ready: serving")
    os.kill(core_pid(server), signal.SIGKILL)
    assert server.end() == 1
    assert "SIGKILL" in server.lines[-1] and server.lines[-1].startswith("slipstream: ")
