"""Bodies that come slowly, not at all or without end, and answers that are not read: none holds its connection."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import pytest

from patience import PATIENCE
from serve.asgi import at_door
from serve.test_http_server import ASK, answer, head, served
from slipstream.contracts.request import FinishReason

BODY = json.dumps(ASK).encode()


async def connect(port, *data):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in data:
        writer.write(part)
    return reader, writer


async def ended(reader):
    assert await asyncio.wait_for(reader.read(), PATIENCE) == b""


ROUTES = ["/v1/completions", "/v1/embeddings", "/embed", "/tokenize", "/abort_requests"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("part", [b"", b"{"], ids=["silent", "a byte and silent"])
def test_a_body_that_does_not_come_gets_408_and_its_connection_ends(folder, path, part):
    async def scenario(door):
        async with served(door) as port:
            reader, writer = await connect(port, head(path, 100, "authorization: Bearer root"), part)
            status, headers, body = await answer(reader)
            assert (status, headers["connection"]) == (408, "close") and "--body-timeout" in json.dumps(body)
            await ended(reader)
            writer.close()
        assert door.state.counters.aborted == {"body_timeout": 1} and door.state.bodies.num_bytes == 0

    at_door(folder, scenario, body_timeout=0.05, admin_key="root")


def test_a_chunked_body_that_goes_on_byte_by_byte_ends_too(folder, monkeypatch):
    """Each byte alone would not be too late."""
    monkeypatch.setattr("slipstream.serve.http.server.body.MIN_RATE", 1000)
    lines = [
        "POST /tokenize HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        "transfer-encoding: chunked",
    ]

    async def scenario(door):
        async with served(door) as port:
            reader, writer = await connect(port, "\r\n".join([*lines, "", ""]).encode())
            end = asyncio.create_task(reader.read())
            while not end.done():
                writer.write(b"1\r\nx\r\n")
                await asyncio.sleep(0.01)
            # what a client sends after the answer may reset the connection before it has read it
            assert isinstance(end.exception(), ConnectionResetError) or end.result().startswith(b"HTTP/1.1 408")
            writer.close()
        assert door.state.counters.aborted == {"body_timeout": 1}

    at_door(folder, scenario, body_timeout=0.1)


CHUNKED = b"\r\n".join(
    [b"POST /tokenize HTTP/1.1", b"host: localhost", b"content-type: application/json"]
    + [b"transfer-encoding: chunked", b"", b""]
)


@pytest.mark.parametrize("part", [b"a: b\r\n" * 50, b"b" * 300], ids=["trailers", "a long line"])
@pytest.mark.parametrize("begin", [b"0\r\na: b", b"1;b"], ids=["after the last chunk", "after the size of a chunk"])
def test_what_is_neither_headers_nor_body_is_bounded_too(folder, begin, part):
    async def scenario(door):
        async with served(door) as port:
            reader, writer = await connect(port, CHUNKED, begin)
            read = asyncio.create_task(reader.read())
            for _ in range(1000):
                writer.write(part)
                await asyncio.sleep(0)
                if read.done():
                    break
            await asyncio.wait([read], timeout=PATIENCE)
            # what a client sends after the answer may reset the connection before it has read it
            assert isinstance(read.exception(), ConnectionResetError) or read.result().startswith(b"HTTP/1.1 400")
            writer.close()

    at_door(folder, scenario, max_header_bytes=1024)


def test_trailers_are_no_headers(folder):
    body = b'{"prompt": "x"}'
    data = b"%x\r\n%b\r\n0\r\nx-request-timeout: nonsense\r\n\r\n" % (len(body), body)

    async def scenario(door):
        async with served(door) as port:
            reader, writer = await connect(port, CHUNKED, data)
            assert (await answer(reader))[0] == 200
            writer.close()

    at_door(folder, scenario)


def test_a_body_that_comes_slowly_and_steadily_arrives(folder, monkeypatch):
    """Bytes that have come allow for more time: here each allows for hours."""
    monkeypatch.setattr("slipstream.serve.http.server.body.MIN_RATE", 1e-4)

    async def scenario(door):
        async with served(door) as port:
            reader, writer = await connect(port, head("/v1/completions", len(BODY)), BODY[:1])
            await asyncio.sleep(0.2)
            writer.write(BODY[1:])
            assert (await answer(reader))[0] == 200
            writer.close()

    at_door(folder, scenario, body_timeout=0.1)


def test_the_time_of_a_request_includes_its_body(folder):
    async def scenario(door):
        async with served(door) as port:
            late = head("/v1/completions", 100, "x-request-timeout: 0.05")
            reader, writer = await connect(port, late, b"{")
            status, _, body = await answer(reader)
            assert (status, body["error"]["code"]) == (408, "deadline")
            writer.close()

    at_door(folder, scenario)


def test_bodies_of_all_requests_together_are_bounded(folder):
    async def scenario(door):
        async with served(door) as port:
            first = await connect(port, head("/v1/completions", len(BODY) + 600), b" " * 600)
            while door.state.bodies.num_bytes < 600:
                await asyncio.sleep(0)
            reader, writer = await connect(port, head("/v1/completions", 1000), b" " * 600)
            status, headers, body = await answer(reader)
            assert (status, body["error"]["code"], headers["retry-after"]) == (429, "bodies_full", "1")
            first[1].write(BODY)
            assert (await answer(first[0]))[0] == 200  # it was there before
            alone = await connect(port, head("/v1/completions", len(BODY) + 2000), b" " * 2000, BODY)
            assert (await answer(alone[0]))[0] == 200  # more than all may have, and no other request is open
            for each in (writer, first[1], alone[1]):
                each.close()
        assert door.state.bodies.num_bytes == 0 and door.state.counters.refused == {"bodies_full": 1}

    at_door(folder, scenario, max_bodies_bytes=1000)


def test_the_rest_of_a_body_that_was_answered_already_does_not_hold_its_connection(folder, monkeypatch):
    """A refusal, a body that is too large, and one that the route does not read."""
    monkeypatch.setattr("slipstream.serve.http.server.protocol._REST_SECONDS", 0.05)

    async def scenario(door):
        async with served(door, timeout_keep_alive=1000) as port:
            get = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
            for start, wanted in ((head("/v1/completions", 10**6), 413), (head("/nowhere", 10**3), 404), (get, 200)):
                reader, writer = await connect(port, start, b"x" * 100)
                assert (await answer(reader))[0] == wanted
                await ended(reader)
                writer.close()
            reader, writer = await connect(port, head("/nowhere", 200), b"x" * 100)
            assert (await answer(reader))[0] == 404
            writer.write(b"x" * 100 + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await answer(reader))[0] == 200  # a client that sends the rest is answered
            writer.close()

    at_door(folder, scenario, max_body_bytes=10**5)


def test_a_drain_does_not_wait_for_bodies(folder, monkeypatch):
    monkeypatch.setattr("slipstream.serve.http.server.body._DRAIN_SECONDS", 0.05)

    async def scenario(door):
        async with served(door) as port:
            before = [await connect(port, head("/v1/completions", 100), part) for part in (b"", b"{")]
            idle = await connect(port)
            while len(door.state.bodies._timeouts) < 2:
                await asyncio.sleep(0)
            door.state.drain()
            idle[1].write(head("/v1/completions", 100))  # begun after the drain
            for reader, writer in (*before, idle):
                status, headers, body = await answer(reader)
                assert (status, body["error"]["code"], headers["connection"]) == (503, "draining", "close")
                await ended(reader)
                writer.close()
        assert door.state.counters.refused == {"draining": 3}

    at_door(folder, scenario)


def test_connections_that_neither_read_nor_write_are_cut_off_without_a_traceback(folder, monkeypatch, caplog):
    """A stream whose client does not read, a body that does not come, and a request that the engine never answers."""
    monkeypatch.setattr("slipstream.serve.http.worker._CLOSE_SECONDS", 0.1)
    caplog.set_level(logging.INFO)

    async def scenario(door):
        async with served(door) as port:
            endless = json.dumps(ASK | {"stream": True, "max_tokens": 50}).encode()
            half_open = [
                await connect(port, head("/v1/completions", len(endless)), endless),
                await connect(port, head("/v1/completions", len(BODY)), BODY),
                await connect(port, head("/v1/completions", 100)),
            ]
            await door.core.until(lambda: len(door.core.submits) == 2)
            stream, silent = door.core.submits
            door.core.token(stream, 65)
        assert not door.state.engine.load.num_open
        assert door.state.counters.aborted["disconnect"] == 3
        for _, writer in half_open:
            writer.close()

    at_door(folder, scenario, answers=False)
    assert (
        "Traceback" not in caplog.text and "Exception in ASGI" not in caplog.text and "did not end" not in caplog.text
    )


@pytest.mark.parametrize("body", [b"x" * 2**20, b"x" * 2**15], ids=["large", "small"])
def test_an_answer_that_is_not_read_does_not_hold_its_connection(folder, monkeypatch, body):
    """A large one stops writing; a small one is in the buffers of a connection that is kept alive no longer."""
    monkeypatch.setattr("slipstream.serve.http.server.protocol._SECONDS", 0.05)

    async def respond(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def scenario(door):
        respond.refusal = lambda *given: None
        door.app = respond
        async with served(door, timeout_keep_alive=0.01 if len(body) < 2**16 else 1000) as port:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            while not (found := door.server_state.connections):
                await asyncio.sleep(0)
            (connection,) = found
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            while found:
                await asyncio.sleep(0.01)
            client.close()

    at_door(folder, scenario)


def test_streams_that_end_as_the_server_does_are_whole(folder):
    async def scenario(door):
        async with served(door) as port:
            reader, writer = await connect(port, head("/v1/completions", len(BODY)), BODY)
            await door.core.until(lambda: door.core.submits)
            asyncio.get_running_loop().call_later(
                0.05, lambda: door.core.token(door.core.submits[0], 65, end=FinishReason.STOP)
            )
        assert (await answer(reader))[0] == 200  # its end came while connections were closed
        writer.close()

    at_door(folder, scenario, answers=False)
