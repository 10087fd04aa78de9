"""Outputs of every family, whole and cut anywhere."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from count_calls import count_calls
from parsers.conversations import EXAMPLES, FUNCTIONS, OSLO, join, parse
from parsers.rendering import rendered
from slipstream.parsers import output_parser
from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.families import REASONING_FORMATS, TOOL_CALL_FORMATS
from slipstream.parsers.output_parser import Functions, OutputParser
from slipstream.parsers.reader import ContentDelta, ToolCallStart

FAMILIES = sorted({example[0] for example in EXAMPLES}, key=str)


def is_open(family):
    return family[0] in ("deepseek_r1", "step3", "minimax_m2_append_think")


def test_every_format_has_an_example():
    for formats, shown in (
        (TOOL_CALL_FORMATS, {tools for (_, tools), *_ in EXAMPLES}),
        (REASONING_FORMATS, {reasoning for (reasoning, _), *_ in EXAMPLES}),
    ):
        assert shown - {None} <= {*formats}
        shapes = [formats[name] for name in shown if name]  # a format may have further names
        assert [name for name, format in formats.items() if format not in shapes] == []


@pytest.mark.parametrize(("family", "text", "content", "reasoning", "calls"), EXAMPLES)
def test_an_output_is_understood(family, text, content, reasoning, calls):
    found = parse(family, text, is_open=is_open(family))
    assert (found.content, found.reasoning, found.calls) == (content, reasoning, calls)
    assert parse(family, *text, is_open=is_open(family)) == found
    for place in range(len(text)):
        assert parse(family, text[:place], text[place:], is_open=is_open(family)) == found


def test_ids_of_the_model_are_kept():
    (kimi,) = (text for family, text, *_ in EXAMPLES if family == ("kimi_k2", "kimi_k2"))
    assert parse(("kimi_k2", "kimi_k2"), kimi).ids == ["functions.get_weather:0"]
    assert parse((None, "mistral"), "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}").ids == ["abc"]


# pieces of all formats, so that random texts are nearly calls
PIECES = sorted({piece for _, text, *_ in EXAMPLES for piece in re.split(r"(?<=[>\]}\)\s])|(?=[<{\[\(])", text)})
WORDS = [f"word{number}" for number in range(6)]
TEXTS = st.lists(st.sampled_from([*PIECES, *WORDS, *'"{}[](),:= \n\\<>|']), max_size=25).map("".join)


@st.composite
def damaged(draw, leaves_out=True):
    """An example with words inserted anywhere, and a part left out."""
    family, text, *_ = draw(st.sampled_from(EXAMPLES))
    start = draw(st.integers(0, len(text)))
    if leaves_out and draw(st.booleans()):
        text = text[:start] + text[start + draw(st.integers(0, 12)) :]
    for word in draw(st.lists(st.sampled_from(WORDS), max_size=3, unique=True)):
        place = draw(st.integers(0, len(text)))
        text = f"{text[:place]} {word} {text[place:]}"
    return family, text


@settings(max_examples=250, deadline=None)
@given(
    st.tuples(st.sampled_from(FAMILIES), TEXTS) | damaged(),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
)
def test_any_cut_gives_the_same_events(output, cuts, opened):
    family, text = output
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parse(family, text, is_open=opened)
    assert parse(family, *pieces, is_open=opened) == whole
    assert parse(family, *text, is_open=opened) == whole


@settings(max_examples=250, deadline=None)
@given(damaged(leaves_out=False), st.booleans())
def test_no_text_is_lost(output, opened):
    """A word is in the content, the reasoning or a call, wherever it was inserted; except in the headers of messages,
    of which only the name of the function is used, and in a key that is not known or an attribute, beside a name."""
    family, text = output
    assume(not {*family} & {"openai", "openai_gptoss", "deepseek_v3", "muse_glimmer", "inkling"})
    assume(family[0] != "kimi_k3" or not re.search(r"<.(open|close).>((?!<.sep.>).)*word\d", text, re.S))
    assume(not re.search(r'"[^"]*word\d[^"]*"\s*:|"(type|id)": "[^"]*word|="[^<>]*word\d[^<>]*(>|<.sep)', text))
    found = parse(family, text, is_open=opened)
    shown = [found.content, found.reasoning, *(part for call in found.calls for part in call), *map(str, found.ids)]
    for word in WORDS:
        assert word not in text or any(word in part for part in shown), (word, found)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_cost_is_linear(family):
    """Counted in calls of Python functions: twice the text has twice of them, in one piece or many."""

    def cost(times: int, size: int) -> int:
        value = json.dumps("x\n <" * 40 * times)
        text = next(text for own, text, *_ in EXAMPLES if own == family)
        text = text.replace('"Oslo"', value).replace("Oslo", value).replace("hm", "h < m\n" * 50 * times)
        text += "< a [" * 50 * times
        reasoning, tools = REASONING_FORMATS.get(family[0]), TOOL_CALL_FORMATS.get(family[1])
        parser = OutputParser(reasoning, tools, functions=FUNCTIONS)
        with count_calls() as calls:
            for place in range(0, len(text), size):
                parser.feed(text[place : place + size])
            parser.finish()
        return calls.number

    for size in (2, 1000):
        assert cost(6, size) < 2.3 * cost(3, size) + 500
    parser = OutputParser(None, TOOL_CALL_FORMATS["hermes"])
    for _ in range(1000):
        parser.feed('<tool_call>{"name": "now", "arguments": {"a": "<tool_call')
    assert len(parser._reader._text) < 100  # what is read is not kept


CUT = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n', "</tool_call>"),
    ("hermes", '<tool_call>{"name": "now"}', "</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n", "</tool_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
     "<|tool_call_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
     "<|tool_calls_section_end|>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n",
     "```<｜tool▁call▁end｜>"),
    ("llama4_pythonic", "<|python_start|>[now()]", "<|python_end|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "marker"), CUT)
def test_a_marker_that_is_cut_behind_a_call_is_not_shown(name, call, marker):
    """max_tokens may end the output within the marker."""
    for size in range(len(marker) + 1):
        found = parse((None, name), call, marker[:size])
        assert (found.content, found.calls) == ("", [("now", "{}")]), marker[:size]


def test_text_behind_a_call_that_begins_no_marker_is_kept():
    assert parse((None, "hermes"), '<tool_call>{"name": "now"}', " </tools").content == "</tools"


def test_text_between_parameters_follows_the_call():
    """The pieces of a call's arguments are adjacent: streams of other APIs have one block at a time."""
    text = "<tool_call><function=write><parameter=text>a</parameter> so <parameter=tags>[]</parameter></function>"
    parser = OutputParser(None, TOOL_CALL_FORMATS["qwen3_coder"], functions=FUNCTIONS)
    kinds = [type(event).__name__ for event in [*parser.feed(text), *parser.finish()]]
    assert kinds == ["ToolCallStart", "ArgumentsDelta", "ContentDelta"]
    assert parse((None, "qwen3_coder"), text) == ("so", "", [("write", '{"text": "a", "tags": []}')], [None])


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", r'<tool_call>{"name": "a\ud800", "arguments": {}}</tool_call>', ("a\ufffd", "{}")),
        ("hermes", r'<tool_call>{"name": "now", "arguments": "[\"\ud800\"]"}</tool_call>', ("now", '["\ufffd"]')),
        ("pythonic", r'[now(a="\ud800")]', ("now", '{"a": "\ufffd"}')),
    ],
)
def test_half_of_a_surrogate_pair_can_be_sent(name, text, call):
    assert parse((None, name), text).calls == [call]


def test_arguments_arrive_before_they_are_complete():
    for name in ("hermes", "kimi_k2", "openai", "mistral", "deepseek_v31", "granite", "llama3_json"):
        text = next(text for (_, tools), text, *_ in EXAMPLES if tools == name and OSLO in text)
        place = text.index("Oslo") + 2
        reasoning = "openai_gptoss" if name == "openai" else None
        assert parse((reasoning, name), text[:place] + "\0").calls == [("get_weather", '{"city": "Os\0')], name


def test_a_demanded_call_that_is_cut_off_is_no_content():
    """A grammar demands calls, and max_tokens ends the output anywhere."""
    text = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]'
    names = set()
    for length in range(len(text) + 1):
        parser = OutputParser(None, EnvelopeFormat(bare=True, only_calls=True), functions=FUNCTIONS)
        events = [*parser.feed(text[:length]), *parser.finish()]
        assert not any(isinstance(event, ContentDelta) for event in events), text[:length]
        names.add(tuple(event.name for event in events if isinstance(event, ToolCallStart)))
    assert names == {(), ("get_weather",), ("get_weather", "now")}


@pytest.mark.parametrize("name", ["muse_glimmer", "inkling"])
def test_a_demanded_call_needs_no_header(name):
    for thought, text in (("", ""), ("hm", rendered(name, "hm", "", []))):
        parser = OutputParser(REASONING_FORMATS[name], EnvelopeFormat(bare=True, only_calls=True), functions=FUNCTIONS)
        end = REASONING_FORMATS[name].end[0] if text and not text.endswith("<|end_message|>") else ""
        found = join([*parser.feed(f'{text}{end}[{{"name": "now", "parameters": {{}}}}]'), *parser.finish()])
        assert (found.content, found.reasoning, found.calls) == ("", thought, [("now", "{}")])


def test_a_schema_of_many_alternatives_takes_one_step_for_each_part(monkeypatch):
    """Each refers to all others: a walk of eight levels would take 10 ** 8 steps."""
    names = [f"part{number}" for number in range(100)]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names]
    schema = {"properties": {"x": {"anyOf": refs}}, "$defs": {name: {"anyOf": refs} for name in names}}
    schema["$defs"]["part3"] = {"anyOf": [{"type": "int"}, {"enum": ["a"]}, *refs]}
    found: list[str] = []
    target = output_parser.reference_target
    monkeypatch.setattr(
        output_parser, "reference_target", lambda name, root: (found.append(name), target(name, root))[1]
    )
    assert Functions({"f": schema}).types_of("f", "x") == {"integer", "string"}
    assert len(found) == len(names)
    wide = {"anyOf": [{"type": "string"}] + [{"const": number} for number in range(5_000)]}
    assert Functions({"f": {"properties": {"x": wide}}}).types_of("f", "x") == frozenset()
