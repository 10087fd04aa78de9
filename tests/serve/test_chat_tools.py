"""Tools and reasoning of the chat route, over a scripted core that writes what the test chooses."""

from __future__ import annotations

import asyncio
import json

import pytest

from serve.asgi import at_door
from slipstream.contracts.request import FinishReason
from text.chat_templates import THINKING

USER = [{"role": "user", "content": "Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Rain?", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = (
    '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
MODEL = {"chat_template": THINKING, "max_model_len": 4096}


def ask(folder, text, *, end=FinishReason.STOP, model=MODEL, settings=None, **body):
    """The answer to a request when the model writes `text`, a byte per token; with `stream`, its choices joined."""

    async def scenario(door):
        exchange = door.begin("POST", "/v1/chat/completions", {"messages": USER, **body})
        waiting = asyncio.ensure_future(door.core.until(lambda: door.core.submits))
        await asyncio.wait([exchange.task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if door.core.submits:
            submit = door.core.submits[0]
            ids = text.encode()
            for sample in range(submit.params.n):
                for place, token in enumerate(ids):
                    last = place == len(ids) - 1
                    door.core.token(submit, token, end=end if last else None, sample=sample)
                    await asyncio.sleep(0)
            exchange.submit = submit
            exchange.prompt = bytes(token for token in submit.prompt_token_ids if token < 256).decode()
        await exchange.end()
        if body.get("stream") and exchange.status == 200:
            exchange.message, exchange.reason = joined(exchange.events())
        elif exchange.status == 200:
            choice = exchange.json()["choices"][0]
            exchange.message, exchange.reason = choice["message"], choice["finish_reason"]
        return exchange

    return at_door(folder, scenario, answers=False, model=model, **(settings or {}))


def joined(events):
    message, reason = {}, None
    for event in events:
        (choice,) = event["choices"]
        reason = choice["finish_reason"] or reason
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            calls = message.setdefault("tool_calls", [])
            for delta in value:
                if delta["index"] == len(calls):
                    calls.append({"id": delta["id"], "type": delta["type"], "function": {"name": "", "arguments": ""}})
                for key, text in delta["function"].items():
                    calls[delta["index"]]["function"][key] += text
    return message, reason


ALLOWED = {"type": "allowed_tools",
           "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_reasoning_are_apart_from_the_content(folder, stream):
    answer = ask(folder, CALLS, tools=[WEATHER, NOW], stream=stream)
    message = answer.message
    assert answer.reason == "tool_calls" and message["content"] == "I look." and message["role"] == "assistant"
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    functions = [(call["type"], call["function"]) for call in message["tool_calls"]]
    assert functions == [
        ("function", {"name": "weather", "arguments": '{"city": "Oslo"}'}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
    assert json.dumps(WEATHER) in answer.prompt


def test_arguments_are_streamed_before_they_end(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/v1/chat/completions", {"messages": USER, "tools": [WEATHER], "stream": True})
        await door.core.until(lambda: door.core.submits)
        (submit,) = door.core.submits
        place = CALLS.index('lo"')
        door.core.token(submit, *CALLS[:place].encode())
        await exchange.until(b"Os")
        door.core.token(submit, *CALLS[place:].encode(), end=FinishReason.STOP)
        return joined((await exchange.end()).events())

    message, reason = at_door(folder, scenario, answers=False, model=MODEL)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}' and reason == "tool_calls"


def test_content_is_null_beside_calls_and_absent_fields_are_absent(folder):
    message = ask(folder, CALLS[CALLS.index("<tool") :], tools=[WEATHER]).message
    assert message["content"] is None and "reasoning" not in message
    plain = ask(folder, "Hi.", tools=[WEATHER])
    assert plain.message == {"role": "assistant", "content": "Hi."} and plain.reason == "stop"


def test_a_call_that_is_cut_keeps_the_reason(folder):
    answer = ask(folder, CALLS[:-40], tools=[WEATHER, NOW], end=FinishReason.LENGTH)
    assert answer.reason == "length" and len(answer.message["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most(folder, stream):
    calls = ask(folder, CALLS, tools=[WEATHER, NOW], parallel_tool_calls=False, stream=stream).message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather"]


def test_no_tools_are_shown_and_no_calls_are_read_with_none(folder):
    answer = ask(folder, CALLS, tools=[WEATHER], tool_choice="none")
    assert "tool_calls" not in answer.message and "<tool_call>" in answer.message["content"]
    assert "weather" not in answer.prompt and answer.reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_required_is_a_grammar_of_a_list(folder, stream):
    text = '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]'
    answer = ask(folder, text, tools=[WEATHER, NOW], tool_choice="required", stream=stream)
    functions = [call["function"] for call in answer.message["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"city": "Oslo"}'}, {"name": "now", "arguments": "{}"}]
    assert answer.reason == "tool_calls" and not answer.message["content"]
    shape = answer.submit.params.structured_outputs
    schema = json.loads(shape.json)
    assert schema["minItems"] == 1 and schema["$defs"]["tool0"] == SCHEMA and "maxItems" not in schema


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_a_grammar_of_its_arguments(folder, stream):
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = ask(folder, '{"city": "Oslo"}', tools=[WEATHER, NOW], tool_choice=choice, stream=stream)
    assert [call["function"] for call in answer.message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Oslo"}'}
    ]
    assert answer.reason == "stop"
    assert json.loads(answer.submit.params.structured_outputs.json) == SCHEMA


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones(folder, mode):
    some = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    text = CALLS if mode == "auto" else '[{"name": "now", "parameters": {}}]'
    answer = ask(folder, text, tools=[WEATHER, NOW], tool_choice={"type": "allowed_tools", "allowed_tools": some})
    same = ask(folder, text, tools=[NOW], tool_choice=mode)
    assert "weather" not in answer.prompt and "now" in answer.prompt and answer.prompt == same.prompt
    assert answer.submit.params == same.submit.params and answer.reason == "tool_calls"


def test_references_inside_parameters_keep_their_target(folder):
    inner = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": inner}}
    answer = ask(folder, "[", tools=[NOW, tool], tool_choice="required", parallel_tool_calls=False)
    schema = json.loads(answer.submit.params.structured_outputs.json)
    assert schema["$defs"]["tool1"]["properties"]["a"] == {"$ref": "#/$defs/tool1/$defs/A"} and schema["maxItems"] == 1


def test_tools_are_described_where_the_template_has_none(folder):
    answer = ask(folder, CALLS, tools=[WEATHER, NOW], model={"max_model_len": 4096})
    assert json.dumps(WEATHER["function"]) in answer.prompt and answer.prompt.startswith("system\n")
    assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["weather", "now"]
    assert "<think>" in answer.message["content"]  # the template has no reasoning


def test_a_history_with_calls_is_rendered(folder):
    first = ask(folder, CALLS, tools=[WEATHER, NOW]).message
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in first["tool_calls"]]
    answer = ask(folder, "It rains.", messages=[*USER, first, *results], tools=[WEATHER, NOW])
    assert answer.status == 200, answer.body
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in answer.prompt
    assert answer.prompt.count("tool\nrain") == 2


def test_reasoning_can_be_left_out_or_not_read(folder):
    message = ask(folder, CALLS, include_reasoning=False).message
    assert "reasoning" not in message and message["content"].startswith("I look.")
    plain = ask(folder, CALLS, settings={"reasoning_parser": "none"}).message
    assert plain["content"] == CALLS


def test_reasoning_that_the_prompt_began_needs_no_marker(folder):
    model = {**MODEL, "chat_template": THINKING + "{{ '<think>\n' }}"}
    message = ask(folder, "hm\n</think>\n\nYes.", model=model).message
    assert (message["reasoning"], message["content"]) == ("hm", "Yes.")
    assert ask(folder, "Yes.", chat_template_kwargs={"enable_thinking": False}).message["content"] == "Yes."
    assert "</think>" in ask(folder, "Yes.", enable_thinking=False).prompt
    assert "</think>" in ask(folder, "Yes.", reasoning_effort="none").prompt


def test_parsers_can_be_chosen(folder):
    text = '[TOOL_CALLS]weather{"city": "Oslo"}'
    answer = ask(folder, text, tools=[WEATHER], settings={"tool_call_parser": "mistral"})
    (call,) = answer.message["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Oslo"}' and len(call["id"]) == 9 and call["id"].isalnum()


def test_samples_have_calls_of_their_own(folder):
    choices = ask(folder, CALLS, tools=[WEATHER, NOW], n=2).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 4


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [5]}, "tools[0]", "is 5; give an object of type function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search', which is not supported"),
        ({"tools": [{**NOW, "x": 1}]}, "tools[0].x", "no field"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "y": 1}}]}, "tools[0].function.y", "no field"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "twice"),
        ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice", "maybe"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "now"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is missing"),
        ({"tools": [NOW], "tool_choice": ALLOWED | {"mode": "auto"}}, "tool_choice.mode", "no field"),
        ({"tools": [WEATHER], "tool_choice": ALLOWED}, "tool_choice", "'now', and tools has weather"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "needs tools"),
        (
            {"tools": [NOW], "tool_choice": "required", "structured_outputs": {"json_object": True}},
            "tool_choice",
            "remove one",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort", "use enable_thinking"),
        ({"reasoning_effort": "very"}, "reasoning_effort", "minimal"),
    ],
)
def test_what_is_wrong_is_named(folder, body, param, words):
    answer = ask(folder, "x", **body)
    assert answer.status == 400 and answer.json()["error"]["param"] == param and words in answer.error, answer.body


def test_a_structured_answer_may_follow_reasoning(folder):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = ask(folder, '<think>hm</think>{"city": "Oslo"}', response_format=form)
    assert (answer.message["reasoning"], answer.message["content"]) == ("hm", '{"city": "Oslo"}')
    shape = answer.submit.params.structured_outputs
    assert json.loads(shape.json) == SCHEMA and '"</think>"' in shape.prefix
    closed = ask(folder, "{}", response_format=form, enable_thinking=False)
    assert closed.submit.params.structured_outputs.prefix is None
    text = '<think>hm</think>[{"name": "now", "parameters": {}}]'
    answer = ask(folder, text, tools=[NOW], tool_choice="required")
    assert answer.message["reasoning"] == "hm" and answer.message["tool_calls"][0]["function"]["name"] == "now"
    assert answer.submit.params.structured_outputs.prefix == shape.prefix


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


ALL_OF = {"type": "object", "properties": {"x": {"allOf": [{"type": "integer"}, {"minimum": 1}]}}}
WHOLE = {"type": "function", "function": {"name": "whole", "parameters": ALL_OF, "strict": True}}


def test_a_shape_of_the_content_leaves_calls_alone(folder):
    """As in OpenAI's API, which agents rely on: an answer calls a tool, or has content in the shape."""
    answer = ask(folder, CALLS, tools=[WEATHER, NOW], response_format=FORM)
    shape = answer.submit.params.structured_outputs
    assert json.loads(shape.json) == SCHEMA and '"now"' in shape.alternative and '"</think>"' in shape.alternative
    assert len(answer.message["tool_calls"]) == 2
    answer = ask(folder, "{}", tools=[WEATHER], response_format=FORM, tool_choice="none")
    assert answer.submit.params.structured_outputs.alternative is None
    answer = ask(folder, "{}", tools=[WEATHER], structured_outputs={"json": SCHEMA})  # of the output, as in vLLM
    assert answer.submit.params.structured_outputs.alternative is None
    answer = ask(folder, "x", tools=[WHOLE], response_format=FORM, settings={"tool_call_parser": "gemma4"})
    assert answer.status == 400 and "tool_choice to none" in answer.error, answer.body


def test_a_demanded_call_has_no_content_and_so_no_shape_of_it(folder):
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        wanted = ask(folder, "{}", tools=[NOW], tool_choice=choice).submit.params.structured_outputs
        answer = ask(folder, "{}", tools=[NOW], tool_choice=choice, response_format=FORM)
        assert answer.submit.params.structured_outputs == wanted


def test_strict_functions_have_a_grammar_while_the_model_decides(folder):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = ask(folder, CALLS, tools=[strict, NOW])
    shape = answer.submit.params.structured_outputs
    assert json.dumps(SCHEMA["properties"]) in shape.grammar and '"now"' in shape.grammar and shape.prefix is not None
    assert len(answer.message["tool_calls"]) == 2
    answer = ask(folder, "x", tools=[NOW, WHOLE], settings={"tool_call_parser": "gemma4"})
    assert answer.status == 400 and answer.json()["error"]["param"] == "tools[1].function.strict"
    assert "allOf" in answer.error
    assert ask(folder, "x", tools=[WEATHER]).submit.params.structured_outputs is None


def test_a_deep_schema_is_refused(folder):
    deep = {"type": "object"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    answer = ask(folder, "x", tools=[tool])
    assert answer.status == 400 and "64 levels" in answer.error
    assert answer.json()["error"]["param"] == "tools[0].function.parameters"


@pytest.mark.parametrize("strict", [False, True])
def test_tools_that_are_too_large_together_are_refused_by_name(folder, strict):
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"const": "x" * 100_000}, "strict": strict}}
        for i in range(3)
    ]
    answer = ask(folder, "x", tools=tools, **({} if strict else {"tool_choice": "required"}))
    assert answer.status == 400 and answer.error.startswith("tools: ") and answer.json()["error"]["param"] == "tools"


def test_auto_can_be_disabled(folder):
    answer = ask(folder, "x", tools=[NOW], settings={"enable_auto_tool_choice": False})
    assert answer.status == 400 and answer.json()["error"]["param"] == "tool_choice"
    answer = ask(folder, "[", tools=[NOW], tool_choice="required", settings={"enable_auto_tool_choice": False})
    assert answer.status == 200
    answer = ask(folder, "x", tools=[NOW], settings={"tool_call_parser": "none"})
    assert answer.status == 400 and "--tool-call-parser" in answer.error
