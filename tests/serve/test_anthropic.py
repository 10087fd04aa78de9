"""Anthropic's /v1/messages: its own client unmodified, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from serve.asgi import at_door
from serve.dialects import CALL, THOUGHT, with_server
from serve.samples import MESSAGES
from slipstream.contracts.request import FinishReason

TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}


def test_the_anthropic_client(folder):
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")

    async def scenario(door, url):
        client = anthropic.AsyncAnthropic(api_key="mine", base_url=url, max_retries=0)
        how = dict(model="tiny", messages=MESSAGES, max_tokens=300)
        answer = await client.messages.create(**how, system="Be short.", extra_body={"top_k": 7})
        assert answer.content[0].text == "All is well." and answer.stop_reason == "end_turn"
        assert answer.usage.output_tokens == 12 and "Be short." in door.core.prompts[-1]
        assert door.core.submits[-1].params.top_k == 7
        count = await client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be short.")
        assert count.input_tokens == answer.usage.input_tokens == len(door.core.submits[-1].prompt_token_ids)
        assert (await client.messages.create(**how | {"max_tokens": 3})).stop_reason == "max_tokens"
        answer = await client.messages.create(**how, stop_sequences=["well"])
        assert answer.content[0].text == "All is "
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "well")

        async with client.messages.stream(**how) as stream:
            assert "".join([text async for text in stream.text_stream]) == "All is well."
            final = await stream.get_final_message()
        assert final.stop_reason == "end_turn" and final.usage.output_tokens == 12

        door.core.texts = [THOUGHT + "I look." + CALL] * 2
        answer = await client.messages.create(**how, tools=[TOOL], tool_choice={"type": "auto"})
        thought, text, call = answer.content
        assert thought.thinking == "It is late." and text.text == "I look."
        assert (call.name, call.input, answer.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
        async with client.messages.stream(**how, tools=[TOOL]) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[2].input == {"city": "Oslo"} and final.content[0].thinking == "It is late."

        result = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain"}]}]
        history = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": result}]
        await client.messages.create(**how | {"messages": history}, tools=[TOOL])
        assert "Rain" in door.core.prompts[-1] and "Oslo" in door.core.prompts[-1]
        begun = [*MESSAGES, {"role": "assistant", "content": "All is"}]
        await client.messages.create(**how | {"messages": begun})
        assert door.core.prompts[-1].endswith("All is")  # the answer continues it
        door.core.texts = ['{"city": "Oslo"}'] * 2
        forced = dict(**how, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
        answer = await client.messages.create(**forced)
        assert door.core.submits[-1].params.structured_outputs is not None
        assert answer.stop_reason == "tool_use" and answer.content[0].input == {"city": "Oslo"}
        async with client.messages.stream(**forced) as stream:
            assert (await stream.get_final_message()).stop_reason == "tool_use"
        with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'"):
            await client.messages.create(**how | {"model": "claude"})

    with_server(folder, scenario, reasoning_parser="qwen3", api_key=["mine"])


def test_the_events_of_a_stream(folder):
    async def scenario(door, url):
        door.core.texts = [THOUGHT + "Well."]
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 90, "stream": True}
        events = (await door.post("/v1/messages", body)).parsed()
        kinds = [each["type"] for each in events if each["type"] != "content_block_delta"]
        block = ["content_block_start", "content_block_stop"]
        assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
        assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["output_tokens"] == 0
        deltas = [(each["index"], each["delta"]["type"]) for each in events if each["type"] == "content_block_delta"]
        assert set(deltas) == {(0, "thinking_delta"), (1, "text_delta")}
        assert events[-2]["usage"]["output_tokens"] == len(THOUGHT + "Well.")

    with_server(folder, scenario, reasoning_parser="qwen3")


BAD = ("{'city': 1}", '{"city": }', '"Oslo"', "[1]", '{"city": "O', '{"city": "a\nb"}', '{"city": NaN}')


def test_a_call_that_is_no_json_ends_no_stream(folder):
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")

    async def scenario(door, url):
        client = anthropic.AsyncAnthropic(api_key="none", base_url=url, max_retries=0)
        how = dict(model="tiny", messages=MESSAGES, max_tokens=300, tools=[TOOL])
        for arguments in BAD:
            door.core.texts = [CALL.replace('{"city": "Oslo"}', arguments)] * 2
            whole = await client.messages.create(**how)
            async with client.messages.stream(**how) as stream:
                final = await stream.get_final_message()
            assert [each.input for each in final.content] == [each.input for each in whole.content]
            assert set(whole.content[0].input) == {"text"}
        await client.close()

    with_server(folder, scenario)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [TOOL | {"eager_input_streaming": True}]},
        {"tools": [TOOL | {"strict": True}]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
    ],
    ids=["eager", "strict", "forced"],
)
def test_the_input_of_a_tool_is_streamed_where_it_is_json_or_the_request_asks_for_it(folder, more):
    async def scenario(door):
        forced = '[{"name": "weather", "parameters": {"city": "Oslo"}}]'
        for fields, is_streamed in ((more, True), ({"tools": [TOOL]}, False)):
            body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 900, "stream": True, **fields}
            stream = door.begin("POST", "/v1/messages", body)
            await door.core.until(lambda: door.core.submits)
            submit, text = door.core.submits.pop(), (forced if "tool_choice" in fields else CALL).encode()
            begin = text.index(b"Oslo")
            door.core.token(submit, *text[:begin])
            await stream.until(b"partial_json" if is_streamed else b"content_block_start")
            door.core.token(submit, *text[begin:], end=FinishReason.STOP)
            events = (await stream.end()).parsed()
            pieces = [each["delta"]["partial_json"] for each in events if each["type"] == "content_block_delta"]
            assert (len(pieces) > 1) == is_streamed and json.loads("".join(pieces)) == {"city": "Oslo"}

    at_door(folder, scenario, answers=False, model={"max_model_len": 4096})


def image(kind):
    return [{"role": "user", "content": [{"type": kind, "source": {}}]}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": image("image")}, "messages[0].content[0]"),
        ({"messages": image("document")}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "content[0].x"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL | {"eager_input_streaming": "yes"}]}, "tools[0].eager_input_streaming"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice demands a call"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name is 'a b'"),
        ({"tools": [TOOL | {"input_schema": 5}]}, "tools[0].input_schema is 5; give an object"),
        ({"tools": [TOOL, TOOL]}, "twice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
        (
            {"thinking": {"type": "between_tools"}},
            "thinking.type is 'between_tools'; give one of adaptive, disabled, enabled",
        ),
        ({"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking.budget_tokens needs type enabled"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, body, words):
    async def scenario(door):
        refused = await door.post("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, **body})
        assert refused.status == 400 and words in refused.said, refused.body
        assert refused.json()["type"] == "error" and refused.json()["error"]["type"] == "invalid_request_error"

    at_door(folder, scenario)


def test_an_error_within_a_stream_is_an_event(folder):
    async def scenario(door):
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "stream": True}
        stream = door.begin("POST", "/v1/messages", body, x_request_timeout="60")
        await door.core.until(lambda: door.core.submits)
        door.core.token(door.core.submits[0], 65)
        await stream.until(b'"A"')
        door.pass_time(60)
        await stream.end()
        last = stream.parsed()[-1]
        assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
        assert b"event: error\n" in stream.body

    at_door(folder, scenario, answers=False)
