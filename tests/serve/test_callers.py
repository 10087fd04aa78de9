"""Fairness among callers: one caller's requests do not block those of others."""

from __future__ import annotations

import asyncio

import pytest

from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door, at_door
from serve.samples import SAMPLES
from slipstream.contracts.request import FinishReason
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes

ASK = {"prompt": "Once", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "Once"}]}


def callers(door) -> list[str]:
    return [submit.caller for submit in door.core.submits]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
def test_a_caller_is_a_connection(folder, path, body):
    async def scenario(door):
        for client in (("10.0.0.1", 50001), ("10.0.0.1", 50002), ("10.0.0.1", 50001)):
            door.client = client
            assert (await door.post(path, body)).status == 200
        first, second, third = callers(door)
        assert first == third != second and "10.0.0.1" in first

    at_door(folder, scenario, api_key=[])


def test_without_a_connection_to_go_by_each_request_is_a_caller(folder):
    """As it is with a unix socket."""

    async def scenario(door):
        for _ in range(3):
            await door.post("/v1/completions", ASK)
        assert len(set(callers(door))) == 3

    at_door(folder, scenario)


def test_where_there_are_several_keys_a_caller_is_a_key(folder):
    async def scenario(door):
        for port, key in enumerate(("secret-one", "secret-two", "secret-one")):
            door.client = ("10.0.0.1", port)
            assert (await door.post("/v1/completions", ASK, authorization=f"Bearer {key}")).status == 200
        first, second, third = callers(door)
        assert first == third != second and "secret" not in first

    at_door(folder, scenario, api_key=["secret-one", "secret-two"])


def test_with_one_key_callers_are_connections(folder):
    async def scenario(door):
        for port in (1, 2):
            door.client = ("10.0.0.1", port)
            await door.post("/v1/completions", ASK, authorization="Bearer only")
        assert len(set(callers(door))) == 2

    at_door(folder, scenario, api_key=["only"])


def test_prompts_times_n_are_bounded(folder):
    async def scenario(door):
        refused = await door.post("/v1/completions", {"prompt": ["a"] * 10, "n": 9})
        assert refused.status == 400 and refused.json()["error"]["code"] == "too_many_inputs"
        assert refused.json()["error"]["param"] == "n"
        assert "10 prompts with n=9 make 90 samples" in refused.error and "--max-samples" in refused.error
        refused = await door.post("/v1/chat/completions", CHAT | {"n": 41})
        assert refused.status == 400 and "1 prompts with n=41" in refused.error
        assert not door.core.submits
        assert (await door.post("/v1/completions", {"prompt": ["a"] * 10, "n": 4})).status == 200

    at_door(folder, scenario, max_samples=40)


def test_the_default_bound_refuses_a_thousand_prompts_of_many_samples(folder):
    async def scenario(door):
        refused = await door.post("/v1/completions", {"prompt": ["a"] * 1000, "n": 90})
        assert refused.status == 400 and "90000 samples" in refused.error

    at_door(folder, scenario)


def test_where_one_caller_fills_the_queue_another_still_finds_room(folder):
    async def scenario(door):
        door.client = ("hog", 1)
        hog = door.begin("POST", "/v1/completions", {"prompt": ["a"] * 8})
        await door.core.until(lambda: len(door.core.submits) == 8)
        assert (await door.post("/v1/completions", ASK)).status == 429
        door.client = ("other", 1)
        other = door.begin("POST", "/v1/completions", ASK)
        await door.core.until(lambda: len(door.core.submits) == 9)
        again = await door.post("/v1/completions", ASK)
        assert again.status == 429 and "9 requests are waiting, the limit is 8" in again.error
        door.client = ("third", 1)
        third = door.begin("POST", "/v1/completions", ASK)
        await door.core.until(lambda: len(door.core.submits) == 10)
        door.client = ("fourth", 1)
        assert (await door.post("/v1/completions", ASK)).status == 429  # the reserve ends too
        for submit in door.core.submits:
            door.core.token(submit, 66, end=FinishReason.STOP)
        for exchange in (hog, other, third):
            assert (await exchange.end()).status == 200
        await asyncio.sleep(0)
        assert not door.state.engine.load.queued_by

    at_door(folder, scenario, answers=False, max_queued_requests=8)


KEYS = ["secret-one", "secret-two"]
WITHOUT_PROMPTS = {  # of the routes with a body, those that send nothing to the core
    "/decode", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/api/show", "/api/pull", "/v1/batches",
}  # fmt: skip
BODIES = [(path, body) for path, body in SAMPLES.items() if path not in WITHOUT_PROMPTS]
BODIES += [
    (path, SAMPLES[path] | {"use_beam_search": True, "n": 2}) for path in ("/v1/completions", "/v1/chat/completions")
]


def salts_by_key(folder, path, body, cache_salt=None, **settings):
    """The cache salts of two requests of the first key and one of the second."""

    async def main():
        engine, core = await ScriptedCore.open(
            facts(folder, max_model_len=128), facts(folder, "pool", pooling=EVERY_TASK)
        )
        door = Door(App(State(ServerSettings(api_key=KEYS, **settings), engine), all_routes()), core)
        salts = []
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            core.submits.clear()
            given = body if cache_salt is None else body | {"cache_salt": cache_salt}
            answer = await door.post(path, given, authorization=f"Bearer {key}")
            assert answer.status == 200, answer.body
            salts.append({submit.cache_salt for submit in core.submits})
        await engine.close()
        return salts

    return asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_keys_share_no_cached_prefix(folder, path, body):
    """Else cached_tokens and response times tell a key what another has sent."""
    first, again, other = salts_by_key(folder, path, body)
    assert first == again and len(first) == len(other) == 1 and first != other
    assert not any(key in salt for salt in first | other for key in KEYS)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_salt_of_the_request_separates_within_a_key(folder, path):
    plain, salted = salts_by_key(folder, path, SAMPLES[path]), salts_by_key(folder, path, SAMPLES[path], "mine")
    assert len({*plain[0], *plain[2], *salted[0], *salted[2]}) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_keys_that_trust_each_other_share_cached_prefixes(folder, path):
    shares = {"share_prefix_cache_between_keys": True}
    assert salts_by_key(folder, path, SAMPLES[path], **shares) == [{""}] * 3
    assert salts_by_key(folder, path, SAMPLES[path], "ours", **shares) == [{"ours"}] * 3


def test_with_one_key_all_requests_share_cached_prefixes(folder):
    async def scenario(door):
        for port in (1, 2):
            door.client = ("10.0.0.1", port)
            await door.post("/v1/completions", ASK, authorization="Bearer only")
        assert {submit.cache_salt for submit in door.core.submits} == {""}

    at_door(folder, scenario, api_key=["only"])
