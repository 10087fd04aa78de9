"""CORS headers and preflight requests, by origin."""

from __future__ import annotations

import pytest

from serve.asgi import Door, at_door
from slipstream.base.errors import InvalidOption
from slipstream.serve.cli.serve import server_settings
from slipstream.serve.http.worker import Cors

PAGE = "https://page.example"
ASK = {"prompt": "hello", "max_tokens": 2}


def with_cors(folder, scenario, **settings):
    async def inside(door):
        return await scenario(Door(Wrapped(door), door.core))

    return at_door(folder, inside, api_key=["key"], **settings)


class Wrapped(Cors):
    """Looks like an app to the door."""

    def __init__(self, door):
        super().__init__(door.app, door.state.settings)
        self.state = door.state


def ask_first(door, origin=PAGE):
    return door.begin(
        "OPTIONS", "/v1/completions", origin=origin, access_control_request_method="POST",
        access_control_request_headers="authorization, content-type",
    ).end()  # fmt: skip


@pytest.mark.parametrize("settings", [{"allowed_origins": [PAGE]}, {"allowed_origins": ["*"]}], ids=["one", "all"])
def test_an_allowed_origin_gets_cors_headers_and_its_response(folder, settings):
    async def scenario(door):
        first = await ask_first(door)
        told = first.headers["access-control-allow-origin"]
        assert first.status == 204 and told in (PAGE, "*") and (told == "*") == (settings["allowed_origins"] == ["*"])
        assert first.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "POST" in first.headers["access-control-allow-methods"]
        answer = await door.post("/v1/completions", ASK, origin=PAGE, authorization="Bearer key")
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == told
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await door.post("/v1/completions", ASK, origin=PAGE)
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == told  # it may read why
        assert "access-control-allow-origin" not in (await door.get("/health")).headers

    with_cors(folder, scenario, **settings)


def test_another_origin_gets_no_cors_headers(folder):
    async def scenario(door):
        first = await ask_first(door, origin="https://evil.example")
        assert first.status == 403 and "--allowed-origins" in first.error
        answer = await door.get("/health", origin="https://evil.example")
        assert answer.status == 200 and "access-control-allow-origin" not in answer.headers

    with_cors(folder, scenario, allowed_origins=[PAGE])


def test_cookies_go_to_a_named_page_and_what_is_allowed_may_be_less(folder):
    async def scenario(door):
        first = await ask_first(door)
        assert first.headers["access-control-allow-origin"] == PAGE  # browsers want it named then
        assert first.headers["access-control-allow-credentials"] == "true" and first.headers["vary"] == "Origin"
        assert first.headers["access-control-allow-methods"] == "GET"
        assert first.headers["access-control-allow-headers"] == "x-a, x-b"

    with_cors(
        folder, scenario, allowed_origins=[PAGE], allow_credentials=True, allowed_methods=["GET"],
        allowed_headers=["x-a", "x-b"],
    )  # fmt: skip


def test_without_origins_a_preflight_is_not_answered(folder):
    async def scenario(door):
        assert (await ask_first(door)).status == 405

    at_door(folder, scenario)


def test_refusals_to_browsers_have_cors_headers(folder):
    async def scenario(door):
        cors = door.app
        door.state.engine.load.num_queued = 1
        headers = [(b"authorization", b"Bearer key")]
        assert cors.refusal("POST", "/v1/completions", headers, None)[0].status == 429
        assert cors.refusal("POST", "/v1/completions", [*headers, (b"origin", b"https://page.example")], None) is None
        refused = await door.post("/v1/completions", ASK, origin=PAGE, authorization="Bearer key")
        assert refused.status == 429 and refused.headers["access-control-allow-origin"] == "*"
        door.state.engine.load.num_queued = 0

    with_cors(folder, scenario, allowed_origins=["*"], max_queued_requests=1)


def test_all_pages_with_credentials_are_refused_at_the_start():
    with pytest.raises(InvalidOption, match="list the origins"):
        server_settings({"allowed_origins": ["https://a", "*"], "allow_credentials": True})
    assert server_settings({"allowed_origins": ["https://a"], "allow_credentials": True}).allow_credentials


def test_a_page_of_any_origin_never_gets_another_ones_cookies_allowed(folder):
    """Whatever the flags say, the answer to all is no answer to one."""

    async def scenario(door):
        first = await ask_first(door, origin="https://evil.example")
        assert first.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in first.headers

    with_cors(folder, scenario, allowed_origins=["*"], allow_credentials=True)


def test_the_flags_take_json_lists_as_vllm_does():
    given = {"allowed_origins": ['["https://a", "https://b"]', "https://c"]}
    assert server_settings(given).allowed_origins == ["https://a", "https://b", "https://c"]
    with pytest.raises(InvalidOption, match="not a JSON list"):
        server_settings({"allowed_headers": ["[x"]})
