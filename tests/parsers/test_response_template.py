"""Formats by response templates, beside what transformers reads with them."""

from __future__ import annotations

import json

import pytest

from parsers.conversations import join
from parsers.rendering import rendered
from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.families import REASONING_FORMATS, TOOL_CALL_FORMATS, checkpoint_formats
from slipstream.parsers.output_parser import Functions, OutputParser, ReasoningFormat

THINK = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"close": "<|im_end|>", "content": "text"}


def template(tool_calls, thinking=THINK, content=CONTENT):
    fields = {"thinking": thinking, "tool_calls": tool_calls, "content": content}
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


def function(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TEMPLATES = {
    "hermes": template(
        {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
         "transform": {"type": "function", "function": "{content}"}}
    ),
    "qwen3_coder": template(
        {"open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close": "</tool_call>", "repeats": True,
         "content": "xml-inline", "transform": function("{name}", "{content}"),
         "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                          "value_parser": {"name": "json", "args": {"allow_non_json": True}}}}
    ),
    "gemma4": template(
        {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
         "content": "json", "transform": function("{name}", "{content}"),
         "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}},
        {"open": "<|channel>thought\n", "close": "<channel|>"},
    ),
    "cohere_command3": template(
        {"open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
         "transform": function("{tool_name}", "{parameters}")},
        {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    ),
}  # fmt: skip
CALLS = [("weather", {"city": "Oslo, 5 < 7", "days": 2, "tags": ["a", True]}), ("now", {})]
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_a_known_format_is_this_format(name):
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    reasoning, tools = checkpoint_formats({"response_template": TEMPLATES[name]})
    assert tools is TOOL_CALL_FORMATS[name]
    assert reasoning is REASONING_FORMATS.get(name, REASONING_FORMATS["qwen3"])
    text = rendered(name, "hm", "", CALLS)
    theirs = chat_parsing.parse_response(text, TEMPLATES[name], prefix="")
    parser = OutputParser(reasoning, tools, functions=Functions({"weather": {"properties": PROPERTIES}, "now": {}}))
    ours = join([*parser.feed(text), *parser.finish()])
    assert ours.reasoning == theirs["thinking"] == "hm"
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in theirs["tool_calls"]]
    assert [(called, json.loads(source)) for called, source in ours.calls] == calls == CALLS


def test_a_template_of_an_unknown_family_is_a_format_of_its_own():
    calls = {"open": "<do>\n", "close": "</do>", "repeats": True, "content": "json",
             "transform": function("{content.what}", "{content.with}")}  # fmt: skip
    thought = {"open": "<muse>", "close": ["</muse>", "<stop>"], "content": "text"}
    reasoning, tools = checkpoint_formats({"response_template": template(calls, thought)})
    assert reasoning == ReasoningFormat(("<muse>",), ("</muse>", "<stop>"))
    assert tools == EnvelopeFormat(("<do>",), "</do>", name_key="what", arguments_key="with")
    parser = OutputParser(reasoning, tools)
    text = '<muse>hm</muse>Yes.<do>\n{"what": "now", "with": {"x": 1}}</do>'
    found = join([*parser.feed(text), *parser.finish()])
    assert (found.content, found.reasoning, found.calls) == ("Yes.", "hm", [("now", '{"x": 1}')])


UNREAD = [
    None,
    "text",
    {"fields": 5},
    {"fields": {"tool_calls": None, "thinking": ["<think>"]}},
    template({"open_pattern": r"(?:^|<call>)", "close": "</call>"}, {"open_pattern": "^", "close": "</think>"}),
    template({"open": "<call>", "close": "</call>", "content": "kv-lines"}, {"open": "<think>"}),
    template({"open": "<call>", "content": "json", "transform": {"function": {"name": "{name}"}}}, {}),
    template({"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "content": "xml-inline",
              "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\1>"}}, {}),
    template({"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "content": "json",
              "content_args": {"string_delims": [["a", "b"]]}}, {}),
]  # fmt: skip


@pytest.mark.parametrize("given", UNREAD)
def test_what_no_format_can_read_is_left_to_the_chat_template(given):
    assert checkpoint_formats({"response_template": given}) == (None, None)
    assert checkpoint_formats({}) == (None, None)
