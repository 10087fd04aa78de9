"""Cohere's /v2/chat and /v2/embed: its own client unmodified, and what is refused by name."""

from __future__ import annotations

import base64
import warnings

import numpy as np
import pytest

from serve.asgi import at_door
from serve.dialects import CALL, THOUGHT, with_server
from serve.samples import MESSAGES
from slipstream.serve.http.table import all_routes

FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_the_cohere_client(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cohere = pytest.importorskip("cohere", reason="needs the cohere client")

    async def scenario(door, url):
        client = cohere.AsyncClientV2(api_key="none", base_url=url)
        answer = await client.chat(model="tiny", messages=MESSAGES, max_tokens=3)
        assert answer.message.content[0].text == "All" and answer.finish_reason == "MAX_TOKENS"
        assert answer.usage.tokens.output_tokens == 3
        answer = await client.chat(model="tiny", messages=MESSAGES, stop_sequences=["well"], k=5, p=0.5, seed=3)
        assert answer.message.content[0].text == "All is " and answer.finish_reason == "STOP_SEQUENCE"
        params = door.core.submits[-1].params
        assert (params.top_k, params.top_p, params.seed) == (5, 0.5, 3)

        events = [each async for each in client.chat_stream(model="tiny", messages=MESSAGES)]
        text = "".join(each.delta.message.content.text for each in events if each.type == "content-delta")
        assert text == "All is well."
        kinds = [each.type for each in events if each.type != "content-delta"]
        assert kinds == ["message-start", "content-start", "content-end", "message-end"]
        assert events[-1].delta.finish_reason == "COMPLETE" and events[-1].delta.usage.tokens.output_tokens == 12

        door.core.texts = [THOUGHT + CALL] * 2
        answer = await client.chat(model="tiny", messages=MESSAGES, tools=[FUNCTION])
        (call,) = answer.message.tool_calls
        assert call.function.name == "weather" and call.function.arguments == '{"city": "Oslo"}'
        assert answer.finish_reason == "TOOL_CALL" and answer.message.content[0].thinking == "It is late."
        events = [each async for each in client.chat_stream(model="tiny", messages=MESSAGES, tools=[FUNCTION])]
        pieces = [each.delta.message.tool_calls.function.arguments for each in events if each.type == "tool-call-delta"]
        assert "".join(pieces) == '{"city": "Oslo"}' and events[-1].delta.finish_reason == "TOOL_CALL"

        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
        await client.chat(model="tiny", messages=[*MESSAGES, answer.message, result])
        assert "Rain" in door.core.prompts[-1] and "Oslo" in door.core.prompts[-1]
        planned = {"role": "assistant", "tool_plan": "Look it up.", "content": "Wait."}
        await client.chat(model="tiny", messages=[*MESSAGES, planned, *MESSAGES])
        assert "Look it up.\nWait." in door.core.prompts[-1]
        shape = {"type": "json_object", "json_schema": {"type": "object"}}
        await client.chat(model="tiny", messages=MESSAGES, response_format=shape)
        assert door.core.submits[-1].params.structured_outputs.json == '{"type": "object"}'

        found = await client.embed(
            model="pool", texts=["a", "b"], input_type="search_query", embedding_types=["float", "ubinary", "binary"]
        )
        assert found.embeddings.float_ == [[0.5] * 8] * 2 and found.meta.billed_units.input_tokens == 2
        assert found.embeddings.ubinary == [[255]] * 2 and found.embeddings.binary == [[127]] * 2
        found = await client.embed(
            model="pool", texts=["a"], input_type="search_document", embedding_types=["base64"], output_dimension=8
        )
        assert np.frombuffer(base64.b64decode(found.embeddings.base64[0]), "<f4").tolist() == [0.5] * 8
        with pytest.raises(cohere.NotFoundError, match="there is no model 'other'"):
            await client.chat(model="other", messages=MESSAGES)

    with_server(folder, scenario, reasoning_parser="qwen3")


def test_reasoning_beside_a_plan_is_kept(folder):
    async def scenario(door, url):
        door.core.texts = [f"{THOUGHT}I look.{CALL}"]
        answer = (await door.post("/v2/chat", {"model": "tiny", "messages": MESSAGES, "tools": [FUNCTION]})).json()
        message = answer["message"]
        assert message["tool_plan"] == "I look." and len(message["tool_calls"]) == 1
        assert message["content"] == [{"type": "thinking", "thinking": "It is late."}]

    with_server(folder, scenario, reasoning_parser="qwen3")


def test_indices_in_a_stream_are_those_of_their_own_list(folder):
    async def scenario(door, url):
        door.core.texts = [f"{THOUGHT}I look.{CALL}{CALL}"]
        body = {"model": "tiny", "messages": MESSAGES, "tools": [FUNCTION], "stream": True}
        events = (await door.post("/v2/chat", body)).parsed()
        begun = [
            (each["type"], each["index"]) for each in events if each["type"].endswith("-start") and "index" in each
        ]
        call = "tool-call-start"
        assert begun == [("content-start", 0), ("content-start", 1), (call, 0), (call, 1)]
        for kind in ("tool-call-delta", "tool-call-end"):
            assert {each["index"] for each in events if each["type"] == kind} == {0, 1}

    with_server(folder, scenario, reasoning_parser="qwen3")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"documents": ["a"]}, "documents"),
        ({"citation_options": {"mode": "FAST"}}, "citation_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "disabled", "token_budget": 9}}, "thinking.token_budget needs type enabled"),
        ({"strict_tools": True}, "strict_tools needs tools"),
        ({"k": -5}, "k"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages[0].tool_calls"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, body, words):
    async def scenario(door):
        refused = await door.post("/v2/chat", {"model": "tiny", "messages": MESSAGES, **body})
        assert refused.status == 400 and words in refused.said, refused.body
        assert set(refused.json()) == {"message"}

    at_door(folder, scenario)


def test_an_error_of_embed_names_its_own_field(folder):
    async def scenario(door, url):
        refused = await door.post("/v2/embed", {"model": "pool", "texts": ["a"], "output_dimension": 99})
        assert refused.status == 400 and refused.said.startswith("output_dimension is 99"), refused.body

    with_server(folder, scenario)


def test_errors_of_all_routes_have_the_format_of_unknown_ones_beside_them(folder):
    """A client reads errors of one API; /v2/rerank answered as OpenAI's routes do."""

    async def scenario(door):
        checked = 0
        for route in all_routes():
            prefix = next((prefix for prefix in ("/v2/", "/api/", "/v1/messages") if route.path.startswith(prefix)), "")
            if not prefix or route.method == "GET":
                continue
            unknown = await door.begin("POST", f"{prefix.rstrip('/')}/none", {}).end()
            refused = await door.begin(route.method, route.path, {"no_field": 1}).end()
            assert unknown.status == 404 and refused.status == 400, route.path
            assert refused.json().keys() == unknown.json().keys() != {"error"} or prefix == "/api/", refused.body
            assert isinstance(refused.json().get("error"), str) == (prefix == "/api/")
            checked += 1
        assert checked > 10
        texts = await door.post("/v2/rerank", {"query": "a", "texts": [], "top_n": 1})  # TEI's body: TEI's errors
        assert texts.json().keys() == {"error", "error_type"}

    at_door(folder, scenario)
