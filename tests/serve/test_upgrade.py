"""Requests that offer another protocol, HTTP/2 or WebSocket, are answered as any other, with their bodies."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from serve.asgi import at_door
from serve.test_http_server import ASK, answer, head, served

BODY = json.dumps(ASK).encode()
JAVA = ("connection: Upgrade, HTTP2-Settings", "http2-settings: AAEAAEAAAAIAAAAB", "upgrade: h2c")
LENGTHS = [len(head("/v1/completions", len(BODY), *JAVA)), 1, 10_000]


@pytest.mark.parametrize("size", LENGTHS, ids=["body apart", "byte by byte", "whole"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_post_that_offers_http2_keeps_its_body(folder, caplog, size, chunked):
    request = head("/v1/completions", len(BODY), *JAVA) + BODY
    if chunked:
        lines = request.partition(b"\r\n\r\n")[0]
        lines = lines.replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked")
        request = lines + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    plain = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def scenario(door):
        async with served(door) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answers = []
            for data in (request, request, plain):
                for start in range(0, len(data), size):
                    writer.write(data[start : start + size])
                    await asyncio.sleep(0)
                answers.append(await answer(reader))
            first, second, third = answers
            assert [first[0], second[0], third[0]] == [200, 200, 200]
            assert "choices" in first[2] and "choices" in second[2] and third[2]["status"] == "ok"
            writer.close()
        assert len(door.core.submits) == 2

    with caplog.at_level(logging.WARNING):
        at_door(folder, scenario)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_an_offer_of_websockets_has_no_effect_and_close_is_kept(folder, caplog):
    lines = ("GET /health HTTP/1.1", "host: localhost", "upgrade: websocket", "connection: Upgrade, close", "", "")

    async def scenario(door):
        async with served(door) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write("\r\n".join(lines).encode())
            status, headers, body = await answer(reader)
            assert (status, headers["connection"], body["status"]) == (200, "close", "ok")
            assert await reader.read() == b""
            writer.close()

    with caplog.at_level(logging.WARNING):
        at_door(folder, scenario)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
