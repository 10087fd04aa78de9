"""Where a server listens beside a plain port: behind TLS, and on a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import ssl
from pathlib import Path

import pytest

from patience import PATIENCE
from serve.asgi import at_door
from serve.server_process import ServerProcess
from slipstream.base.errors import InvalidOption
from slipstream.serve.cli.serve import server_settings
from slipstream.serve.http import worker
from slipstream.serve.http.server.listen import UnixClaim

TLS = Path(__file__).parent / "tls"
CERT, KEY = str(TLS / "server.crt"), str(TLS / "server.key")
ASK = {"prompt": "hello", "max_tokens": 3, "temperature": 0}


class Local(http.client.HTTPConnection):
    """Over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def asked(connection, method, path, body=None):
    connection.request(method, path, None if body is None else json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def encrypted(port):
    return http.client.HTTPSConnection(
        "localhost", port, context=ssl.create_default_context(cafile=CERT), timeout=PATIENCE
    )


def test_a_server_with_a_certificate_accepts_https_only(tiny_folder, monkeypatch):
    server = ServerProcess(tiny_folder, "--ssl-certfile", CERT, "--ssl-keyfile", KEY, "--workers", "2", scripted=True)
    server.until("ready: serving")
    assert server.url.startswith("https://")
    for _ in range(4):  # both front ends
        connection = encrypted(server.port)
        assert asked(connection, "POST", "/v1/completions", ASK)[0] == 200
        assert asked(connection, "GET", "/v1/models")[0] == 200  # the connection goes on
    with socket.create_connection(("127.0.0.1", server.port), 10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        plain.settimeout(PATIENCE)
        answer = b""
        try:
            while part := plain.recv(1000):
                answer += part
        except ConnectionResetError:
            pass
        assert b"HTTP/" not in answer
    with pytest.raises(ssl.SSLError):  # a client without the certificate
        http.client.HTTPSConnection("localhost", server.port, timeout=PATIENCE).request("GET", "/health")
    monkeypatch.setenv("SSL_CERT_FILE", CERT)
    from slipstream.serve.cli.main import main

    assert main(["chat", "hi", "--url", f"https://localhost:{server.port}", "--max-tokens", "2"]) == 0
    assert server.stop() == 0, server.lines[-5:]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ssl_certfile": "/no/such.crt"}, "ssl_certfile /no/such.crt cannot be used: No such file"),
        ({"ssl_certfile": CERT}, "cannot be used"),  # without its key
        ({"ssl_certfile": CERT, "ssl_keyfile": str(TLS / "other.key")}, "cannot be used"),
        ({"ssl_certfile": CERT, "ssl_keyfile": str(TLS / "encrypted.key")}, "is encrypted"),
        ({"ssl_certfile": KEY, "ssl_keyfile": KEY}, "cannot be used"),
        ({"ssl_keyfile": KEY}, "without ssl_certfile"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(given, words):
    with pytest.raises(InvalidOption, match=words):
        server_settings(given)


def test_a_certificate_may_hold_its_key(tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(Path(CERT).read_text() + Path(KEY).read_text())
    assert server_settings({"ssl_certfile": str(both)}).ssl_keyfile is None


def test_a_handshake_that_never_ends_does_not_delay_others(folder):
    """Nor does one that ends in the middle."""
    from serve.test_http_server import served
    from slipstream.serve.http.server.listen import server_context

    async def scenario(door):
        context = server_context(server_settings({"ssl_certfile": CERT, "ssl_keyfile": KEY}))
        async with served(door, tls=context) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            _, broken = await asyncio.open_connection("127.0.0.1", port)
            broken.write(b"\x16\x03\x01\x02\x00\x01\x00")
            broken.close()
            client = ssl.create_default_context(cafile=CERT)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith(b"HTTP/1.1 200")
            for _, each in (*silent, (reader, writer)):
                each.close()

    at_door(folder, scenario)


def test_a_handshake_that_never_ends_does_not_hold_up_the_end_of_a_server(folder, monkeypatch):
    from serve.test_http_server import served
    from slipstream.serve.http.server.listen import server_context

    monkeypatch.setattr(worker, "HANDSHAKE_SECONDS", 100 * PATIENCE)

    async def scenario(door):
        context = server_context(server_settings({"ssl_certfile": CERT, "ssl_keyfile": KEY}))
        async with served(door, tls=context) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            client = ssl.create_default_context(cafile=CERT)
            _, last = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
            last.close()  # all connections before it are accepted
        for reader, writer in silent:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    at_door(folder, scenario)


def test_a_server_on_a_unix_socket(tiny_folder, tmp_path):
    path = str(tmp_path / "s")
    server = ServerProcess(
        tiny_folder, "--uds", path, "--workers", "2", "--log-level", "info", "--log-format", "json", port=None,
        scripted=True,
    )  # fmt: skip
    server.until("ready: serving")  # the other one
    for _ in range(4):
        assert asked(Local(path), "POST", "/v1/completions", ASK)[0] == 200
    connection = Local(path)
    connection.putrequest("GET", "/v1/models", skip_host=True)
    connection.putheader("host", "any.example")  # no browser reaches a unix socket
    connection.endheaders()
    assert connection.getresponse().status == 200
    with pytest.raises(InvalidOption, match="^another server listens"):
        UnixClaim(path)
    assert server.stop() == 0, server.lines[-5:]
    assert not os.path.exists(path)
    lines = [json.loads(line) for line in server.lines]
    assert {line["client"] for line in lines if "client" in line} == {"unix"}


def test_what_a_killed_server_left_is_removed_and_what_is_no_socket_is_not(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
    claim = UnixClaim(path)
    with socket.socket(socket.AF_UNIX) as client, claim.listener() as listener:
        client.connect(path)
        listener.accept()[0].close()
    claim.close()
    assert not os.path.exists(path)
    Path(path).write_text("precious")
    with pytest.raises(InvalidOption, match="^uds is .* not a socket; choose another path$"):
        UnixClaim(path)
    assert Path(path).read_text() == "precious"


def test_the_end_of_a_server_leaves_anothers_socket_alone(tmp_path):
    path = str(tmp_path / "s")
    first = UnixClaim(path)
    os.unlink(path)
    second = UnixClaim(path)
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)


@pytest.mark.parametrize("path", ["/no/such/folder/s", "x" * 200, "a\0b"])
def test_a_path_where_no_socket_can_be_is_refused(path):
    with pytest.raises(InvalidOption, match="cannot listen on the unix socket"):
        UnixClaim(path)
