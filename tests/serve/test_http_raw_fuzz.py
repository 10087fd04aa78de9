"""Raw bytes on every route: the answer is a success or a 4xx in our shape, never a 500."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patience import PATIENCE
from serve.asgi import at_door, check_error
from serve.fuzzed_door import fuzzed_door
from serve.samples import MESSAGES, SAMPLES
from serve.test_http_server import served
from slipstream.serve.http.table import all_routes
from tiny_tokenizer import write_byte_tokenizer

ROUTES = [route for route in all_routes() if route.body is not None and route.access != "admin"]
QUIET = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

# bytes that parsers and text handling trip over
PIECES = [
    b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xef\xbb\xbf", b"\xf0\x9f\x98", b"\x00", b"\x7f",
    b"\\ud800", b"\\udfff\\ud800", b"\\u0000", b"\\x", b"\\", b'"', b"'", b"{", b"}", b"[", b"]", b",", b":",
    b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"1e999", b"-1e-999", b"NaN", b"-Infinity", b"null", b"true", b"-0",
    b"0x10", b"1.", b"//", b"/*", b"\xe2\x80\xa8", b"\r\n", "é日本\U0001f600".encode(), b'"text":5,', b'"type":"text",',
]  # fmt: skip


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def door(runner, tmp_path_factory):
    with fuzzed_door(runner, tmp_path_factory.mktemp("tokenizer"), max_model_len=256) as door:
        yield door


def check_answer(exchange, sent, route):
    assert 200 <= exchange.status < 500, (exchange.status, sent, exchange.body)
    if exchange.status != 200:
        check_error(exchange, route)


@st.composite
def mutated(draw, start: bytes) -> bytes:
    """The bytes after a few insertions, replacements, deletions and repetitions at any place."""
    data = start
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 6)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=4) | st.just(data[at:end] * 2))
        data = data[:at] + piece + data[end:]
    return data


def test_there_is_a_sample_for_every_route():
    assert {route.path for route in ROUTES} == set(SAMPLES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_the_samples_are_valid(runner, door, route):
    exchange = runner.run(door.post(route.path, SAMPLES[route.path]))
    assert exchange.status == 200, exchange.body


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80"], ids=["never", "cut", "surrogate"])
def test_invalid_utf8_anywhere_in_a_body_is_a_400(runner, door, route, bad):
    """In a text, in a key, and between tokens."""
    name, value = next(iter(SAMPLES[route.path].items()))
    bodies = [
        b'{"%b": "%b"}' % (name.encode(), bad),
        b'{"%b": [["%b"]]}' % (name.encode(), bad),
        b'{"%b": %b, "x%b": 1}' % (name.encode(), json.dumps(value).encode(), bad),
        bad + b"{}",
    ]
    for body in bodies:
        exchange = runner.run(door.post(route.path, body))
        assert exchange.status in (400, 422), (exchange.status, body, exchange.body)
        check_answer(exchange, body, route)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@given(data=st.data())
@QUIET
def test_any_bytes_get_an_answer_in_our_shape(runner, door, route, data):
    start = json.dumps(SAMPLES[route.path], ensure_ascii=False).encode()
    body = data.draw(mutated(start) | st.binary(max_size=80))
    check_answer(runner.run(door.post(route.path, body)), body, route)


CONTENTS = [
    5, 1.5, True, {}, {"text": "x"}, [5], [None], [[]], ["x"], [{}],
    [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "text", "text": None}],
    [{"type": "text", "text": ["x"]}],
    [{"type": 5, "text": "x"}], [{"type": None, "text": "x"}], [{"type": ["text"]}], [{"text": {"a": 1}}],
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_content_of_the_wrong_type_is_a_400_that_names_the_message(runner, door, path, content):
    messages = [*MESSAGES, {"role": "user", "content": content}]
    exchange = runner.run(door.post(path, {"messages": messages}))
    if content == ["x"]:  # bare strings are taken as text parts
        assert exchange.status == 200, exchange.body
        return
    assert exchange.status == 400, exchange.body
    assert exchange.json()["error"]["param"].startswith("messages[1]"), exchange.body


SLOW = ("/debug/trace", "/debug/timeline")  # they take seconds, or do not end
ODD_PATHS = ["/v1/models/", "/v1/models//", "/v1/models/\ufffd", "/docs/", "//", "*"]
ODD_VALUES = [b"-1", b"nan", b"inf", b"1e400", b"application/json", b"\xb2", b"1" * 5000]
paths = st.text(max_size=12) | st.sampled_from(ODD_PATHS)
header = st.tuples(
    st.sampled_from(
        [b"content-type", b"content-length", b"authorization", b"x-request-id", b"x-request-timeout", b"x-api-key",
         b"host", b"origin", b"accept", b"traceparent"]
    ),
    st.binary(max_size=12) | st.sampled_from(ODD_VALUES),
)  # fmt: skip


@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X"]),
    path=st.sampled_from([route.path for route in all_routes() if route.path not in SLOW]) | paths,
    headers=st.lists(header, max_size=4),
    query=st.binary(max_size=8),
    body=st.binary(max_size=8),
)
@settings(QUIET, max_examples=200)
def test_any_head_gets_an_answer(runner, door, method, path, headers, query, body):
    async def ask():
        exchange = door.begin_raw(method, path, headers, query, body)
        return await exchange.end()

    exchange = runner.run(ask())
    assert 200 <= exchange.status < 500, (exchange.status, exchange.body)


LINES = [
    b"GET /health HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"POST /v1/chat/completions HTTP/1.1",
    b"HEAD / HTTP/1.1", b"POST /tokenize HTTP/1.0", b"GET /v1/models/%ff%fe HTTP/1.1", b"GET /v1/models/%00 HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"GET http://other/health HTTP/1.1", b"POST /embed?a=%zz HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0",
    b"content-type: application/json", b"content-length: 18", b"content-length: -1", b"content-length: " + b"9" * 40,
    b"transfer-encoding: chunked", b"expect: 100-continue", b"connection: close", b"host: x",
    b"host: localhost", b"host: \xff", b'{"prompt": "\xff"}', b"5\r\n{\xff\xff\xff}\r\n0\r\n",
    b"x-request-id: \x00", b"upgrade: websocket",
]  # fmt: skip


@st.composite
def conversations(draw) -> bytes:
    """Lines of requests in any order, with bytes changed here and there."""
    lines = draw(st.lists(st.sampled_from(LINES) | st.just(b""), min_size=1, max_size=8))
    return draw(mutated(b"\r\n".join([draw(st.sampled_from(LINES)), *lines, b"", b""])))


def test_any_bytes_on_the_socket_leave_the_server_working(tmp_path, caplog):
    """Below the app: the HTTP parser and our protocol around it. No answer is a 5xx, nothing is logged as a failure."""
    write_byte_tokenizer(tmp_path)
    examples: list[bytes] = []

    @given(conversations())
    @settings(QUIET, max_examples=100, database=None)
    def collect(data):
        examples.append(data)

    collect()

    async def scenario(door):
        async with served(door) as port:
            for data in examples:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), PATIENCE)
                writer.close()
                assert not answer or answer.startswith(b"HTTP/1.1 "), (data, answer)
                assert b"HTTP/1.1 5" not in answer, (data, answer)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

    at_door(tmp_path, scenario)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text
