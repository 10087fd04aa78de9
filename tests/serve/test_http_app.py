"""App: keys, limits and errors; what waits or ends is in test_http_flow.py."""

from __future__ import annotations

import gzip
import json

import pytest

from serve.asgi import at_door
from slipstream.transport.frames import Failed, Ready

ASK = {"prompt": "hello", "max_tokens": 4}


def once(folder, method, path, body=None, settings=None, **headers):
    async def scenario(door):
        return await door.begin(method, path, body, **headers).end()

    return at_door(folder, scenario, **(settings or {}))


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_body_may_begin_with_a_byte_order_mark_of_utf8_and_not_of_another(folder, path):
    async def scenario(door):
        text = json.dumps({"model": "tiny", "prompt": "hello", "stream": False})
        assert (await door.post(path, text.encode("utf-8-sig"))).status == 200
        refused = await door.post(path, text.encode("utf-16"))
        assert refused.status == 400 and "send JSON encoded as UTF-8" in refused.said

    at_door(folder, scenario)


async def probes(door):
    return {path: (await door.get(path)).status for path in ("/livez", "/health", "/ready", "/ping")}


def test_liveness_and_readiness_distinguish_a_start_from_a_failure(folder):
    async def scenario(door):
        assert await probes(door) == {"/livez": 200, "/health": 503, "/ready": 503, "/ping": 503}
        assert (await door.get("/health")).json()["status"] == "starting"
        refused = await door.post("/v1/completions", ASK)
        assert refused.status == 503 and refused.headers["retry-after"]
        door.core.say(Ready())
        await door.state.engine.until_ready()
        assert set((await probes(door)).values()) == {200}
        door.core.say(Failed("RuntimeError: the device fell off"))
        await door.state.engine.until_lost()
        assert set((await probes(door)).values()) == {503}
        assert "device" not in (await door.get("/health")).body.decode()
        assert (await door.post("/v1/completions", ASK)).status == 503

    at_door(folder, scenario, ready=False)


def test_the_engines_end_ends_every_open_request_with_an_error(folder):
    async def scenario(door):
        whole = door.begin("POST", "/v1/completions", ASK)
        stream = door.begin("POST", "/v1/completions", ASK | {"stream": True})
        await door.core.until(lambda: len(door.core.submits) == 2)
        door.core.token(door.core.submits[1], 65)
        await stream.until(b'"A"')
        door.core.say(Failed("boom"))
        await whole.end()
        await stream.end()
        assert whole.status == 503 and whole.json()["error"]["code"] == "engine_dead"
        *_, last = stream.events()
        assert last["error"]["code"] == "engine_dead"

    at_door(folder, scenario, answers=False)


KEYS = {"api_key": ["one", "two"], "admin_key": "root"}


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", None, 200),
        ("/ready", None, 200),
        ("/livez", None, 200),
        ("/v1/models", None, 401),
        ("/v1/models", "Bearer three", 401),
        ("/v1/models", "Basic one", 401),
        ("/v1/models", "Bearer one", 200),
        ("/v1/models", "bearer two", 200),
        ("/v1/models", "Bearer root", 200),
        ("/docs", None, 200),
        ("/openapi.json", None, 200),
        ("/metrics", None, 401),
        ("/load", None, 401),
    ],
)
def test_every_route_but_probes_and_docs_wants_a_key(folder, path, key, status):
    headers = {} if key is None else {"authorization": key}
    answer = once(folder, "GET", path, settings=KEYS, **headers)
    assert answer.status == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"


def test_all_routes_are_closed_without_a_key_unless_they_say_so(folder):
    async def scenario(door):
        for route in door.app.routes:
            answer = await door.begin(route.method, route.path.replace("{model:path}", "tiny"), {}).end()
            assert (answer.status == 401) == (route.access != "open"), route.path

    at_door(folder, scenario, **KEYS)


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, "Bearer x", 403),
        (KEYS, "Bearer one", 403),
        (KEYS, "Bearer nine", 401),
        (KEYS, "Bearer root", 200),
        ({"admin_key": "root"}, None, 401),
    ],
)
def test_admin_routes_want_the_admin_key(folder, settings, key, status):
    headers = {} if key is None else {"authorization": key}
    assert once(folder, "POST", "/abort_requests", {}, settings=settings, **headers).status == status


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/nothing", None, 404, "no such route"),
        ("GET", "/v1/completions", None, 405, "takes POST"),
        ("POST", "/v1/completions", b"{", 400, "not JSON"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "body"),
        ("POST", "/v1/completions", b"[" * 100_000, 400, ""),
        ("POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "not JSON"),
        ("POST", "/v1/completions", {}, 400, "prompt"),
        ("POST", "/v1/completions", {"prompt": "x", "tempratur": 1}, 400, "no field tempratur"),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature is -1"),
        ("POST", "/v1/completions", b'{"prompt": "x", "temperature": 1e999}', 400, ""),
        ("POST", "/v1/completions", {"prompt": []}, 400, "prompt is empty"),
        ("POST", "/v1/completions", {"prompt": ["x", 1]}, 400, "mixes"),
        ("POST", "/v1/completions", {"prompt": ["x", [1]]}, 400, "mixes"),
        ("POST", "/v1/completions", {"prompt": ["ok", ""]}, 400, "prompt 2 of 2"),
        ("POST", "/v1/completions", {"prompt": [999]}, 400, "999 is out of vocabulary"),
        ("POST", "/v1/completions", {"prompt": "x" * 64}, 400, "64 tokens"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, 404, "no model 'other'"),
        ("POST", "/v1/completions", {"prompt": "x", "n": 129}, 400, "this server takes 128"),
        ("POST", "/v1/completions", {"prompt": "x", "n": 0}, 400, "n is 0"),
        ("POST", "/v1/completions", {"prompt": ["x", "y"], "n": 101}, 400, "the queue holds 100"),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "this server takes 20"),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": -1}, 400, "logprobs is -1"),
        ("POST", "/v1/completions", {"prompt": "x", "prompt_logprobs": 21}, 400, "this server takes 20"),
        ("POST", "/v1/completions", {"prompt": "x", "stop": ["s"] * 129}, 400, "stop has 129"),
        ("POST", "/v1/completions", {"prompt": "x", "stop": "s" * 1025}, 400, "stop has 1025"),
        ("POST", "/v1/completions", {"prompt": "x", "bad_words": ["s"] * 129}, 400, "bad_words has 129"),
        ("POST", "/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "1025"),
        ("POST", "/v1/completions", {"prompt": "x", "cache_salt": "s" * 257}, 400, "cache_salt has 257"),
        (
            "POST",
            "/v1/completions",
            {"prompt": ["x"] * 1025},
            400,
            "takes 1024 at once; send fewer",
        ),
        ("POST", "/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported by tiny"),
        ("POST", "/v1/completions", {"prompt": "x", "use_beam_search": True, "seed": 1}, 400, "seed is not supported"),
        ("POST", "/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 999}, 400, "n is 999; give 1 to 128"),
        ("POST", "/v1/completions", {"prompt": "x", "best_of": 2}, 400, "best_of is not supported"),
        ("POST", "/v1/completions", {"prompt": "x", "stream_options": {}}, 400, "stream=true"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, "no messages"),
        ("POST", "/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "no content"),
        ("POST", "/tokenize", {}, 400, "give either prompt or messages"),
        ("POST", "/detokenize", {"tokens": [-1]}, 400, "-1 is unknown"),
        ("GET", "/v1/models/other", None, 404, "no model 'other'"),
    ],
)
def test_a_user_error_has_openais_format_and_reaches_no_engine(folder, method, path, body, status, words):
    async def scenario(door):
        answer = await door.begin(method, path, body).end()
        assert not door.core.submits
        return answer

    answer = at_door(folder, scenario)
    assert answer.status == status, answer.body
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert words in answer.error


class Panic(BaseException):
    """What native code raises: no Exception."""


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", ASK, '"type":"server_error"'),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}, '"type":"api_error"'),
        ("/api/generate", {"prompt": "hello"}, '{"error":"internal error'),
    ],
)
def test_a_panic_of_native_code_is_an_error_in_the_format_of_the_route(folder, monkeypatch, path, body, words):
    def panic(*_: object, **__: object) -> None:
        raise Panic("at its limit")

    monkeypatch.setattr("slipstream.text.tokenizer.Tokenizer.encodings", panic)
    answer = once(folder, "POST", path, {"model": "tiny"} | body)
    assert answer.status == 500 and "see the server's log" in answer.said
    assert words in answer.body.decode().replace(": ", ":").replace('": ', '":'), answer.body


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"text": "x"}]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
        ("guided_decoding_backend", "outlines"),
        ("logits_processors", ["os.system"]),
    ],
)
def test_unsupported_fields_are_refused_by_name(folder, field, value):
    answer = once(folder, "POST", "/v1/chat/completions", {"messages": USER, field: value})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == field and answer.json()["error"]["code"] == "unsupported_parameter"


def test_fields_that_ask_for_nothing_are_let_through(folder):
    nothing = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "store": False,
        "user": "me", "metadata": {"a": "b"}, "parallel_tool_calls": True, "use_beam_search": False, "audio": None,
    }  # fmt: skip
    answer = once(folder, "POST", "/v1/chat/completions", {"messages": USER} | nothing)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_parts_that_are_no_text_are_refused_and_never_fetched(folder, kind):
    part = {"type": kind, kind: {"url": "http://127.0.0.1:1/secret"}}
    answer = once(folder, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status == 400 and answer.json()["error"]["code"] == "unsupported_content"
    assert "secret" not in answer.error


def test_text_parts_are_joined(folder):
    async def scenario(door):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        assert (await door.post("/v1/chat/completions", body)).status == 200
        return bytes(i for i in door.core.submits[0].prompt_token_ids if i < 256)

    assert b"one two" in at_door(folder, scenario)


def test_a_body_over_the_limit_is_refused_before_and_while_it_is_read(folder):
    body = b'{"prompt": "' + b"x" * 500 + b'"}'
    announced = once(folder, "POST", "/v1/completions", body, {"max_body_bytes": 100}, content_length=str(len(body)))
    sent = once(folder, "POST", "/v1/completions", body, {"max_body_bytes": 100})
    assert announced.status == sent.status == 413


def test_a_content_length_of_thousands_of_digits_is_refused(folder):
    answer = once(folder, "POST", "/v1/completions", b"{}", content_length="1" * 5000)
    assert answer.status == 413, answer.body


def test_a_body_that_is_not_called_json_is_refused(folder):
    answer = once(folder, "POST", "/v1/completions", b'{"prompt": "x"}', content_type="text/plain")
    assert answer.status == 415


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_compressed_body_is_refused_by_its_coding(folder, path):
    body = b'{"model": "tiny", "prompt": "x"}'
    answer = once(folder, "POST", path, gzip.compress(body), content_encoding="gzip")
    assert answer.status == 415 and "Content-Encoding gzip" in answer.said, answer.body
    assert once(folder, "POST", path, body, content_encoding="identity").status == 200


def test_a_request_id_is_echoed_or_made_and_never_breaks_a_header(folder):
    assert once(folder, "GET", "/health", x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    made = {once(folder, "GET", "/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert once(folder, "GET", "/health", x_request_id="a\r\nset-cookie: b").headers["x-request-id"].isalnum()


def test_the_docs_describe_every_route_and_fetch_nothing_from_elsewhere(folder):
    async def scenario(door):
        page, described = await door.get("/docs"), (await door.get("/openapi.json")).json()
        assert b"http://" not in page.body and b"https://" not in page.body and b"src=" not in page.body
        for route in door.app.routes[:-2]:
            operation = described["paths"][route.path.replace(":path", "")][route.method.lower()]
            if route.path == "/" and route.body is not None:  # takes what the other routes of TEI take
                assert operation["requestBody"]["content"]["application/json"]["schema"]["type"] == "object"
            elif route.body is not None:
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                fields = described["components"]["schemas"][name]["properties"]
                assert set(fields) == set(route.body.__struct_fields__)

    at_door(folder, scenario)
