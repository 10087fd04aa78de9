"""Every object inside a request of a chat API refuses a field that it does not have, by its name.

One body per route has an object of each kind; the walk adds a field to every object in it. Objects whose fields are
free, such as JSON schemas and the arguments of calls, are left out.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from scripted_core import ScriptedCore, facts
from serve.asgi import Door
from serve.samples import SAMPLES
from slipstream.params.values import MAX_DEPTH
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes
from tiny_tokenizer import write_byte_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "now", "description": "the time", "parameters": SCHEMA}
CALL = {"id": "call_abcd1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
FREE = {"parameters", "input_schema", "schema", "arguments", "metadata", "data", "caller"}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "tool_calls": [CALL]},
            {"role": "tool", "content": "c", "tool_call_id": "call_abcd1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "now"}},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
            {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "c"}], "summary": []},
            {"type": "function_call", "call_id": "call_abcd1", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_abcd1", "output": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": "again"},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "tool_choice": {"type": "function", "name": "now"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "reasoning": {"effort": "high"},
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "b", "citations": None},
                {"type": "tool_use", "id": "call_abcd1", "name": "now", "input": {}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_abcd1", "content": [{"type": "text", "text": "c"}]},
            ]},
        ],
        "tools": [{"name": "now", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "now"},
        "thinking": {"type": "enabled", "budget_tokens": 10},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/v2/chat": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "document", "document": {"data": {"title": "b"}, "id": "1"}},
            ]},
            {"role": "assistant", "tool_plan": "d", "tool_calls": [CALL]},
            {"role": "tool", "content": [{"type": "text", "text": "c"}], "tool_call_id": "call_abcd1"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "e"}, {"type": "text", "text": "a"},
            ]},
            {"role": "user", "content": "again"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_object", "json_schema": SCHEMA},
        "thinking": {"type": "enabled", "token_budget": 10},
    },
    "/api/chat": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "thinking": "t", "tool_calls": [
                {"id": "call_abcd1", "function": {"index": 0, "name": "now", "arguments": {}}},
            ]},
            {"role": "tool", "content": "b", "tool_name": "now", "tool_call_id": "call_abcd1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "options": {"num_predict": 4},
    },
}  # fmt: skip
FREE_PLACES = {"/v1/messages": {"input"}, "/v2/chat": {"json_schema"}}


def objects(value: Any, free: set[str], path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all objects below the body."""
    found = [path] if path and isinstance(value, dict) else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        if key not in free:
            found += objects(each, free, (*path, key))
    return found


CASES = [
    (route, place) for route, body in BODIES.items() for place in objects(body, FREE | FREE_PLACES.get(route, set()))
]


def with_change(body: dict[str, Any], place: tuple[Any, ...], field: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    inner: Any = changed
    for key in place:
        inner = inner[key]
    inner[field] = value
    return changed


@pytest.fixture(scope="module")
def send(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{{ m.reasoning_content }}"
        "{% endfor %}{{ tools }}{{ enable_thinking }}{{ reasoning_effort }}{# <think> </think> #}"
    )
    with asyncio.Runner() as runner:
        engine, core = runner.run(ScriptedCore.open(facts(folder, chat_template=template, max_model_len=8192)))
        door = Door(App(State(ServerSettings(), engine), all_routes()), core)
        yield lambda path, body: runner.run(door.post(path, body))
        runner.run(engine.close())


@pytest.mark.parametrize("route", BODIES)
def test_the_bodies_are_accepted(send, route):
    answer = send(route, BODIES[route])
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(("route", "place"), CASES, ids=str)
def test_an_unknown_field_inside_a_field_is_refused_by_name(send, route, place):
    answer = send(route, with_change(BODIES[route], place, "surprise", 1))
    assert answer.status == 400 and "surprise" in answer.said, (answer.status, answer.body[:300])


def test_the_walk_finds_objects_of_every_depth():
    assert ("/v1/messages", ("messages", 2, "content", 0, "content", 0)) in CASES
    assert ("/v1/chat/completions", ("messages", 1, "tool_calls", 0, "function")) in CASES


def deep(levels: int, kind: str) -> Any:
    value: Any = 5
    for _ in range(levels):
        value = [value] if kind == "list" else {"a": value}
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values below the body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in items for place in [(*path, key), *places(each, (*path, key))]]


FIELDS = ("chat_template_kwargs", "structured_outputs", "response_format", "metadata", "logit_bias", "format")


@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("route", sorted({**SAMPLES, **BODIES}))
def test_a_deep_value_in_any_place_is_no_failure(send, route, kind):
    """The deepest that a body may be, and deeper."""
    body = {**SAMPLES, **BODIES}[route]
    for place in [*places(body), *((name,) for name in FIELDS)]:
        for levels in (MAX_DEPTH - len(place), MAX_DEPTH):
            answer = send(route, with_change(body, place[:-1], place[-1], deep(levels, kind)))
            assert answer.status < 500 and b"ecursion" not in answer.body, (place, levels, answer.body)
            assert levels < MAX_DEPTH or f"nested too deeply; the limit is {MAX_DEPTH} " in answer.said, place


def test_a_body_of_many_objects_is_refused_before_it_is_decoded(send, monkeypatch):
    monkeypatch.setattr("slipstream.params.values.MAX_HOLDERS", 1000)
    for value in ([{}] * 1000, {str(index): [] for index in range(1000)}):
        answer = send("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"metadata": value})
        assert answer.status == 400 and "too many objects and arrays; the limit is " in answer.said


WRONG_PARTS = [
    ("/v1/responses", {"role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
    ("/v1/responses", {"role": "user", "content": [{"type": "input_text", "text": 5}]}, "content[0].text"),
    ("/v1/responses", {"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}, "content[0].refusal"),
    ("/v1/responses", {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}, "content[0]"),
    ("/v2/chat", {"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
    ("/v2/chat", {"role": "user", "content": [{"type": "document", "document": "a"}]}, "content[0].document"),
    ("/v2/chat", {"role": "user", "content": [{"type": "document", "document": {}}]}, "content[0].document.data"),
    ("/v2/chat", {"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}, "content[0]"),
    ("/v2/chat", {"role": "user"}, "content"),
    ("/v2/chat", {"role": "tool", "tool_call_id": "call_abcd1"}, "content"),
]


@pytest.mark.parametrize(("route", "message", "place"), WRONG_PARTS, ids=str)
def test_a_part_that_cannot_be_used_is_refused_by_its_place(send, route, message, place):
    field = "input" if route == "/v1/responses" else "messages"
    answer = send(route, {"model": "tiny", field: [{"role": "user", "content": "a"}, message]})
    said = answer.json() if route == "/v2/chat" else answer.json()["error"]
    assert answer.status == 400 and f"{field}[1].{place} " in said["message"], said
