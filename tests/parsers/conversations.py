"""Outputs in the format of each family, and what they mean: content, reasoning, and calls as (name, arguments)."""

# ruff: noqa: E501 (one example per line)

from __future__ import annotations

from typing import NamedTuple

from slipstream.parsers.families import REASONING_FORMATS, TOOL_CALL_FORMATS
from slipstream.parsers.output_parser import Functions, OutputParser
from slipstream.parsers.reader import ArgumentsDelta, ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart

FUNCTIONS = Functions(
    {
        "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        "now": {},
        "write": {
            "properties": {
                "text": {"type": "string"},
                "tags": {"type": ["array", "null"]},
                "value": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            }
        },
    }
)


class Parsed(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    ids: list[str | None]


def join(events: list[ParserEvent]) -> Parsed:
    content, reasoning, calls, ids = "", "", [], []
    for event in events:
        match event:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case ToolCallStart(index, name, id):
                assert index == len(calls)
                calls.append((name, ""))
                ids.append(id)
            case ArgumentsDelta(index, text):
                assert index == len(calls) - 1, "arguments of an earlier call"
                calls[index] = (calls[index][0], calls[index][1] + text)
    return Parsed(content, reasoning, calls, ids)


def parse(family: tuple[str | None, str | None], *pieces: str, is_open: bool = False) -> Parsed:
    """`family`: the names of the reasoning format and of the tool call format."""
    reasoning, tools = family
    parser = OutputParser(
        None if reasoning is None else REASONING_FORMATS[reasoning],
        None if tools is None else TOOL_CALL_FORMATS[tools],
        functions=FUNCTIONS,
        is_open=is_open,
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join([*events, *parser.finish()])


OSLO = '{"city": "Oslo", "days": 2}'
# family, output, content, reasoning, calls
EXAMPLES: list[tuple[tuple[str | None, str | None], str, str, str, list[tuple[str, str]]]] = [
    (("qwen3", "hermes"), f'<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>', "I look.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "hermes"), f'<tool_call>{{"arguments": {OSLO}, "name": "get_weather"}}</tool_call> done', "done", "", [("get_weather", OSLO)]),
    ((None, "hermes"), '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", "{}")]),
    ((None, "hermes"), '<tool_call>{"name": "write", "arguments": {"text": "</tool_call> \\" }"}}</tool_call>', "", "", [("write", '{"text": "</tool_call> \\" }"}')]),
    ((None, "hermes"), 'see <tool_call>\nnot JSON\n</tool_call>!', "see <tool_call>\nnot JSON\n</tool_call>!", "", []),
    ((None, "hermes"), '<tool_call>{"name": "now", "arguments": {"a": [}}</tool_call>ok', "ok", "", [("now", '{"a": [}}')]),
    ((None, "hermes"), '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("now", '{"a": 1}')]),
    ((None, "hermes"), '<tool_call>{"name": "now", "argu', '<tool_call>{"name": "now", "argu', "", []),
    ((None, "hermes"), 'a < b\n', "a < b\n", "", []),
    (("qwen3", "qwen3_coder"), "<tool_call>\n<function=write>\n<parameter=text>\nline 1\n\"2\"\n\n</parameter>\n<parameter=tags>\n[1, 2]\n</parameter>\n<parameter=value>\n5\n</parameter>\n</function>\n</tool_call>", "", "", [("write", '{"text": "line 1\\n\\"2\\"\\n", "tags": [1, 2], "value": 5}')]),
    ((None, "qwen3_coder"), "ok <function=now>\n</function>\n</tool_call>", "ok", "", [("now", "{}")]),
    ((None, "qwen3_coder"), "<tool_call>\n<function=write>\n<parameter=value>\n5 apples\n</parameter>\n<parameter=tags>\nNone\n<parameter=other>\ntrue\n</parameter></function></tool_call>", "", "", [("write", '{"value": "5 apples", "tags": null, "other": true}')]),
    ((None, "llama3_json"), f'{{"name": "get_weather", "parameters": {OSLO}}}; {{"name": "now", "parameters": {{}}}}', "", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "llama3_json"), f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {OSLO}}}', "", "", [("get_weather", OSLO)]),
    ((None, "llama3_json"), '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', "", []),
    ((None, "llama3_json"), '{"name": "now"}', '{"name": "now"}', "", []),
    ((None, "pythonic"), "[get_weather(city='Oslo', days=2), now()]", "", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "pythonic"), "[write(text='a, b) \\'c\\'', tags=[1, {'k': (2, None)}], value=-1.5)]", "", "", [("write", '{"text": "a, b) \'c\'", "tags": [1, {"k": [2, null]}], "value": -1.5}')]),
    ((None, "pythonic"), "[unknown(a=1)] and [1]", "[unknown(a=1)] and [1]", "", []),
    ((None, "pythonic"), "[now(), 5]", ", 5]", "", [("now", "{}")]),
    ((None, "llama4_pythonic"), "<|python_start|>[now()]<|python_end|>", "", "", [("now", "{}")]),
    (("mistral", "mistral"), f'[THINK]hm[/THINK][TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}, "id": "123456789"}}, {{"name": "now", "arguments": {{}}}}]', "", "hm", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "mistral"), f"Sure.[TOOL_CALLS]get_weather{OSLO}[TOOL_CALLS]now[ARGS]{{}}", "Sure.", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "mistral"), "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}", "", "", [("now", "{}")]),
    ((None, "mistral"), "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", "", []),
    (("deepseek_r1", "deepseek_v3"), f"hm</think>x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{OSLO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "x", "hm", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "deepseek_v31"), f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "deepseek_v31"), "<｜tool▁calls▁begin｜>what", "<｜tool▁calls▁begin｜>what", "", []),
    (("kimi_k2", "kimi_k2"), f"<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_calls_section_end|>", "", "hm", [("get_weather", OSLO)]),
    (("glm45", "glm45"), "<think>hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", "", "hm", [("get_weather", OSLO)]),
    ((None, "glm45"), "<tool_call>now</tool_call>a", "a", "", [("now", "{}")]),
    ((None, "glm45"), "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>", "", "", [("get_weather", OSLO)]),
    (("openai_gptoss", "openai"), f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{OSLO}<|call|>", "", "hm", [("get_weather", OSLO)]),
    (("openai_gptoss", "openai"), "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>", "Hello.", "hm", []),
    (("openai_gptoss", None), " to=functions.now<|channel|>commentary json<|message|>{}", "", "", [("now", "{}")]),
    (("openai_gptoss", "openai"), "no header", "no header", "", []),
    (("granite", "granite"), f'Here is my thought process: hm Here is my response: <|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}]', "", "hm", [("get_weather", OSLO)]),
    ((None, "granite"), f'<tool_call>[{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]', "", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "phi4_mini_json"), f'functools[{{"name": "get_weather", "arguments": {OSLO}}}]', "", "", [("get_weather", OSLO)]),
    ((None, "jamba"), f'<tool_calls>[\n{{"name": "get_weather", "arguments": {OSLO}}},\n{{"name": "now", "arguments": {{}}}}\n]</tool_calls>', "", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "minimax"), f'ok\n<tool_calls>\n{{"name": "get_weather", "arguments": {OSLO}}}\n{{"name": "now", "arguments": {{}}}}\n</tool_calls>', "ok", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "internlm"), f'ok<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {OSLO}}}<|action_end|>', "ok", "", [("get_weather", OSLO)]),
    ((None, "granite-20b-fc"), f'<function_call> {{"name": "get_weather", "arguments": {OSLO}}}', "", "", [("get_weather", OSLO)]),
    (("seed_oss", "seed_oss"), "<seed:think>hm</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>", "", "hm", [("get_weather", OSLO)]),
    (("qwen3", None), "<think>\n\n</think>\n\nHi <b>", "Hi <b>", "", []),
    (("qwen3", None), " no thought", " no thought", "", []),
    (("deepseek_r1", None), "all of it", "", "all of it", []),
]  # fmt: skip
