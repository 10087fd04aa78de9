"""All chat APIs alike: a closed connection ends generation, no call of a model is an internal error, and a whole answer
has what its stream has."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.asgi import at_door, check_error
from serve.dialects import CALL, with_server
from serve.samples import MESSAGES

ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"model": "tiny", "messages": MESSAGES},
    "/api/generate": {"model": "tiny", "prompt": "hi"},
    "/v2/chat": {"model": "tiny", "messages": MESSAGES},
}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOLS = {
    "/v1/messages": [{"name": "weather", "input_schema": {"type": "object", "properties": {}}}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "": [{"type": "function", "function": FUNCTION}],
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_closed_connection_ends_generation(folder, path):
    async def scenario(door):
        for place, stream in enumerate((False, True)):
            request = door.begin("POST", path, {**ROUTES[path], "stream": stream})
            await door.core.until(lambda place=place: len(door.core.submits) > place)
            door.core.token(door.core.submits[place], 65)
            if stream:
                await request.until(b"A")
            request.hang_up()
            await request.end()
            await door.core.until(lambda place=place: len(door.core.aborts) > place)

    at_door(folder, scenario, answers=False)


@pytest.mark.parametrize("path", ROUTES)
def test_a_model_without_tokenizer_refuses_texts_by_name(path):
    async def scenario(door):
        for more in ({}, {"raw": True}) if path == "/api/generate" else ({},):
            refused = await door.post(path, {**ROUTES[path], **more})
            assert refused.status == 400 and "--skip-tokenizer-init" in refused.said, refused.body

    at_door(Path(), scenario, model={"tokenizer": None})


@pytest.mark.parametrize("path", ROUTES)
def test_a_wrong_method_has_an_error_in_the_format_of_the_api(folder, path):
    async def scenario(door):
        refused = await door.begin("GET", path).end()
        route = door.app.find_route("POST", path)
        assert refused.status == 405
        check_error(refused, route)

    at_door(folder, scenario)


DEEP = '{"a": ' + "[" * 1200 + "]" * 1200 + "}"
HALF = r'{"a": "\ud800", "n": 123456789012345678901234567890}'


@pytest.mark.parametrize("path", [path for path in ROUTES if path not in ("/v1/completions", "/api/generate")])
def test_a_call_that_is_hard_to_encode_is_answered(folder, path):
    async def scenario(door, url):
        tools = TOOLS.get(path, TOOLS[""])
        for arguments in (DEEP, HALF, '{"a":\n1}'):
            for stream in (False,) if arguments == DEEP else (False, True):
                door.core.texts = [f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>']
                more = {"max_tokens": 3000} if path == "/v1/messages" else {}
                answer = await door.post(path, {**ROUTES[path], "tools": tools, "stream": stream, **more})
                assert answer.status == 200 and b"internal error" not in answer.body, answer.body[:500]
                assert answer.parsed() and b"\\u" in answer.body if arguments == HALF else b"a" in answer.body

    with_server(folder, scenario)


@pytest.mark.parametrize(("path", "content"), [("/v1/messages", "content"), ("/v1/responses", "output")])
def test_a_whole_answer_has_texts_and_calls_in_the_order_of_the_output(folder, path, content):
    async def scenario(door, url):
        door.core.texts = [f"First.{CALL}Then.{CALL}"]
        more = {"tools": TOOLS[path]} | ({"max_tokens": 300} if path == "/v1/messages" else {})
        answer = (await door.post(path, ROUTES[path] | more)).json()
        said = [each["content"][0]["text"] if "content" in each else each.get("text") for each in answer[content]]
        assert said == ["First.", None, "Then.", None], answer

    with_server(folder, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_have_different_ids_though_the_model_writes_one_twice(folder, stream):
    call = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'

    async def scenario(door, url):
        door.core.texts = [f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"]
        body = {"input": "hi", "tools": TOOLS["/v1/responses"], "stream": stream}
        answer = await door.post("/v1/responses", body)
        output = answer.parsed()[-1]["response"]["output"] if stream else answer.json()["output"]
        first, second = (each["call_id"] for each in output)
        assert first == "functions.weather:0" and second.startswith("call_")

    with_server(folder, scenario, tool_call_parser="kimi_k2")
