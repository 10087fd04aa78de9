"""The request log: client, route and status of each request, without probes."""

from __future__ import annotations

import logging

import pytest

from serve.asgi import at_door

ASK = {"prompt": "hello", "max_tokens": 4}


def logged(caplog, folder, level, scenario, **settings):
    caplog.set_level(level, "slipstream.http")
    at_door(folder, scenario, **settings)
    return [record for record in caplog.records if record.name == "slipstream.http"]


def test_a_request_is_a_line_with_its_id_and_the_clients_address(folder, caplog):
    async def scenario(door):
        door.client = ("192.0.2.7", 4321)
        await door.post("/v1/completions", ASK, x_request_id="mine")

    (line,) = logged(caplog, folder, logging.INFO, scenario)
    assert (line.request_id, line.client, line.method, line.route, line.status) == (
        "mine", "192.0.2.7:4321", "POST", "/v1/completions", 200,
    )  # fmt: skip
    assert line.getMessage().startswith("mine 192.0.2.7:4321 POST /v1/completions 200 ")


@pytest.mark.parametrize(
    ("client", "shown"), [(None, "unix"), (("2001:db8::1", 5), "[2001:db8::1]:5"), (("10.0.0.1", 6), "10.0.0.1:6")]
)
def test_addresses_of_every_kind(folder, caplog, client, shown):
    async def scenario(door):
        door.state.engine.load.num_queued = 1
        assert door.app.refusal("POST", "/v1/completions", [], client) is not None
        door.state.engine.load.num_queued = 0

    (line,) = logged(caplog, folder, logging.INFO, scenario, max_queued_requests=1)
    assert (line.client, line.status) == (shown, 429)


@pytest.mark.parametrize("path", ["/health", "/livez", "/metrics"])
def test_probes_and_scrapes_are_logged_at_debug_alone(folder, caplog, path):
    async def scenario(door):
        assert (await door.get(path)).status == 200

    assert not logged(caplog, folder, logging.INFO, scenario)
    (line,) = logged(caplog, folder, logging.DEBUG, scenario)
    assert (line.levelno, line.route) == (logging.DEBUG, path)


def test_debug_says_why_a_request_was_refused_and_what_the_engine_did(folder, caplog):
    async def scenario(door):
        await door.post("/v1/completions", ASK | {"temperature": -1}, x_request_id="bad")
        await door.post("/v1/completions", ASK | {"prompt": ["ab", "cde"], "n": 2}, x_request_id="good")

    texts = [line.getMessage() for line in logged(caplog, folder, logging.DEBUG, scenario)]
    assert any(text.startswith("request bad: 400, temperature is -1") for text in texts)
    (told,) = [text for text in texts if text.startswith("request good: ")]
    assert "tiny, 2 prompts of 5 tokens, 0 of them cached, 4 samples of 16 tokens, ended by length" in told


def test_a_pooling_request_is_logged_without_samples(folder, caplog, monkeypatch):
    from scripted_core import EVERY_TASK, facts

    monkeypatch.setattr("serve.asgi.facts", lambda folder, **more: facts(folder, pooling=EVERY_TASK, **more))

    async def scenario(door):
        await door.post("/v1/embeddings", {"input": "hello"}, x_request_id="vector")

    texts = [line.getMessage() for line in logged(caplog, folder, logging.DEBUG, scenario)]
    assert "request vector: tiny, 1 prompts of 5 tokens" in texts
