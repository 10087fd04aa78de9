"""The Host header: a loopback server answers to loopback names alone, or a web page could reach it by DNS rebinding."""

from __future__ import annotations

import pytest

from serve.asgi import at_door
from serve.test_cors import with_cors
from slipstream.base.errors import InvalidOption
from slipstream.serve.cli.serve import server_settings

ASK = {"prompt": "hello", "max_tokens": 4}


def asked(folder, *names, path="/v1/models", **settings):
    async def scenario(door):
        headers = [(b"host", name.encode("latin-1")) for name in names]
        return await door.begin_raw("GET", path, headers, b"", b"").end()

    return at_door(folder, scenario, **settings)


LOOPBACK = [
    "localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000",
]  # fmt: skip
OTHERS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]",
    "evil.example@localhost", "localhost:8000@evil.example", "localhost\xff", "127.0.0.256", "[::1", "::1x",
]  # fmt: skip


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_reach_a_loopback_server(folder, bind, host):
    assert asked(folder, host, host=bind).status == 200


@pytest.mark.parametrize("host", OTHERS)
def test_any_other_name_is_refused_there(folder, host):
    answer = asked(folder, host)
    assert answer.status == 403 and answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in answer.error


def test_one_bad_name_beside_a_good_one_is_refused(folder):
    assert asked(folder, "localhost", "evil.example").status == 403


def test_a_request_without_a_name_is_let_in_since_browsers_always_send_one(folder):
    assert asked(folder).status == 200


def test_other_binds_are_checked_only_where_hosts_are_named(folder):
    assert asked(folder, "evil.example", host="0.0.0.0").status == 200
    named = {"host": "0.0.0.0", "allowed_hosts": ["api.example.com", "*.internal.example"]}
    assert asked(folder, "api.example.com:443", **named).status == 200
    assert asked(folder, "a.internal.example", **named).status == 200
    assert asked(folder, "internal.example", **named).status == 403
    assert asked(folder, "evil.example", **named).status == 403
    assert asked(folder, "evil.example", host="0.0.0.0", allowed_hosts=["*"]).status == 200


def test_named_hosts_come_beside_loopback_names_on_a_loopback_bind(folder):
    named = {"allowed_hosts": ["chat.example"]}
    assert asked(folder, "chat.example", **named).status == asked(folder, "localhost:1", **named).status == 200
    assert asked(folder, "evil.example", **named).status == 403


def test_probes_are_answered_under_any_name(folder):
    """kubelet asks by the pod's address."""
    assert asked(folder, "10.1.2.3", path="/health").status == asked(folder, "10.1.2.3", path="/ready").status == 200


def test_the_name_is_checked_before_the_key_and_before_the_queue(folder):
    async def scenario(door):
        door.state.engine.load.num_queued = 1
        headers = [(b"host", b"evil.example"), (b"authorization", b"Bearer key")]
        assert door.app.refusal("POST", "/v1/completions", headers, None) is None  # the long way, which refuses by name
        door.state.engine.load.num_queued = 0
        assert (await door.post("/v1/completions", ASK, host="evil.example")).status == 403
        assert not door.core.submits

    at_door(folder, scenario, max_queued_requests=1, api_key=["key"])


def test_a_preflight_with_another_host_is_refused(folder):
    async def scenario(door):
        asks = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        pairs = [(name.encode(), value.encode()) for name, value in asks.items()]
        answer = await door.begin_raw("OPTIONS", "/v1/models", [*pairs, (b"host", b"evil.example")], b"", b"").end()
        assert answer.status == 403
        answer = await door.begin_raw("OPTIONS", "/v1/models", [*pairs, (b"host", b"localhost")], b"", b"").end()
        assert answer.status == 204

    with_cors(folder, scenario, allowed_origins=["*"])


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:80", "a.*.example", "a b", "a/b"])
def test_a_host_that_no_header_can_have_is_refused_at_the_start(name):
    with pytest.raises(InvalidOption, match="allowed_hosts"):
        server_settings({"allowed_hosts": [name]})
