"""`--replica-urls`: requests are passed on to scripted servers; streams, deaths, health, routing, wrong options."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from patience import PATIENCE
from slipstream.base.errors import InvalidOption
from slipstream.serve.cli import serve
from slipstream.serve.cli.main import main
from slipstream.serve.http.server import access, replica_proxy
from slipstream.serve.http.server.replica_proxy import PROBES, ReplicaProxy
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.url_replicas import ADAPTER_BYTES, BLOCK, UrlReplicas, block_hashes
from slipstream.serve.http.table import all_routes

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n"
JSON = HEAD % b"application/json"
STREAM = HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"


class Upstream:
    """A server whose answers the test writes: `next` has the open requests."""

    def __init__(self):
        self.next = asyncio.Queue()
        self.ready = b"200 OK"
        self.bodies = []
        self.models = None  # base models and adapters: those have a parent; None: the route is not there
        self.num_lists = 0

    async def start(self):
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _connected(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 " + self.ready + b"\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        if head.startswith(b"GET /v1/models"):
            self.num_lists += 1
            cards = [{"id": name, "parent": parent} for name, parent in (self.models or {}).items()]
            status = b"401 No" if b"Bearer k" not in head else b"404 No" if self.models is None else b"200 OK"
            body = json.dumps({"object": "list", "data": cards}).encode()
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
            writer.close()
            return
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        body = await reader.readexactly(length)
        self.bodies.append(body)
        await self.next.put((head, reader, writer))


def with_proxy(scenario, count=2, tls=None, **settings):
    async def run():
        upstreams = [Upstream() for _ in range(count)]
        for each in upstreams:
            await each.start()
        replicas = UrlReplicas([each.url for each in upstreams])
        proxy = ReplicaProxy(ServerSettings(**{"max_body_bytes": 5000, "allowed_hosts": ["*"], **settings}), replicas)
        listener = socket.create_server(("127.0.0.1", 0))
        server = await proxy.serve(listener, tls)
        proxy.port = listener.getsockname()[1]
        for replica in replicas.all:
            await replica.check()
        try:
            await asyncio.wait_for(scenario(proxy, upstreams), PATIENCE)
        finally:
            server.close()
            for each in upstreams:
                each.server.close()

    asyncio.run(run())


async def send(proxy, body=b"{}", path="/v1/completions", method="POST"):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k\r\n".encode())
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    reader.client = writer  # a writer without a reference closes its connection
    return reader, writer


async def first(*upstreams):
    """The next request at any of the servers: its index, head, reader and writer."""
    waiting = [asyncio.ensure_future(each.next.get()) for each in upstreams]
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for each in rest:
        each.cancel()
    (found,) = done
    return waiting.index(found), *found.result()


def test_an_answer_is_passed_on_with_its_headers():
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy, b'{"a": 1}')
        index, head, _, writer = await first(*upstreams)
        assert upstreams[index].bodies == [b'{"a": 1}']
        assert b"Authorization: Bearer k" in head and b"Host: 127.0.0.1" in head and b"X-Forwarded-For: 127" in head
        writer.write(JSON + b"X-Request-Id: r\r\nContent-Length: 2\r\n\r\n{}")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"X-Request-Id: r" in answer and answer.endswith(b"\r\n\r\n{}")

    with_proxy(scenario)


def test_a_proxy_behind_tls_ends_handshakes_that_take_too_long(monkeypatch):
    """No other request waits for them; plain HTTP gets no answer."""
    monkeypatch.setattr(replica_proxy, "HANDSHAKE_SECONDS", 0.01)
    folder = Path(__file__).parent / "tls"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "server.crt", folder / "server.key")

    async def scenario(proxy, upstreams):
        silent, _ = await asyncio.open_connection("127.0.0.1", proxy.port)
        plain, _ = await send(proxy)
        for reader in (silent, plain):
            with suppress(ConnectionResetError):
                assert b"HTTP" not in await reader.read()

    with_proxy(scenario, tls=tls)
    monkeypatch.setattr(replica_proxy, "HANDSHAKE_SECONDS", 2 * PATIENCE)

    async def answered(proxy, upstreams):
        _, kept = await asyncio.open_connection("127.0.0.1", proxy.port)
        client = ssl.create_default_context(cafile=folder / "server.crt")
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, ssl=client, server_hostname="localhost")
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
        _, _, _, upstream = await first(*upstreams)
        upstream.write(JSON + b"Content-Length: 2\r\n\r\n{}")
        assert (await reader.read()).endswith(b"{}")
        for each in (kept, writer):
            each.close()

    with_proxy(answered, tls=tls)


def test_a_request_that_offers_http2_is_passed_on_with_its_body_and_without_the_offer():
    async def scenario(proxy, upstreams):
        for size in (1, 1000):
            data = b"POST /v1/chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            data += b"HTTP2-Settings: AAEA\r\nX-More: yes\r\nContent-Length: 8\r\n\r\n" + b'{"a": 1}'
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await asyncio.sleep(0)
            index, head, _, upstream = await first(*upstreams)
            assert upstreams[index].bodies.pop() == b'{"a": 1}' and head.startswith(b"POST /v1/chat HTTP/1.1\r\n")
            assert b"yes" in head and b"h2c" not in head and b"AAEA" not in head
            upstream.write(JSON + b"Content-Length: 2\r\n\r\n{}")
            assert (await reader.read()).endswith(b"{}")

    with_proxy(scenario)


def test_what_follows_a_request_in_the_same_bytes_is_no_part_of_it():
    async def scenario(proxy, upstreams):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(
            b"".join(b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nab%d" % (i, i) for i in (1, 2))
        )
        index, head, _, upstream = await first(*upstreams)
        assert upstreams[index].bodies == [b"ab1"] and head.startswith(b"POST /1 HTTP/1.1\r\n")
        upstream.write(JSON + b"Content-Length: 2\r\n\r\n{}")
        assert (await reader.read()).endswith(b"{}")
        writer.close()

    with_proxy(scenario)


@pytest.mark.parametrize("more", [b"\r\n", b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["line", "request"])
def test_what_follows_a_request_does_not_end_it(more):
    async def scenario(proxy, upstreams):
        reader, client = await send(proxy)
        _, _, upstream, writer = await first(*upstreams)
        client.write(more)
        await client.drain()
        assert not await ends_soon(upstream)
        writer.write(JSON + b"Content-Length: 2\r\n\r\n{}")
        assert (await reader.read()).endswith(b"{}")
        _, client = await send(proxy)
        _, _, upstream, _ = await first(*upstreams)
        client.write(b"x" * 2**21)
        assert await upstream.read() == b""  # too much: it is disconnected

    with_proxy(scenario)


async def ends_soon(reader):
    """Whether the connection ends within some turns of the event loop, in which the proxy reads what was sent."""
    for _ in range(50):
        await asyncio.sleep(0)
    return reader.at_eof()


def test_a_stream_is_passed_on_piece_by_piece():
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy)
        _, _, _, writer = await first(*upstreams)
        writer.write(STREAM + b"9\r\ndata: 1\n\n\r\n")
        await reader.readuntil(b"data: 1\n\n")  # before the server goes on
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        assert (await reader.read()).endswith(b"data: 2\n\n\r\n0\r\n\r\n")

    with_proxy(scenario)


def test_a_request_without_an_answer_runs_on_another_server_and_the_dead_one_is_out():
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy, b"again")
        index, _, _, writer = await first(*upstreams)
        writer.transport.abort()
        other, _, _, writer = await first(*upstreams)
        assert other != index and upstreams[other].bodies == [b"again"]
        writer.write(JSON + b"Content-Length: 2\r\n\r\n{}")
        assert (await reader.read()).endswith(b"{}")
        assert [replica.is_ready for replica in proxy.replicas.all] == [other == 0, other == 1]
        assert proxy.num_rerouted == 1 and proxy.num_lost == 0
        health = await (await send(proxy, path="/health", method="GET"))[0].read()
        assert b'"status":"degraded"' in health
        assert await proxy.replicas.all[index].check()  # it is in again
        assert all(replica.num_open == replica.open_bytes == 0 for replica in proxy.replicas.all)

    with_proxy(scenario)


def test_a_server_that_dies_within_a_stream_ends_it_with_an_error_event():
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy)
        _, _, _, writer = await first(*upstreams)
        writer.write(STREAM + b"9\r\ndata: 1\n\n\r\n")
        await reader.readuntil(b"data: 1\n\n")
        writer.transport.abort()
        rest = await reader.read()
        event = json.loads(rest.split(b"data: ")[1].split(b"\n\n")[0])
        assert event["error"]["type"] == "replica_lost" and rest.endswith(b"0\r\n\r\n")
        assert proxy.num_lost == 1 and proxy.num_rerouted == 0

    with_proxy(scenario)


EVENTS = [b'data: {"text": "%d"}\n\n' % number for number in range(3)]
CHUNKED = STREAM + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in EVENTS)


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("cut", range(0, len(CHUNKED) + 1, 3))
def test_a_server_that_is_killed_at_any_byte_never_ends_a_stream_silently(cut, resets):
    """Before the first event the request runs again elsewhere; later the last event is an error that can be read."""

    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy, b"again")
        index, _, _, writer = await first(*upstreams)
        writer.write(CHUNKED[:cut])
        await writer.drain()
        writer.transport.abort() if resets else writer.close()
        answer = asyncio.ensure_future(reader.read())
        again = asyncio.ensure_future(first(*upstreams))
        await asyncio.wait([answer, again], return_when=asyncio.FIRST_COMPLETED)
        if again.done():  # the client has nothing yet
            other, _, _, writer = again.result()
            assert other != index and cut <= len(STREAM)
            writer.write(CHUNKED + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            assert events_of(await answer) == [*(each.strip() for each in EVENTS), b"data: [DONE]"]
        else:
            again.cancel()
            *whole, error, _ = events_of(await answer)  # then [DONE], as after every error
            assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "replica_lost"
            assert whole == [each.strip() for each in EVENTS][: len(whole)]
            assert proxy.num_lost == 1
        assert all(replica.num_open == replica.open_bytes == 0 for replica in proxy.replicas.all)

    with_proxy(scenario)


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/x-ndjson"])
def test_an_event_too_large_to_hold_breaks_the_connection_when_its_server_dies(kind):
    """The client has a part of the event; an error behind it could not be read."""
    start = b'data: {"text": "' + b"x" * 2**17

    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy)
        _, _, _, writer = await first(*upstreams)
        writer.write(HEAD % kind + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(start), start))
        await reader.readuntil(b"xxx")
        writer.transport.abort()
        with suppress(ConnectionResetError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")

    with_proxy(scenario)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_each_whole_event_is_passed_on_at_once(end):
    """However its bytes come, also from a server that ends lines as HTTP does."""
    events = b"".join(b"data: %d%s" % (number, end) for number in range(3))

    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy)
        _, _, _, writer = await first(*upstreams)
        writer.write(STREAM)
        for number in range(len(events)):
            writer.write(b"1\r\n%s\r\n" % events[number : number + 1])
            if events[: number + 1].endswith(end):
                await reader.readuntil(end + b"\r\n")
        writer.write(b"2\r\nre\r\n2\r\nst\r\n0\r\n\r\n")  # without an end
        assert await reader.read() == b"4\r\nrest\r\n0\r\n\r\n"

    with_proxy(scenario)


def events_of(answer):
    """The whole events of a chunked answer."""
    _, _, body = answer.partition(b"\r\n\r\n")
    text = b""
    while body and (size := int(body.partition(b"\r\n")[0], 16)):
        start = body.index(b"\r\n") + 2
        text, body = text + body[start : start + size], body[start + size + 2 :]
    *whole, rest = text.split(b"\n\n")
    assert body == b"0\r\n\r\n" and rest == b"", answer
    return whole


@pytest.mark.parametrize(
    ("path", "kind", "end"),
    [
        ("/v1/responses", b"text/event-stream", b'data: {"error":{"message":'),
        ("/v1/messages", b"text/event-stream", b'event: error\ndata: {"error":{"type":"overloaded_error"'),
        ("/v2/rerank", b"text/event-stream", b'event: message-end\ndata: {"type":"message-end"'),
        ("/api/chat", b"application/x-ndjson", b'{"error":"replica'),
    ],
)
def test_errors_have_the_format_of_the_api(path, kind, end):
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy, path=path)
        _, _, _, writer = await first(*upstreams)
        writer.write(HEAD % kind + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await reader.readuntil(b"data: 1\n\n\r\n")
        writer.transport.abort()
        assert (await reader.read()).partition(b"\r\n")[2].startswith(end)
        for each in proxy.replicas.all:
            await each.check()
        lost, _ = await send(proxy, path=path)
        for _ in range(2):
            _, _, _, writer = await first(*upstreams)
            writer.transport.abort()
        large, _ = await send(proxy, b"x" * 6000, path=path)
        for reader, status, words in ((lost, b"503", "2 replicas died"), (large, b"413", "more than 5000 bytes")):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            said = json.loads(body)
            assert head.startswith(b"HTTP/1.1 " + status)
            error = said.get("error", said)
            assert words in (error if path == "/api/chat" else error["message"])
            assert set(said) == {"/v1/messages": {"error", "type"}, "/v2/rerank": {"message"}}.get(path, {"error"})

    with_proxy(scenario)


def test_a_cut_answer_is_not_a_complete_one():
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy)
        _, _, _, writer = await first(*upstreams)
        writer.write(JSON + b"Content-Length: 20\r\n\r\n{")
        await reader.readuntil(b"{")
        writer.transport.abort()
        assert await reader.read() == b""  # the connection ends, with fewer bytes than the headers say
        assert proxy.num_lost == 1

    with_proxy(scenario)


def test_all_servers_dying_is_a_503_after_two_runs():
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy)
        for _ in range(2):
            _, _, _, writer = await first(*upstreams)
            writer.transport.abort()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503") and b"2 replicas died" in answer

    with_proxy(scenario, count=3)


def test_a_client_that_disconnects_ends_the_request_of_the_server():
    async def scenario(proxy, upstreams):
        _, client = await send(proxy)
        _, _, reader, writer = await first(*upstreams)
        writer.write(STREAM)
        client.transport.abort()
        assert await reader.read() == b""

    with_proxy(scenario)


def test_requests_go_to_the_server_with_fewest_bytes_and_to_their_prefix():
    async def scenario(proxy, upstreams):
        a, b = proxy.replicas.all
        prompt = b"x" * (4 * BLOCK)
        a.begin(block_hashes(prompt), len(prompt))
        assert proxy.replicas.choose(b"y", ())[0] is b  # a is busy
        a.end(len(prompt))
        b.begin(block_hashes(b"z" * BLOCK), BLOCK)
        b.end(BLOCK)
        assert proxy.replicas.choose(prompt + b"more", ())[0] is a
        assert proxy.replicas.choose(b"z" * BLOCK + b"more", ())[0] is b
        upstreams[0].ready = b"503 Service Unavailable"
        assert await b.check() and not await a.check() and proxy.replicas.choose(prompt, ())[0] is b
        assert await proxy.replicas.until_ready(1)

    with_proxy(scenario)


def test_requests_go_to_a_server_that_lists_their_model_and_has_their_adapter():
    async def scenario(proxy, upstreams):
        async def place(model, path="/v1/completions", key="model"):
            """The server that gets a request for this model."""
            reader, _ = await send(proxy, json.dumps({key: model, "prompt": "x"}).encode(), path)
            index, _, _, writer = await first(*upstreams)
            writer.write(JSON + b"Content-Length: 2\r\n\r\n{}")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            return index

        upstreams[0].models = {"base": None, "sql": "base", "law": "base", "only0": "base"}
        upstreams[1].models = {"base": None, "sql": "base", "law": "base", "only1": "base"}
        assert await place("only1") == 1 and await place("only0") == 0
        assert [await place("sql"), await place("law")] == [0, 1]  # adapters are spread over the servers
        assert [await place(name) for name in ("sql", "law", "sql", "law")] == [0, 1, 0, 1]
        proxy.replicas.all[0].begin([], 4 * ADAPTER_BYTES)
        assert await place("sql") == 1  # the other one has much less to do
        proxy.replicas.all[0].end(4 * ADAPTER_BYTES)
        assert [each.num_lists for each in upstreams] == [1, 1]

        upstreams[1].models["new"] = "base"
        assert await place("new", "/v1/load_lora_adapter", "lora_name") == 0  # any; now the list counts as changed
        proxy.replicas.all[1].models.expire()
        assert await place("new") == 1
        assert await place("new", "/v1/unload_lora_adapter", "lora_name") == 1
        del upstreams[1].models["new"]
        assert await place("new") == 0 and "new" not in proxy.replicas.all[1].models

    with_proxy(scenario)


def test_servers_without_a_list_get_requests_as_before():
    async def scenario(proxy, upstreams):
        upstreams[1].models, clients = {"base": None}, []
        for body in (b'{"model": "tiny"}', b'{"model": 5}', b"\xff", b"[]"):
            for _ in range(2):  # a list that was not sent is not asked for again at once
                clients.append(await send(proxy, body))
                await first(*upstreams)
        assert [each.num_lists for each in upstreams] == [1, 1]
        a, b = proxy.replicas.all
        await b.read_models(b"")  # without a key, the list that is known stays
        assert "base" in b.models and "base" not in a.models
        b.set_ready(False)
        assert "base" not in b.models

    with_proxy(scenario)


@pytest.mark.parametrize("begin", [b"0\r\n", b"1;"], ids=["trailers", "an extension of a chunk"])
def test_what_is_neither_headers_nor_body_is_bounded(begin):
    async def scenario(proxy, upstreams):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + begin)
        writer.write((b"a: b\r\n" if begin[0] == 48 else b"aaaaaa") * 100_000)
        try:
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
        except ConnectionResetError:
            pass  # what a client sends after the answer may reset the connection before it has read it
        assert not any(upstream.bodies for upstream in upstreams)

    with_proxy(scenario)


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        (b"", b""),
        (b"POST /v1/completions HTTP/1.1\r\nx: ", b""),
        (b"POST / HTTP/1.1\r\ncontent-length: 4999\r\n\r\n", b"HTTP/1.1 408 "),
    ],
    ids=["nothing", "headers", "body"],
)
@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "drip"])
def test_a_request_that_does_not_come_does_not_hold_its_connection(monkeypatch, part, answer, drip):
    monkeypatch.setattr("slipstream.serve.http.server.replica_proxy._HEADER_SECONDS", 0.05)

    async def scenario(proxy, upstreams):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(part)
        reading = asyncio.ensure_future(reader.read(len(answer) or 1))
        while not reading.done():  # a byte now and then is no progress
            writer.write(drip if part else b"")
            await asyncio.sleep(0.01)
        try:
            assert await reading == answer
        except ConnectionResetError:  # what was sent last came after the end
            assert answer == b""

    with_proxy(scenario, body_timeout=0.05)


def test_an_answer_that_is_not_read_does_not_hold_its_connections(monkeypatch):
    monkeypatch.setattr("slipstream.serve.http.server.protocol._SECONDS", 0.05)

    async def scenario(proxy, upstreams):
        reader, client = await send(proxy)
        client.transport.pause_reading()
        _, _, _, writer = await first(*upstreams)
        writer.write(JSON + b"Content-Length: %d\r\n\r\n" % 2**40)
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b" " * 2**16)
                await writer.drain()

    with_proxy(scenario)


def test_bodies_of_all_requests_together_are_bounded():
    async def scenario(proxy, upstreams):
        begun = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(2)]
        for _, writer in begun:
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: 4000\r\n\r\n" + b"x" * 2000)
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(reader.read(13)) for reader, _ in begun], return_when=asyncio.FIRST_COMPLETED
        )
        assert done.pop().result() == b"HTTP/1.1 429 " and proxy.num_bytes == 2000
        for _, writer in begun:
            writer.close()
        while proxy.num_bytes:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nno number\r\n")
        assert await reader.read(13) == b"HTTP/1.1 400 " and proxy.num_bytes == 0
        await send(proxy, b"x" * 4000)  # one alone may be larger
        await first(*upstreams)

    with_proxy(scenario, max_bodies_bytes=3000)


def test_a_body_that_is_too_large_is_refused():
    async def scenario(proxy, upstreams):
        reader, _ = await send(proxy, b"x" * 6000)
        assert (await reader.read()).startswith(b"HTTP/1.1 413")
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"what is this\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")

    with_proxy(scenario, count=1)


@pytest.mark.parametrize("urls", [["10.0.0.2:8000"], ["http://a/v1"], ["http://a:80", "http://a"]])
def test_wrong_urls_are_refused(urls):
    with pytest.raises(InvalidOption, match="replica URL"):
        UrlReplicas(urls)


@pytest.mark.parametrize("path", ["/v1/completions", "/v2/rerank", "/livez", "/ping", "/health"])
@pytest.mark.parametrize(
    ("host", "settings"),
    [
        (b"evil.example.com", {}),
        (b"evil.example.com", {"host": "0.0.0.0", "allowed_hosts": ["chat.example"]}),
        (b"localhost:8000", {}),
        (b"chat.example", {"allowed_hosts": ["chat.example"]}),
        (b"10.0.0.1", {"host": "0.0.0.0"}),
    ],
)
def test_a_web_page_cannot_reach_servers_through_a_proxy_on_loopback(path, host, settings):
    """Its requests have its own name, which has been made to resolve to 127.0.0.1. Probes come under any name."""

    async def scenario(proxy, upstreams):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"GET %s HTTP/1.1\r\nHOST: %s\r\n\r\n" % (path.encode(), host))
        is_ours = host != b"evil.example.com"
        if is_ours and path.startswith("/v"):
            await first(*upstreams)
            return
        answer = await reader.read()
        assert (b"http://127.0.0.1" in answer) == (is_ours and path != "/livez")  # /health lists the servers
        assert path.startswith("/v") or answer.startswith(b"HTTP/1.1 200")
        if path.startswith("/v"):
            said = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert answer.startswith(b"HTTP/1.1 403") and not any(each.bodies for each in upstreams)
            assert "--allowed-hosts" in said.get("error", said)["message"] and set(said) < {"error", "message"}

    with_proxy(scenario, **{"allowed_hosts": [], **settings})


def test_a_page_is_refused_before_its_body_is_read():
    async def scenario(proxy, upstreams):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: evil.example.com\r\nContent-Length: 9\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 403")

    with_proxy(scenario, allowed_hosts=[])


def test_probes_have_any_host_at_a_server_and_at_a_proxy():
    assert {route.path.encode() for route in all_routes() if route.any_host} == PROBES


def test_settings_that_the_proxy_reads_can_be_given(tmp_path):
    """Each field of its settings that the proxy uses is an option of it."""
    source = inspect.getsource(replica_proxy) + inspect.getsource(access.Hosts)
    read = set(re.findall(r"settings\.(\w+)", source))
    assert len(read) > 5 and read <= set(serve._OF_PROXY)


def test_options_of_models_are_refused_with_replica_urls(capsys, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_DEVICE", raising=False)
    assert main(["serve", "--replica-urls", "http://127.0.0.1:1", "--max-model-len", "64"]) != 0
    assert "--replica-urls and --max-model-len are given" in capsys.readouterr().err
