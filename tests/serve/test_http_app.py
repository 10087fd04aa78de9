"""App: keys, limits, errors, disconnects and deadlines."""

from __future__ import annotations

import asyncio
import gzip
import json
import time

import pytest

from serve.asgi import at_door
from slipstream.metrics.lane import LaneStats
from slipstream.request import FinishReason
from slipstream.serve.http.watchdog import Watchdog
from slipstream.transport.frames import Failed, Pulse, Ready, Refused

ASK = {"prompt": "hello", "max_tokens": 4}


def once(folder, method, path, body=None, settings=None, **headers):
    async def scenario(door):
        return await door.begin(method, path, body, **headers).end()

    return at_door(folder, scenario, **(settings or {}))


def test_health_and_ready_distinguish_a_start_from_a_failure(folder):
    async def scenario(door):
        health, ready = await door.get("/health"), await door.get("/ready")
        assert (health.status, ready.status) == (200, 503)
        refused = await door.post("/v1/completions", ASK)
        assert refused.status == 503 and refused.headers["retry-after"]
        door.core.say(Ready())
        await door.state.engine.until_ready()
        assert (await door.get("/ready")).status == 200
        door.core.say(Failed("RuntimeError: the device fell off"))
        await door.state.engine.until_lost()
        health = await door.get("/health")
        assert health.status == 503 and "device" not in health.body.decode()
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


def test_a_client_that_disconnects_is_aborted_and_counted(folder):
    async def scenario(door):
        for count, stream in enumerate((False, True), 1):
            exchange = door.begin("POST", "/v1/completions", ASK | {"stream": stream, "n": 2})
            await door.core.until(lambda count=count: len(door.core.submits) == count)
            door.core.token(door.core.submits[-1], 65)
            exchange.hang_up()
            await exchange.end()
            await door.core.until(lambda count=count: len(door.core.aborts) == count)
            assert door.core.aborts[-1].request_id == door.core.submits[-1].request_id
        assert door.state.counters.aborted == {"disconnect": 2}

    at_door(folder, scenario, answers=False)


def test_a_deadline_ends_a_request_and_a_stream(folder):
    async def scenario(door):
        whole = door.begin("POST", "/v1/completions", ASK, x_request_timeout="0.05")
        await whole.end()
        assert whole.status == 408 and whole.json()["error"]["code"] == "deadline"
        stream = door.begin("POST", "/v1/completions", ASK | {"stream": True}, x_request_timeout="0.2")
        await door.core.until(lambda: len(door.core.submits) == 2)
        door.core.token(door.core.submits[1], 65)
        await stream.end()
        assert stream.events()[-1]["error"]["code"] == "deadline"
        await door.core.until(lambda: len(door.core.aborts) == 2)
        assert door.state.counters.aborted == {"deadline": 2}
        assert (await door.post("/v1/completions", ASK, x_request_timeout="soon")).status == 400

    at_door(folder, scenario, answers=False)


def test_the_servers_own_deadline_is_the_upper_bound(folder):
    async def scenario(door):
        return await door.post("/v1/completions", ASK, x_request_timeout="3600")

    assert at_door(folder, scenario, answers=False, request_timeout=0.05).status == 408


@pytest.mark.parametrize(
    "settings", [{"max_queued_requests": 2}, {"max_queued_tokens": 11}], ids=["requests", "tokens"]
)
def test_too_many_waiting_get_429_at_once_and_places_come_free(folder, settings):
    async def scenario(door):
        waiting = [door.begin("POST", "/v1/completions", ASK) for _ in range(2)]
        await door.core.until(lambda: len(door.core.submits) == 2)
        refused = await door.post("/v1/completions", ASK)
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        door.core.token(door.core.submits[0], 65)  # it runs now, and waits no more
        while door.state.engine.load.num_queued > 1:
            await asyncio.sleep(0)
        third = door.begin("POST", "/v1/completions", ASK)
        await door.core.until(lambda: len(door.core.submits) == 3)
        for submit in door.core.submits:
            door.core.token(submit, 66, end=FinishReason.STOP)
        for exchange in (*waiting, third):
            assert (await exchange.end()).status == 200
        assert door.state.counters.refused == {"queue_full": 1}

    at_door(folder, scenario, answers=False, **settings)


class Part(bytes):
    def __add__(self, other):
        raise AssertionError("a body of many parts is copied once, not once for each of them")

    __radd__ = __add__


def test_a_body_may_come_in_parts(folder):
    async def scenario(door):
        whole = json.dumps(ASK).encode()
        parts = tuple(Part(whole[place : place + 5]) for place in range(0, len(whole), 5))
        assert (await door.post("/v1/completions", parts)).status == 200
        refused = await door.post("/v1/completions", (*parts, b" " * 200))
        assert refused.status == 413 and "200 bytes" in refused.error

    at_door(folder, scenario, max_body_bytes=200)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_could_never_wait_is_refused_before_any_of_it_is_sent(folder, path, stream):
    """A prompt's samples wait one by one; the core lets 100 wait."""

    async def scenario(door):
        one = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": ["a", "b"]}
        asked = one | {"n": 101 if "chat" in path else 51, "stream": stream}
        refused = await door.post(path, asked)
        assert refused.status == 400 and "the queue holds 100" in refused.error and "--max-waiting" in refused.error
        many = await door.post("/v1/completions", {"prompt": ["a"] * 5})
        assert many.status == 400 and "5 prompts" in many.error and "--max-queued-requests" in many.error
        assert not door.core.submits and not door.state.counters.refused

    at_door(folder, scenario, max_queued_requests=4)


def test_what_the_core_refuses_is_this_requests_error_alone(folder):
    async def scenario(door):
        asked = (ASK, ASK | {"stream": True}, ASK)
        first, second, third = (door.begin("POST", "/v1/completions", body) for body in asked)
        await door.core.until(lambda: len(door.core.submits) == 3)
        one, two, three = door.core.submits
        door.core.say(Refused(one.request_id, "RequestTooLarge", "needs 9 pages"))
        door.core.say(Refused(two.request_id, "QueueFull", "full"))
        assert (await first.end()).status == 400 and "9 pages" in first.error
        assert (await second.end()).status == 429  # a stream that has not begun has a status too
        door.core.say(Refused(three.request_id, "AssertionError", "a secret of ours"))
        assert (await third.end()).status == 500 and "secret" not in third.error

    at_door(folder, scenario, answers=False)


def test_abort_requests_ends_everything_with_what_there_is(folder):
    async def scenario(door):
        whole = door.begin("POST", "/v1/completions", ASK)
        stream = door.begin("POST", "/v1/completions", ASK | {"stream": True})
        await door.core.until(lambda: len(door.core.submits) == 2)
        for submit in door.core.submits:
            door.core.token(submit, 65)
        await stream.until(b'"A"')
        answer = await door.post("/abort_requests", {}, authorization="Bearer root")
        assert answer.json() == {"aborted": 2}
        await whole.end()
        await stream.end()
        assert whole.json()["choices"][0] | {"logprobs": None} == {
            "index": 0, "text": "A", "finish_reason": "abort", "stop_reason": None, "logprobs": None,
        }  # fmt: skip
        assert stream.events()[-1]["choices"][0]["finish_reason"] == "abort"

    at_door(folder, scenario, answers=False, admin_key="root")


def test_the_prefix_cache_is_reset_by_the_admin_only(folder):
    async def scenario(door):
        assert (await door.post("/reset_prefix_cache", b"")).status == 401
        assert door.core.num_resets == 0
        assert (await door.post("/reset_prefix_cache", b"", authorization="Bearer root")).status == 200
        assert door.core.num_resets == 1

    at_door(folder, scenario, admin_key="root")


def test_ping_says_whether_requests_are_accepted(folder):
    assert once(folder, "GET", "/ping").status == 200
    assert once(folder, "GET", "/ping", settings={"ready": False}).status == 503


@pytest.mark.parametrize("name", ["speech", "transcriptions", "translations"])
def test_audio_is_refused_by_name_whatever_the_body(folder, name):
    async def scenario(door):
        for kind in ("application/json", "multipart/form-data; boundary=x"):
            answer = await door.post(f"/v1/audio/{name}", b"--x", content_type=kind)
            assert answer.status == 400 and f"/v1/audio/{name}" in answer.error
            assert answer.json()["error"]["code"] == "unsupported_route"

    at_door(folder, scenario)


def test_a_slow_reader_gets_merged_increments_and_all_of_the_text(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/v1/completions", {"prompt": "x", "max_tokens": 40, "stream": True})
        await exchange.end()
        return exchange.events()

    events = at_door(folder, scenario)
    assert "".join(event["choices"][0]["text"] for event in events) == "All is well. " * 3 + "A"
    assert len(events) < 40  # all came in one frame


def test_draining_refuses_new_requests_and_lets_others_end(folder):
    async def scenario(door):
        under_way = door.begin("POST", "/v1/completions", ASK)
        await door.core.until(lambda: door.core.submits)
        door.state.draining = True
        assert (await door.post("/v1/completions", ASK)).status == 503
        assert (await door.get("/ready")).status == 503 and (await door.get("/health")).status == 200
        door.core.token(door.core.submits[0], 65, end=FinishReason.STOP)
        assert (await under_way.end()).status == 200

    at_door(folder, scenario, answers=False)


def test_an_internal_error_reveals_no_details(folder, monkeypatch, caplog):
    def explode(*args, **kwargs):
        raise RuntimeError("secret at /root/0x7f00")

    async def scenario(door):
        monkeypatch.setattr(door.state.engine, "read", explode)
        return await door.post("/v1/completions", ASK, x_request_id="find-me")

    answer = at_door(folder, scenario)
    assert answer.status == 500 and "find-me" in answer.error and "secret" not in answer.body.decode()
    assert "find-me" in caplog.text and "secret" in caplog.text


def test_the_watchdog_turns_health_while_a_busy_engine_has_no_result(folder, capfd):
    async def scenario(door):
        dog = Watchdog(door.state, 5.0)
        door.state.engine.core_pid = None  # the scripted core is this process
        exchange = door.begin("POST", "/v1/completions", ASK)
        await door.core.until(lambda: door.core.submits)
        now = time.monotonic()
        dog.check(now)
        assert (await door.get("/health")).status == 200
        dog.check(now + 6)
        health = await door.get("/health")
        assert health.status == 503 and "6 s" in health.json()["status"]
        door.core.say(Pulse([LaneStats("tiny", num_steps=1)]))
        while not door.state.engine.pulse.lanes:
            await asyncio.sleep(0)
        dog.check(time.monotonic())
        assert (await door.get("/health")).status == 200
        door.core.token(door.core.submits[0], 65, end=FinishReason.STOP)
        await exchange.end()
        dog.check(now + 60)
        assert door.state.stalled is None  # nothing to do is no trouble

    at_door(folder, scenario, answers=False)
    assert "test_http_app" in capfd.readouterr().err  # our own stack


def test_load_counts_what_waits(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/v1/completions", ASK | {"prompt": ["abc", "defg"]})
        await door.core.until(lambda: len(door.core.submits) == 2)
        load = (await door.get("/load")).json()
        assert (load["server_load"], load["queued_requests"], load["queued_tokens"]) == (2, 2, 7)
        assert (load["is_asleep"], load["models"]) == (False, [])
        door.core.say(Pulse([LaneStats("tiny", 5, 2), LaneStats("tiny", 1, 1, replica=1)], is_asleep=True))
        while not door.state.engine.pulse.is_asleep:
            await asyncio.sleep(0)
        load = (await door.get("/load")).json()
        assert load["is_asleep"] and [(each["model"], each["running"]) for each in load["models"]] == [("tiny", 3)]
        exchange.hang_up()
        await exchange.end()

    at_door(folder, scenario, answers=False)


def test_a_stream_may_collect_tokens_for_an_event_after_its_first(folder):
    async def scenario(door):
        stream = door.begin("POST", "/v1/completions", ASK | {"stream": True, "max_tokens": 9})
        await door.core.until(lambda: door.core.submits)
        for token in b"ABCDEFGH":
            door.core.token(door.core.submits[0], token)
            while door.state.engine.stats["tiny"].generated_tokens < token - 64:
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)
        door.core.token(door.core.submits[0], ord("I"), end=FinishReason.LENGTH)
        events = (await stream.end()).events()
        assert [event["choices"][0]["text"] for event in events] == ["A", "BCD", "EFG", "HI"]

    at_door(folder, scenario, answers=False, stream_interval=3)


def test_a_silent_stream_gets_keep_alive_comments(folder):
    async def scenario(door):
        stream = door.begin("POST", "/v1/completions", ASK | {"stream": True})
        await door.core.until(lambda: door.core.submits)
        await stream.until(b": still here\n\n: still here\n\n")  # while it waits for its first token
        assert stream.status == 200 and b"data" not in stream.body
        door.core.token(door.core.submits[0], 65)
        await stream.until(b'"A"')
        door.core.token(door.core.submits[0], 66, end=FinishReason.STOP)
        await stream.end()
        stream.body = stream.body.replace(b": still here\n\n", b"")
        assert "".join(event["choices"][0]["text"] for event in stream.events()) == "AB"
        late = door.begin("POST", "/v1/completions", ASK | {"stream": True}, x_request_timeout="0.1")
        assert (await late.end()).status == 200  # it had begun, so its error is an event
        assert b'"code":"deadline"' in late.body and late.body.endswith(b"data: [DONE]\n\n")

    at_door(folder, scenario, answers=False, stream_keep_alive=0.005)


def test_without_a_keep_alive_a_stream_has_no_status_before_its_first_token(folder):
    async def scenario(door):
        late = door.begin("POST", "/v1/completions", ASK | {"stream": True}, x_request_timeout="0.05")
        assert (await late.end()).status == 408

    at_door(folder, scenario, answers=False, stream_keep_alive=0)


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
