"""The routes that let the engine sleep: behind the admin key, with vLLM's names and parameters."""

from __future__ import annotations

from serve.asgi import at_door
from slipstream.base.errors import EngineAsleep, InvalidOption
from slipstream.serve.http.worker import Watchdog
from slipstream.transport.frames import Controlled, Pulse, Refused

ROOT = [(b"authorization", b"Bearer root")]


def test_sleep_and_wake_up(folder):
    async def scenario(door):
        core = door.core

        async def call(method, path, query=b"", body=b""):
            headers = [*ROOT, (b"content-type", b"application/json")] if body else ROOT
            return await door.begin_raw(method, path, headers, query, body).end()

        assert (await door.post("/sleep", {}, authorization="Bearer one")).status == 403
        core.controller = lambda message: Controlled(message.call, message.action in ("sleep", "ask"))
        assert (await call("POST", "/sleep")).status == 200
        assert (core.controls[-1].action, core.controls[-1].level) == ("sleep", 1)
        assert (await call("POST", "/sleep", b"level=2&mode=keep")).status == 200 and core.controls[-1].level == 2
        assert (await call("GET", "/is_sleeping")).json() == {"is_sleeping": True}
        assert (await call("POST", "/wake_up")).status == 200 and core.controls[-1].tags is None
        assert (await call("POST", "/wake_up", b"tags=weights&tags=kv_cache")).status == 200
        assert core.controls[-1].tags == ["weights", "kv_cache"]
        answer = await call("POST", "/collective_rpc", body=b'{"method": "reload_weights"}')
        assert answer.json() == {"results": [None]} and core.controls[-1].action == "update_weights"
        count = len(core.controls)
        for path, query, body in (
            ("/sleep", b"level=3", b""),
            ("/sleep", b"mode=wait", b""),
            ("/sleep", b"leve=1", b""),
            ("/wake_up", b"tag=weights", b""),
            ("/collective_rpc", b"", b'{"method": "eval"}'),
        ):
            assert (await call("POST", path, query, body)).status == 400
        assert len(core.controls) == count
        core.controller = lambda message: Controlled(
            message.call, False, Refused.of("", InvalidOption("enable_sleep_mode is False"))
        )
        answer = await call("POST", "/sleep")
        assert answer.status == 400 and "--enable-sleep-mode is false" in answer.error

    at_door(folder, scenario, api_key=("one",), admin_key="root")


def test_sleep_aborts_open_requests_unless_they_are_kept(folder):
    async def scenario(door):
        for mode, is_aborted in (("abort", True), ("keep", False)):
            exchange = door.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 4})
            await door.core.until(lambda: door.core.submits)
            await door.begin_raw("POST", "/sleep", ROOT, f"mode={mode}".encode(), b"").end()
            assert bool(door.core.aborts) is is_aborted
            if is_aborted:
                answer = await exchange.end()
                assert answer.json()["choices"][0]["finish_reason"] == "abort"
                door.core.submits.clear()
                door.core.aborts.clear()
            else:
                exchange.hang_up()
                await exchange.end()

    at_door(folder, scenario, admin_key="root", answers=False)


def test_a_sleeping_engine_answers_503_and_does_not_count_as_stalled(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 4})
        await door.core.until(lambda: door.core.submits)
        door.core.say(Pulse(is_asleep=True))
        while not door.state.engine.pulse.is_asleep:
            await door.get("/health")
        watchdog = Watchdog(door.state, 1.0)
        watchdog.check(0.0)
        watchdog.check(1e9)
        assert door.state.stalled is None
        submit = door.core.submits[-1]
        door.core.say(Refused.of(submit.request_id, EngineAsleep("the engine is asleep; call wake_up first")))
        answer = await exchange.end()
        assert answer.status == 503 and "asleep" in answer.error

    at_door(folder, scenario, admin_key="root", answers=False)
