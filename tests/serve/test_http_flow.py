"""Requests that wait, end, are refused or stream slowly: deadlines, disconnects, full queues, drains, keep-alive."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from serve.asgi import at_door
from serve.samples import MESSAGES
from slipstream.contracts.request import FinishReason
from slipstream.metrics.stats import LaneStats
from slipstream.serve.http.worker import Watchdog
from slipstream.transport.frames import Pulse, Refused

ASK = {"prompt": "hello", "max_tokens": 4}


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
        whole = door.begin("POST", "/v1/completions", ASK, x_request_timeout="60")
        await door.core.until(lambda: door.core.submits)
        door.pass_time(60)
        await whole.end()
        assert whole.status == 408 and whole.json()["error"]["code"] == "deadline"
        stream = door.begin("POST", "/v1/completions", ASK | {"stream": True}, x_request_timeout="60")
        await door.core.until(lambda: len(door.core.submits) == 2)
        door.core.token(door.core.submits[1], 65)
        await stream.until(b'"A"')
        door.pass_time(60)
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_that_ends_before_its_first_token_is_no_internal_error(folder, path):
    async def scenario(door):
        ask = {"prompt": "abc"} if path == "/v1/completions" else {"messages": MESSAGES}
        beams = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 3}
        echo = [{"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 0, "max_tokens": 0, "stream": True}]
        for more in (*(echo if path == "/v1/completions" else [{"prompt_logprobs": 1}]), beams):
            request = door.begin("POST", path, ask | more)
            await door.core.until(lambda: door.core.submits)
            door.core.submits.clear()
            await door.post("/abort_requests", {}, authorization="Bearer root")
            await request.end()
            assert request.status == (503 if more is beams else 200), request.body
            if "echo" in more:
                (choice,) = (request.events()[0] if "stream" in more else request.json())["choices"]
                assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("abc", [None] * 3)

    at_door(folder, scenario, answers=False, admin_key="root")


def test_the_prefix_cache_is_reset_by_the_admin_only(folder):
    async def scenario(door):
        assert (await door.post("/reset_prefix_cache", b"")).status == 401
        assert door.core.num_resets == 0
        assert (await door.post("/reset_prefix_cache", b"", authorization="Bearer root")).status == 200
        assert door.core.num_resets == 1

    at_door(folder, scenario, admin_key="root")


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
        assert (await door.get("/health")).status == 503 and (await door.get("/livez")).status == 200
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
        assert (await door.get("/livez")).status == 503
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
    assert "test_http_flow" in capfd.readouterr().err  # our own stack


def test_the_watchdog_waits_for_a_message_when_the_clients_have_left(folder):
    """Before the alarm and after it: a core that is stopped is not well again because no request is open."""

    async def scenario(door):
        dog, engine = Watchdog(door.state, 5.0), door.state.engine
        engine.core_pid = None
        exchange = door.begin("POST", "/v1/completions", ASK)
        await door.core.until(lambda: door.core.submits)
        now = time.monotonic()
        dog.check(now)
        exchange.hang_up()
        await exchange.end()
        await door.core.until(lambda: door.core.aborts)
        assert not engine.load.num_open
        dog.check(now + 6)
        assert door.state.stalled is not None
        dog.check(now + 60)
        assert (await door.get("/health")).status == 503
        door.core.say(Pulse([LaneStats("tiny", num_steps=1)]))
        while not engine.pulse.lanes:
            await asyncio.sleep(0)
        dog.check(time.monotonic())
        assert (await door.get("/health")).status == 200
        dog.check(now + 600)
        assert door.state.stalled is None

    at_door(folder, scenario, answers=False)


def test_load_counts_what_waits(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/v1/completions", ASK | {"prompt": ["abc", "defg"]})
        await door.core.until(lambda: len(door.core.submits) == 2)
        load = (await door.get("/load")).json()
        assert (load["server_load"], load["queued_requests"], load["queued_tokens"]) == (2, 2, 7)
        assert (load["is_asleep"], load["models"]) == (False, [])
        door.core.say(
            Pulse([LaneStats("tiny", 5, 2), LaneStats("tiny", 1, 1, replica=1, memory={"cache": 7})], is_asleep=True)
        )
        while not door.state.engine.pulse.is_asleep:
            await asyncio.sleep(0)
        load = (await door.get("/load")).json()
        assert load["is_asleep"] and [(each["model"], each["running"]) for each in load["models"]] == [("tiny", 3)]
        assert load["models"][0]["memory"] == {"cache": 7}
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
        late = door.begin("POST", "/v1/completions", ASK | {"stream": True}, x_request_timeout="60")
        await late.until(b": still here")
        door.pass_time(60)
        assert (await late.end()).status == 200  # it had begun, so its error is an event
        assert b'"code":"deadline"' in late.body and late.body.endswith(b"data: [DONE]\n\n")

    at_door(folder, scenario, answers=False, stream_keep_alive=0.005)


def test_without_a_keep_alive_a_stream_has_no_status_before_its_first_token(folder):
    async def scenario(door):
        late = door.begin("POST", "/v1/completions", ASK | {"stream": True}, x_request_timeout="0.05")
        assert (await late.end()).status == 408

    at_door(folder, scenario, answers=False, stream_keep_alive=0)
