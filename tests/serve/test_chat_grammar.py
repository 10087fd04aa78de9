"""Grammars of reasoning and demanded calls, by what llguidance accepts over a byte tokenizer."""

from __future__ import annotations

import json

import pytest

from parsers.rendering import reasoning_of, rendered, rendered_calls
from slipstream.params.structured import StructuredOutputsParams
from slipstream.parsers.families import TOOL_CALL_FORMATS, reasoning_format, tool_call_format
from slipstream.parsers.literals import PythonicFormat
from slipstream.parsers.output_parser import ReasoningFormat
from slipstream.scheduler.grammar.native_matcher import grammar_vocabulary
from slipstream.scheduler.grammar.translate import translate
from slipstream.serve.http.generation.call_grammars import calls_grammar, harmony_calls
from slipstream.serve.http.generation.strict import _calls_alone, reasoning_prefix
from slipstream.serve.http.generation.tools import ChatFormats, Tools
from slipstream.text.tokenizer import Tokenizer

llguidance = pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(str(folder))


@pytest.fixture(scope="module")
def accepts(tokenizer):
    """Whether a text is a whole output; special tokens in it count as such."""
    vocabulary = grammar_vocabulary(tokenizer, tokenizer.vocab_size)
    special = {tokenizer.piece(token): token for token in tokenizer.special_ids}

    def check(params: StructuredOutputsParams, text: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, translate(params, special), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


SHAPES = [
    ({"json": CITY}, '{"city": "Oslo"}', '{"town": 1}'),
    ({"json": {}, "disable_any_whitespace": True}, "[1,2]", "[1, 2]"),
    ({"json_object": True}, "{}", "[]"),
    ({"regex": r"a+/[}\n]\d"}, "aa/}5", "aa/x5"),
    ({"choice": ["yes", "}no"]}, "}no", "maybe"),
    ({"grammar": 'start: "{" x\nx: /[}"]/'}, '{"', "{"),
    ({"structural_tag": {"structures": [{"begin": "<f>", "schema": {"const": 5}, "end": "</f>"}], "triggers": ["<f>"]}},
     "a<f>5</f>", "a<f>6</f>"),
    ({"structural_tag": {"format": {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}}},
     "<f>a</f>", "<f>a"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "good", "bad"), SHAPES, ids=lambda value: str(value)[:20])
def test_every_shape_may_follow_reasoning(tokenizer, accepts, fields, good, bad):
    think = reasoning_format("qwen3")
    optional = reasoning_prefix(think, tokenizer, "assistant\n", continues=False)
    params = StructuredOutputsParams(**fields, prefix=optional)
    assert accepts(params, good) and accepts(params, f"<think>\nhm {{\n</think>\n\n{good}")
    assert not accepts(params, bad) and not accepts(params, f"<think>hm</think>{bad}")
    opened = StructuredOutputsParams(
        **fields, prefix=reasoning_prefix(think, tokenizer, "assistant\n<think>\n", continues=False)
    )
    assert accepts(opened, f"hm</think>{good}") and not accepts(opened, f"hm</think>{bad}")
    assert not accepts(opened, good)


def test_there_is_no_reasoning_where_the_prompt_has_ended_it(tokenizer):
    assert reasoning_prefix(reasoning_format("qwen3"), tokenizer, "<think>\n\n</think>\n\n", continues=False) is None
    assert reasoning_prefix(None, tokenizer, "", continues=False) is None


def test_markers_that_are_special_tokens_are_tokens(tokenizer, accepts):
    prefix = reasoning_prefix(ReasoningFormat(("<|im_start|>",), ("<|im_end|>",)), tokenizer, "", continues=False)
    params = StructuredOutputsParams(choice=["yes"], prefix=prefix)
    assert accepts(params, "<|im_start|>hm<|im_end|>\nyes") and accepts(params, "yes")
    assert not accepts(params, "<|im_start|>yes")


def test_messages_of_gpt_oss(tokenizer, accepts):
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = reasoning_prefix(reasoning_format("openai_gptoss"), tokenizer, "", continues=False)
    params = StructuredOutputsParams(json=CITY, prefix=final)
    answer = '<|channel|>final<|message|>{"city": "Oslo"}'
    assert accepts(params, answer) and accepts(params, analysis + answer) and accepts(params, analysis * 2 + answer)
    assert not accepts(params, '{"city": "Oslo"}')
    calls = StructuredOutputsParams(grammar=harmony_calls(tokenizer, {"weather": CITY, "now": {"type": "object"}}))
    header = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>"
    assert accepts(calls, analysis + header % "weather" + json.dumps({"city": "Oslo"}))
    assert accepts(calls, header % "now" + "{}")
    assert not accepts(calls, header % "weather" + "{}") and not accepts(calls, header % "other" + "{}")


INNER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/Days"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer"}},
}
STRICT = {"weather": INNER, "now": {"type": "object"}}
GOOD = '{"city": "Oslo", "days": 2, "unit": "C"}'
BAD = '{"city": "Oslo", "unit": "K"}'
# a text with a call, its arguments as %s
CALLS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "now", "arguments": {"x": 1}}, {"name": "weather", "arguments": %s}]',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": %s}]',
    "mistral": 'x[TOOL_CALLS] [{"name": "weather", "arguments": %s}]',
    "deepseek_v3": "x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
}


@pytest.mark.parametrize("name", CALLS)
def test_strict_arguments_match_their_schema(tokenizer, accepts, name):
    params = StructuredOutputsParams(grammar=calls_grammar(tool_call_format(name), tokenizer, STRICT))
    assert accepts(params, CALLS[name] % GOOD) and not accepts(params, CALLS[name] % BAD)
    assert accepts(params, "just text {") and not accepts(params, (CALLS[name] % GOOD).replace("weather", "other"))
    assert accepts(params, CALLS[name] % GOOD + " and more")


DAYS = {"type": "integer", "oneOf": [{"const": 1}, {"const": 2}]}
ONE_OF = {"type": "object", "properties": {"days": DAYS}, "required": ["days"]}


@pytest.mark.parametrize("name", [*CALLS, "llama3_json", "qwen3_coder", "openai"])
def test_arguments_are_json_as_elsewhere(tokenizer, accepts, name):
    """Whitespace is bounded, and oneOf is read as anyOf."""
    calls = {
        "llama3_json": '{"name": "weather", "parameters": %s}',
        "openai": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s",
        "qwen3_coder": "<tool_call><function=weather><parameter=days>\n%s\n</parameter></function></tool_call>",
    }
    grammar = calls_grammar(tool_call_format(name), tokenizer, {"weather": ONE_OF, "now": {"type": "object"}})
    params, call = StructuredOutputsParams(grammar=grammar), calls.get(name) or CALLS[name]
    if name == "qwen3_coder":
        assert accepts(params, call % 2) and not accepts(params, call % 3)
        return
    good = '{"days": 2}'
    assert accepts(params, call % good) and not accepts(params, call % good.replace("2", "3"))
    assert not accepts(params, call % good.replace(" ", " " * 65)) and accepts(
        params, call % good.replace(" ", " " * 64)
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "qwen3_coder",
            "ok\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n%s\n</parameter>\n"
            "<parameter=unit>\n%s\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>%s</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        ),
    ],
)
def test_strict_values_in_tags_match_their_schema(tokenizer, accepts, name, call):
    params = StructuredOutputsParams(grammar=calls_grammar(tool_call_format(name), tokenizer, STRICT))
    assert accepts(params, call % (2, "C")) and accepts(params, "just text <")
    assert not accepts(params, call % (2, "K")) and not accepts(params, call % ("two", "C"))
    without = call.replace("<parameter=days>\n%s\n</parameter>\n", "")
    without = without.replace("<arg_key>days</arg_key>\n<arg_value>%s</arg_value>\n", "")
    assert accepts(params, without % "F")


def test_strict_calls_without_a_marker(tokenizer, accepts):
    params = StructuredOutputsParams(grammar=calls_grammar(tool_call_format("llama3_json"), tokenizer, STRICT))
    call = '{"name": "weather", "parameters": %s}'
    for begin in ("", "\n", "<|python_tag|>", call % GOOD + "; "):
        assert accepts(params, begin + call % GOOD) and not accepts(params, begin + call % BAD)
    assert accepts(params, "It rains. {}") and not accepts(params, "{}")
    params = StructuredOutputsParams(grammar=calls_grammar(tool_call_format("pythonic"), tokenizer, STRICT))
    assert accepts(params, "It rains [1].") and not accepts(params, "[weather(")


# values whose schemas have references, alternatives, lists and objects
NESTED = {
    "type": "object",
    "properties": {
        "at": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}},
               "required": ["lat"], "additionalProperties": False},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}, "minItems": 1, "maxItems": 2},
        "mode": {"anyOf": [{"enum": ["fast", 1]}, {"type": "null"}]},
    },
    "required": ["parts"],
    "additionalProperties": False,
    "$defs": {"Part": {"type": ["boolean", "integer"]}},
}  # fmt: skip
SCHEMAS = {"weather": INNER, "nested": NESTED, "now": {"type": "object"}}
SUNNY = {"city": "Oslo < x", "days": 2, "unit": "C"}
MANY = {"at": {"lat": 1.5, "name": "here"}, "parts": [1, True], "mode": "fast"}
KEPT = [{"city": "Oslo", "unit": "F"}, SUNNY], [{"parts": [False]}, {"parts": [2], "mode": None}, MANY]
BROKEN = [
    ("weather", {"unit": "C"}),
    ("weather", {**SUNNY, "unit": "K"}),
    ("weather", {**SUNNY, "days": "two"}),
    ("nested", {**MANY, "parts": []}),
    ("nested", {**MANY, "parts": [1, 2, 3]}),
    ("nested", {**MANY, "mode": "slow"}),
    ("nested", {**MANY, "at": {"name": "here"}}),
    ("other", {}),
]


@pytest.mark.parametrize("tools", TOOL_CALL_FORMATS)
def test_every_format_has_a_grammar_of_strict_calls(tokenizer, accepts, tools):
    """With special tokens where the format has them: those of all markers that look like some."""
    format, reasoning = tool_call_format(tools), reasoning_format(reasoning_of(tools))
    params = StructuredOutputsParams(grammar=calls_grammar(format, tokenizer, SCHEMAS, reasoning=reasoning))
    alone = StructuredOutputsParams(grammar=calls_grammar(format, tokenizer, SCHEMAS, alone=True))
    good = [*(("weather", arguments) for arguments in KEPT[0]), *(("nested", arguments) for arguments in KEPT[1])]
    for call in [*good, ("now", {}), ("now", {"x": 1, "y": "a"})]:
        text = written(tools, call)
        assert accepts(params, text), text
        assert accepts(alone, text), text
    for call in BROKEN:
        assert not accepts(params, written(tools, call)), call
    assert accepts(params, "just text") != (tools == "openai")  # which has no text without a header


def written(tools, call):
    """A call without what comes before it in a message; with JSON's words, which a grammar of Python calls has."""
    text = rendered_calls(tool_call_format(tools), [call])
    if isinstance(tool_call_format(tools), PythonicFormat):
        for word, json_word in (("True", "true"), ("False", "false"), ("None", "null"), ("'", '"')):
            text = text.replace(word, json_word)
    return text.removeprefix("<|start|>assistant")


@pytest.mark.parametrize("tools", ["gemma4", "cohere_command3", "kimi_k3", "inkling", "muse_glimmer", "deepseek_v32"])
def test_markers_within_the_content_are_tokens_of_the_grammar(folder, tools):
    plain = Tokenizer.load(str(folder))
    plain.backend.add_special_tokens(MARKED)
    tokenizer = Tokenizer(plain.backend)
    format, reasoning = tool_call_format(tools), reasoning_format(reasoning_of(tools))
    grammar = calls_grammar(format, tokenizer, SCHEMAS, reasoning=reasoning)
    vocabulary = grammar_vocabulary(tokenizer, tokenizer.vocab_size)
    for call, accepted in ((("weather", SUNNY), True), (("weather", {**SUNNY, "unit": "K"}), False)):
        matcher = llguidance.LLMatcher(vocabulary, translate(StructuredOutputsParams(grammar=grammar), {}), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(rendered(tools, "", "I look.", [call]), add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == accepted


MARKED = [
    "<|tool_call>",
    "<tool_call|>",
    "<|channel>",
    "<channel|>",
    '<|"|>',
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|message_model|>",
    "<|start|>",
    "<|message|>",
    "<|content_invoke_tool_json|>",
    "<|eom|>",
    "<|eot|>",
]


FUNCTIONS = ({"name": "weather", "parameters": INNER, "strict": True}, {"name": "now", "parameters": STRICT["now"]})
ALONE = {
    **{name: text.removeprefix("I look.\n").removeprefix("x") for name, text in CALLS.items()},
    "llama3_json": '{"name": "weather", "parameters": %s}',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>C</arg_value>\n</tool_call>",
    "openai": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s",
}


@pytest.mark.parametrize("name", ALONE)
def test_calls_take_the_place_of_a_shape(tokenizer, accepts, name):
    is_harmony = name == "openai"
    format = reasoning_format("openai_gptoss" if is_harmony else "qwen3")
    prefix = reasoning_prefix(format, tokenizer, "assistant\n", continues=False)
    tools = Tools.of(FUNCTIONS)
    formats = ChatFormats(format, tool_call_format(name))
    calls = _calls_alone(tools, formats, tokenizer, prefix, "response_format")
    params = StructuredOutputsParams(json=CITY, prefix=prefix, alternative=calls)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if is_harmony else "<think>hm</think>\n\n"
    answer = ("<|channel|>final<|message|>" if is_harmony else "") + '{"city": "Oslo"}'
    call = ALONE[name] % GOOD if "%s" in ALONE[name] else ALONE[name]
    for before in ("", thought):
        assert accepts(params, before + answer) and accepts(params, before + call)
        assert not accepts(params, before + call.replace("weather", "other"))
        assert not accepts(params, before + answer + call) and not accepts(params, before + call + answer)
        assert not accepts(params, before + answer.replace("city", "town")) and not accepts(params, before + "text")


def test_calls_take_the_place_of_a_shape_without_reasoning(tokenizer, accepts):
    tools = Tools.of([{"name": "now"}])
    calls = _calls_alone(tools, ChatFormats(None, tool_call_format("hermes")), tokenizer, None, "response_format")
    params = StructuredOutputsParams(json_object=True, alternative=calls)
    call = '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'  # not strict: any object
    assert accepts(params, call) and accepts(params, f"{call}\n{call}") and accepts(params, "{}")
    assert not accepts(params, "[]") and not accepts(params, "")


def test_strict_messages_of_gpt_oss(tokenizer, accepts):
    params = StructuredOutputsParams(grammar=calls_grammar(tool_call_format("openai"), tokenizer, STRICT))
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    assert accepts(params, thought + call + GOOD) and not accepts(params, thought + call + BAD)
    assert accepts(params, thought + "<|channel|>final<|message|>Hello.") and accepts(params, call + GOOD)
