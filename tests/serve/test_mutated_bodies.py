"""Valid bodies with tools, schemas and histories, of which one part at a time is replaced or removed: the answer is
never a 5xx, and a refusal has the format of the route's API."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest

from serve.asgi import check_error
from serve.fuzzed_door import fuzzed_door
from serve.samples import SAMPLES
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.table import all_routes
from text.chat_templates import THINKING

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "tags": {"type": "array", "items": {"enum": ["a", 1]}}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Rain?", "parameters": SCHEMA, "strict": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
BODIES = {
    "/v1/chat/completions": {
        "messages": HISTORY,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1.0},
        "stop": ["z"],
        "stream": True,
        "max_tokens": 4,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {
        "prompt": "hi",
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "reasoning": {"effort": "none", "summary": "auto"},
        "stream": True,
        "max_output_tokens": 4,
    },
    "/v1/messages": {
        "model": "tiny",
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Oslo?"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "O"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "rain"}]},
        ],
        "tools": [{"name": "weather", "description": "Rain?", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "stop_sequences": ["z"],
        "stream": True,
        "max_tokens": 4,
    },
    "/api/chat": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "Oslo?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "O"}}}],
            },
            {"role": "tool", "tool_name": "weather", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "format": SCHEMA,
        "options": {"num_predict": 4, "stop": ["z"]},
    },
    "/v2/chat": {
        "model": "tiny",
        "messages": HISTORY,
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_object", "schema": SCHEMA},
        "stop_sequences": ["z"],
        "max_tokens": 4,
    },
    "/v1/batches": {
        "input_file_id": "file-sample",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
}
DEEP: object = []
for _ in range(200):
    DEEP = {"anyOf": [DEEP], "items": DEEP} if len(json.dumps(DEEP)) < 10_000 else [DEEP]
VALUES = [None, True, 0, -1, 2**70, 1e308, "", "\ud800", "x" * 10_000, [], {}, [None], [[]], {"": None}, ["a", 1], DEEP]
ROUTES = {route.path: route for route in all_routes()}


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def door(runner, tmp_path_factory):
    settings = ServerSettings(enable_auto_tool_choice=True, tool_call_parser="hermes")
    folder = tmp_path_factory.mktemp("tokenizer")
    with fuzzed_door(runner, folder, settings, chat_template=THINKING, max_model_len=4096) as door:
        yield door


def places(part, path=()):
    """The paths of all parts of a body."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from places(inner, (*path, name))


def mutated(body):
    """The body without one part, and with each value in its place."""
    for path in places(body):
        for value in (..., *VALUES):
            made = copy.deepcopy(body)
            inner = made
            for name in path[:-1]:
                inner = inner[name]
            if value is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield path, value, made


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_part_gets_a_clear_answer(runner, door, path):
    whole = runner.run(door.post(path, BODIES[path]))
    assert whole.status == 200, whole.body
    wrong = []
    num_refused = 0
    for place, value, body in mutated(BODIES[path]):
        exchange = runner.run(door.post(path, json.dumps(body).encode()))
        about = (place, repr(value)[:40], exchange.status, exchange.body[:300])
        if not 200 <= exchange.status < 500:
            wrong.append(about)
        elif exchange.status != 200:
            num_refused += 1
            try:
                check_error(exchange, ROUTES[path])
            except Exception as error:
                wrong.append((*about, error))
    assert not wrong, (len(wrong), wrong[:10])
    assert num_refused > 50


def test_an_effort_that_the_template_does_not_read_is_refused_and_the_error_names_another(runner, door):
    """The template has a switch for reasoning, and no effort."""
    efforts = {"/v1/responses": {"reasoning": {"effort": "low"}}, "/v1/messages": {"output_config": {"effort": "low"}}}
    for path, field in efforts.items():
        (name,) = field
        refused = runner.run(door.post(path, SAMPLES[path] | field))
        assert refused.status == 400, refused.body
        message = refused.json()["error"]["message"]
        assert f"{name} has no effect" in message and "give none" in message and f"use {name}" not in message
