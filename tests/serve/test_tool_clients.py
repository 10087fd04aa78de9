"""openai and langchain-openai, unmodified, with tools and reasoning, over a scripted core."""

from __future__ import annotations

import asyncio
import json

import pytest

from serve.asgi import at_door
from slipstream.contracts.request import FinishReason
from text.chat_templates import THINKING

openai = pytest.importorskip("openai", reason="the openai client is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

MODEL = {"chat_template": THINKING, "max_model_len": 8192}
USER = [{"role": "user", "content": "Weather in Oslo?"}]


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str = pydantic.Field(description="its name")
    days: int = 1


CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


def with_client(folder, talk, *texts):
    """Runs `talk` with an HTTP client; the model writes one text after the other."""

    async def scenario(door):
        async def write():
            for number, text in enumerate(texts):
                await door.core.until(lambda number=number: len(door.core.submits) > number)
                submit = door.core.submits[number]
                for place in range(0, len(text), 3):
                    part = text[place : place + 3]
                    door.core.token(submit, *part.encode(), end=FinishReason.STOP if place + 3 >= len(text) else None)
                    await asyncio.sleep(0)

        writer = asyncio.ensure_future(write())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door.app)) as http:
            result = await talk(http)
        await writer
        submits = door.core.submits
        shapes = [submit.params.structured_outputs for submit in submits]
        prompts = [bytes(token for token in each.prompt_token_ids if token < 256).decode() for each in submits]
        return result, shapes, prompts

    return at_door(folder, scenario, answers=False, model=MODEL)


def openai_client(http):
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


def test_openai_calls_a_tool_and_continues(folder):
    async def talk(http):
        client, tools = openai_client(http), [openai.pydantic_function_tool(Weather)]
        del tools[0]["function"]["strict"]
        first = await client.chat.completions.create(model="tiny", messages=USER, tools=tools)
        (call,) = first.choices[0].message.tool_calls
        history = [*USER, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        return first, await client.chat.completions.create(model="tiny", messages=history, tools=tools)

    (first, second), _, prompts = with_client(folder, talk, f"<think>hm</think>\n\n{CALL}", "It rains.")
    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.reasoning_content == "hm"
    assert json.loads(first.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 2}
    assert second.choices[0].message.content == "It rains." and "tool\nrain" in prompts[1]
    assert '{"name": "Weather", "arguments": {"city": "Oslo", "days": 2}}' in prompts[1]


def test_openai_parses_strict_tools_and_formats(folder):
    async def talk(http):
        client = openai_client(http)
        tool = await client.chat.completions.parse(
            model="tiny", messages=USER, tools=[openai.pydantic_function_tool(Weather)]
        )
        form = await client.chat.completions.parse(model="tiny", messages=USER, response_format=Weather)
        return tool, form

    (tool, form), shapes, _ = with_client(folder, talk, CALL, '{"city": "Oslo", "days": 3}')
    assert tool.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo", days=2)
    assert form.choices[0].message.parsed == Weather(city="Oslo", days=3)
    assert '"const": "Weather"' in shapes[0].grammar and '"days"' in shapes[1].json


def test_openai_accumulates_a_stream(folder):
    async def talk(http):
        tools = [openai.pydantic_function_tool(Weather)]
        async with openai_client(http).chat.completions.stream(model="tiny", messages=USER, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_completion()

    (kinds, final), _, _ = with_client(folder, talk, f"<think>hm</think>I look.\n{CALL}\n{CALL}")
    message = final.choices[0].message
    assert [call.function.parsed_arguments.days for call in message.tool_calls] == [2, 2]
    assert message.content == "I look." and final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 2


def langchain_model(http):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return langchain.ChatOpenAI(
        model="tiny", base_url="http://localhost/v1", api_key="none", http_async_client=http, max_retries=0
    )


def test_langchain_binds_tools(folder):
    async def talk(http):
        model = langchain_model(http).bind_tools([Weather])
        whole = await model.ainvoke("Weather in Oslo?")
        streamed = None
        async for chunk in model.astream("Weather in Oslo?"):
            streamed = chunk if streamed is None else streamed + chunk
        return whole, streamed

    (whole, streamed), _, _ = with_client(folder, talk, CALL, f"Wait.{CALL}")
    for message in (whole, streamed):
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("Weather", {"city": "Oslo", "days": 2})
    assert streamed.content == "Wait."


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_langchain_has_structured_output(folder, method):
    async def talk(http):
        return await langchain_model(http).with_structured_output(Weather, method=method).ainvoke("Oslo? As JSON.")

    found, (shape,), _ = with_client(folder, talk, '{"city": "Oslo", "days": 2}')
    assert found == Weather(city="Oslo", days=2)
    assert shape.json_object if method == "json_mode" else '"city"' in shape.json
