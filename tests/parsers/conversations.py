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
    ((None, "seed_oss"), "<seed:tool_call><function=write><parameter=tags>['a', None, {'b': True}]</parameter></function></seed:tool_call>", "", "", [("write", '{"tags": ["a", null, {"b": true}]}')]),
    (("seed_oss", "seed_oss"), "<seed:think>hm</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>", "", "hm", [("get_weather", OSLO)]),
    (("qwen3", "lfm2"), "<think>hm</think>I look.<|tool_call_start|>[get_weather(city='Oslo', days=2), now()]<|tool_call_end|> Done.", "I look.Done.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "lfm2"), '<|tool_call_start|>[get_weather(city="Oslo", days=2)]<|tool_call_end|><|tool_call_start|>[now()]<|tool_call_end|>', "", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "lfm2"), "<|tool_call_start|>none<|tool_call_end|>", "<|tool_call_start|>none<|tool_call_end|>", "", []),
    (("olmo3", "olmo3"), "<think>hm</think>I look.\n<function_calls>\nget_weather(city=\"Oslo\", days=2)\nnow()\nwrite(tags=[true, null], value=None)\n</function_calls>", "I look.", "hm", [("get_weather", OSLO), ("now", "{}"), ("write", '{"tags": [true, null], "value": null}')]),
    (("deepseek_v4", "deepseek_v32"), 'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "I look.", "", [("get_weather", OSLO), ("now", "{}")]),
    (("deepseek_v4", "deepseek_v4"), '<think>hm<｜DSML｜tool_calls>\n<｜DSML｜invoke name="other">\n<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">{"c": [1]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "", "hm", [("other", '{"a": "1", "b": {"c": [1]}}')]),
    (("gemma4", "gemma4"), '<|channel>thought\nhm<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>', "I look.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    (("gemma4", "gemma4"), '<|channel>thought\nhm<|tool_call>call:write{tags:[<|"|>a, "b"<|"|>,{k:null,<|"|>l m<|"|>:[true,-1.5]},[]],text:<|"|>x: {1}\n<|"|>,value:<|"|>5<|"|>}<tool_call|>and<|channel>thought\nmore<channel|>so', "andso", "hmmore", [("write", '{"tags": ["a, \\"b\\"", {"k": null, "l m": [true, -1.5]}, []], "text": "x: {1}\\n", "value": "5"}')]),
    ((None, "gemma4"), 'a<|tool_call>call:get_weather{city:Oslo,days:2<tool_call|> <|tool_call>what<tool_call|>', "a<|tool_call>what<tool_call|>", "", [("get_weather", OSLO)]),
    ((None, "functiongemma"), "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:<escape>2<escape>}<end_function_call><start_function_call>call:now{}<end_function_call>", "", "", [("get_weather", OSLO), ("now", "{}")]),
    (("minimax_m2", "minimax_m2"), '<think>\nhm\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', "I look.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    (("minimax_m2_append_think", "minimax_m2"), 'hm</think>Write <invoke name="x"> or <minimax:tool_call>.', '<think>hm</think>Write <invoke name="x"> or <minimax:tool_call>.', "", []),
    (("minimax_m3", None), "<mm:think>hm</mm:think>ok", "ok", "hm", []),
    ((None, "minimax_m2"), '<minimax:tool_call><invoke name="now"></invoke> so <invoke name="now"></invoke></minimax:tool_call>!', "so!", "", [("now", "{}"), ("now", "{}")]),
    ((None, "dots"), 'ok\n<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</dots_function_call>', "ok", "", [("get_weather", OSLO)]),
    (("qwen3", "minicpm5"), '<think>\nhm\n</think>\n\n<function name="write"><param name="text"><![CDATA[a < b\n</param>]]></param><param name="tags">[1]</param></function><function name="now"></function>', "", "hm", [("write", '{"text": "a < b\\n</param>", "tags": [1]}'), ("now", "{}")]),
    (("step3", "step3"), 'hm</think>I look.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather"><steptml:parameter name="city">Oslo</steptml:parameter><steptml:parameter name="days">2</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', "I look.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    (("kimi_k3", "kimi_k3"), '<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>', "I look.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    (("hy_v3", "hy_v3"), "<think:opensource>hm</think:opensource><tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource><arg_value:opensource>2</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource></tool_call:opensource>\n</tool_calls:opensource>", "", "hm", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "longcat"), f'<longcat_tool_call>{{"name": "get_weather", "arguments": {OSLO}}}</longcat_tool_call>', "", "", [("get_weather", OSLO)]),
    (("cohere_command3", "cohere_command3"), f'<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {OSLO}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>', "", "hm", [("get_weather", OSLO), ("now", "{}")]),
    (("cohere_command3", "cohere_command3"), "<|START_THINKING|>hm<|END_THINKING|>\n<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello.", "hm", []),
    (("apertus", "apertus"), f'<|inner_prefix|>hm<|inner_suffix|>I look.<|tools_prefix|>[{{"get_weather": {OSLO}}}, {{"now": {{}}}}]<|tools_suffix|>', "I look.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "xlam"), f'[{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]', "", "", [("get_weather", OSLO), ("now", "{}")]),
    ((None, "xlam"), f'I look.\n```json\n[{{"name": "get_weather", "arguments": {OSLO}}}]\n```\nThen:\n```json\n{{"name": "Bob"}}\n```', 'I look.Then:\n```json\n{"name": "Bob"}\n```', "", [("get_weather", OSLO)]),
    ((None, "gigachat3"), f'ok<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {OSLO}}}', "ok", "", [("get_weather", OSLO)]),
    ((None, "gigachat3"), "ok<|message_sep|>\n\n", "ok", "", []),
    ((None, "gigachat3"), '<|function_call|>{"name": "now", "arguments": {}}', "", "", [("now", "{}")]),
    (("muse_glimmer", "muse_glimmer"), ' to=self<|message|>hm<|eom|><|start|>assistant to=get_weather.get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather.get_weather">\n<atem:parameter name="city">Oslo</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=self<|message|>more<|eom|><|start|>assistant to=user<|message|>Hello.<|eot|>', "Hello.", "hmmore", [("get_weather", OSLO)]),
    (("muse_glimmer", "muse_glimmer"), " to=user<|message|>Hello.", "Hello.", "", []),
    (("inkling", "inkling"), '<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>I look.<|end_message|><|message_model|>get_weather<|content_invoke_tool_json|>{"name":"get_weather","args":{"city": "Oslo", "days": 2}}<|end_message|><|message_model|><|content_invoke_tool_json|>{"name":"now","args":{}}<|content_model_end_sampling|>', "I look.", "hm", [("get_weather", OSLO), ("now", "{}")]),
    (("ernie45", "ernie45"), "<think>\nhm\n</think>\n\n<response>\nHello.\n</response>\n", "Hello.", "hm", []),
    (("hunyuan_a13b", "hunyuan_a13b"), "<think>\nhm\n</think>\n<answer>\nHello.\n</answer>", "Hello.", "hm", []),
    (("hunyuan_a13b", "hunyuan_a13b"), f'<think>\nhm\n</think>\n<tool_calls>[{{"name": "get_weather", "arguments": {OSLO}}}]</tool_calls>', "", "hm", [("get_weather", OSLO)]),
    (("qwen3", "qwen3_coder"), "<think>hm <tool_call> hm\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "", "hm <tool_call> hm", [("now", "{}")]),
    (("glm45", "glm45"), "<think>hm<tool_call>now</tool_call>", "", "hm", [("now", "{}")]),
    (("qwen3", None), "<think>\n\n</think>\n\nHi <b>", "Hi <b>", "", []),
    (("qwen3", None), " no thought", " no thought", "", []),
    (("deepseek_r1", None), "all of it", "", "all of it", []),
]  # fmt: skip
