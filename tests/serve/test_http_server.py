"""The HTTP server under the app: accepting connections, and refusals under overload."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn
import uvloop

from patience import PATIENCE
from serve.asgi import at_door
from slipstream.contracts.request import FinishReason
from slipstream.serve.http.server.listen import raise_file_limit
from slipstream.serve.http.server.protocol import bounded_protocol
from slipstream.serve.http.worker import Acceptor, Server

ASK = {"prompt": "hello", "max_tokens": 4}


@asynccontextmanager
async def served(door, tls=None, **config):
    """The door's app behind a real port."""
    config = uvicorn.Config(
        door.app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        http=bounded_protocol(4096, door.app),
        **config,
    )
    server, listener = Server(config, tls), socket.socket()
    door.server_state = server.server_state
    listener.bind(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def full(door):
    """A prompt is waiting, and no more than one may."""
    waiting = door.begin("POST", "/v1/completions", ASK, authorization="Bearer key")
    await door.core.until(lambda: door.core.submits)
    yield
    door.core.token(door.core.submits[0], 65, end=FinishReason.STOP)
    assert (await waiting.end()).status == 200


def head(path, length, *more):
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *more]
    lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


async def answer(reader):
    text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    status, *lines = text.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(body)


KEY = "authorization: Bearer key"


def test_a_full_server_refuses_on_the_head_alone_and_goes_on_with_the_connection(folder):
    async def scenario(door):
        async with served(door) as port, full(door):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("/v1/completions", 2000, KEY, "x-request-id: mine"))
            status, headers, body = await answer(reader)  # nothing of the body has been sent
            assert (status, headers["x-request-id"], headers["connection"]) == (429, "mine", "keep-alive")
            assert body["error"]["code"] == "queue_full" and int(headers["retry-after"]) >= 1
            writer.write(b"x" * 2000 + head("/v1/embeddings", 2, KEY) + b"{}" + head("/embed", 2, KEY) + b"{}")
            assert (await answer(reader))[0] == 429
            assert (await answer(reader))[2]["error_type"] == "Overloaded"  # as its clients know it
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await answer(reader))[0] == 200
            writer.close()
        assert door.state.counters.refused == {"queue_full": 3}
        assert door.state.counters.requests["/v1/completions", 429] == 1 and len(door.core.submits) == 1

    at_door(folder, scenario, answers=False, max_queued_requests=1, api_key=["key"])


def test_without_a_key_the_answer_is_401_even_if_full_and_tokenizing_still_works(folder):
    async def scenario(door):
        async with served(door) as port, full(door):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("/v1/completions", 2) + b"{}")
            assert (await answer(reader))[0] == 401
            writer.write(head("/v1/completions", 2, "authorization: Bearer guess") + b"{}")
            assert (await answer(reader))[0] == 401
            data = json.dumps({"prompt": "hello"}).encode()
            writer.write(head("/tokenize", len(data), KEY) + data)
            assert (await answer(reader))[0] == 200
            writer.close()
        assert not door.state.counters.refused

    at_door(folder, scenario, answers=False, max_queued_requests=1, api_key=["key"])


def test_a_refused_connection_that_is_to_close_closes_when_all_is_read(folder):
    async def scenario(door):
        async with served(door) as port, full(door):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("/v1/completions", 100, KEY, "connection: close") + b"x" * 50)
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (429, "close")
            writer.write(b"x" * 50)
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()

    at_door(folder, scenario, answers=False, max_queued_requests=1, api_key=["key"])


@pytest.mark.parametrize("behind", [1, 5000])
@pytest.mark.parametrize("comes_later", [False, True])
def test_a_connection_with_a_request_before_the_answer_to_another_ends_with_that(folder, behind, comes_later):
    """Pipelined: no client that is known does that, and all would have to be kept."""

    async def scenario(door):
        async with served(door) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = json.dumps(ASK).encode()
            ask, more = (
                head("/v1/completions", len(data), KEY) + data,
                b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * behind,
            )
            writer.write(ask if comes_later else ask + more)
            await door.core.until(lambda: door.core.submits)
            (protocol,) = door.server_state.connections
            if comes_later:
                writer.write(more)
            while not protocol._is_ending:
                await asyncio.sleep(0)
            assert not protocol.pipeline
            door.core.token(door.core.submits[0], 65, end=FinishReason.STOP)
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (200, "close")
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()
        assert len(door.core.submits) == 1

    at_door(folder, scenario, answers=False, api_key=["key"])


def test_a_lost_connection_ends_the_request_that_runs_and_those_behind_it(folder):
    async def scenario(door):
        async with served(door) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            data = json.dumps(ASK | {"stream": True}).encode()
            writer.write((head("/v1/completions", len(data)) + data) * 3)
            await door.core.until(lambda: door.core.submits)
            writer.close()
            await door.core.until(lambda: door.core.aborts)
        assert len(door.core.submits) == 1 and door.state.counters.aborted == {"disconnect": 1}

    at_door(folder, scenario, answers=False)


def test_an_answer_without_a_body_leaves_at_once_and_the_connection_goes_on(folder):
    async def scenario(door):
        async with served(door) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)).startswith(b"HTTP/1.1 200")
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await answer(reader))[0] == 200
            writer.close()

    at_door(folder, scenario)


def test_a_refused_request_that_expects_100_continue_ends_its_connection(folder):
    """A client that expects 100-continue may omit its body; its next request must not be read as the body."""

    async def scenario(door):
        async with served(door) as port, full(door):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head("/v1/completions", 100, KEY, "expect: 100-continue"))
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (429, "close")
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()

    at_door(folder, scenario, answers=False, max_queued_requests=1, api_key=["key"])


def test_a_refused_connection_that_sends_nothing_more_is_closed(folder):
    async def scenario(door):
        async with served(door, timeout_keep_alive=0.2) as port, full(door):
            for rest in (b"x" * 100, b"x"):  # all of its body, or a part of it
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head("/v1/completions", 100, KEY))
                assert (await answer(reader))[0] == 429
                writer.write(rest)
                assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
                writer.close()

    at_door(folder, scenario, answers=False, max_queued_requests=1, api_key=["key"])


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_a_head_that_comes_too_slowly_ends_its_connection(folder, monkeypatch, before):
    """The first of a connection, and any after it."""
    monkeypatch.setattr("slipstream.serve.http.server.protocol._HEADER_SECONDS", 0.05)

    async def scenario(door):
        async with served(door, timeout_keep_alive=1000) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if before:
                writer.write(before)
                assert (await answer(reader))[0] == 200
            writer.write(b"GET /hea")
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()

    at_door(folder, scenario)


def test_all_connections_that_wait_are_taken_at_once():
    """uvloop's own server takes one in a turn of the loop."""
    made = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport):
            made.append(transport)

    async def scenario():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(50)]
            acceptor = Acceptor(listener, Taken)
            for _ in range(4):
                await asyncio.sleep(0)
            assert len(made) == 50
            assert made[0].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            acceptor.close()
            await acceptor.wait_closed()
            for each in (*made, *clients):
                each.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_a_connection_that_is_being_taken_when_the_server_ends_is_closed():
    async def scenario():
        with socket.socket() as listener, socket.socket() as client:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            client.connect(listener.getsockname())
            acceptor = Acceptor(listener, asyncio.Protocol)
            while not acceptor._opening:
                await asyncio.sleep(0)
            acceptor.close()
            await acceptor.wait_closed()
            client.setblocking(False)
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), PATIENCE) == b""

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_as_many_files_may_be_open_as_the_system_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard if hard != resource.RLIM_INFINITY else 2**20, 2**20) and hard == before[1]
        raise_file_limit()  # and never fewer
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_system_without_room_is_asked_again_later(monkeypatch, caplog):
    class Full:
        tries = 0

        def accept(self):
            self.tries += 1
            raise OSError(24, "Too many open files")

        def __getattr__(self, name):
            return getattr(listener, name)

    monkeypatch.setattr("slipstream.serve.http.worker._PAUSE_SECONDS", 0.0)

    async def scenario():
        sock = Full()
        acceptor = Acceptor(sock, asyncio.Protocol)
        with socket.create_connection(listener.getsockname()):
            while sock.tries < 3:
                await asyncio.sleep(0)
        acceptor.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    assert "Too many open files" in caplog.text
