"""Random conversations in every format, whole and cut at every place: no call is lost, and no marker is content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsers.conversations import join
from parsers.rendering import reasoning_of, rendered
from slipstream.parsers.families import REASONING_FORMATS, TOOL_CALL_FORMATS
from slipstream.parsers.literals import PythonicFormat
from slipstream.parsers.output_parser import Functions, OutputParser

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "rate": {"type": "number"},
    "dry": {"type": "boolean"},
    "tags": {"type": "array"},
    "more": {"type": "object"},
}
FUNCTIONS = Functions({name: {"properties": PROPERTIES} for name in ("weather", "now", "a.b-c_d")})
TEXTS = st.text("ab cé漢🌍\n\"'\\{}[](),:=<>|/&;", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXTS,
        "days": st.integers(-5, 5),
        "rate": st.sampled_from([0.5, -2.25, 3]),
        "dry": st.booleans(),
        "tags": st.lists(VALUES, max_size=3),
        "more": st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=2),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from([*FUNCTIONS.schemas]), ARGUMENTS), max_size=3)
SENTENCES = st.sampled_from(["", "I look.", "It rains: 5 < 7", "a {b} [c]", "漢 🌍"])


def parsed(tools, *pieces):
    reasoning = reasoning_of(tools)
    format = None if reasoning is None else REASONING_FORMATS[reasoning]
    parser = OutputParser(format, TOOL_CALL_FORMATS[tools], functions=FUNCTIONS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join([*events, *parser.finish()])


@pytest.mark.parametrize("tools", TOOL_CALL_FORMATS)
@settings(max_examples=12, deadline=None)
@given(thought=st.sampled_from(["", "hm, 5 < 7"]), before=SENTENCES, calls=CALLS, after=SENTENCES)
def test_a_conversation_is_read_as_it_was_written(tools, thought, before, calls, after):
    format = TOOL_CALL_FORMATS[tools]
    if (
        getattr(format, "bare", False)
        and format.begin != "<tool_call>"
        and format.begin != "<seed:tool_call>"
        and calls
    ):
        before = ""  # a call without a marker is at the start
    if tools == "openai" or not calls:
        after = ""
    text = rendered(tools, thought, before, calls, after)
    whole = parsed(tools, text)
    assert [name for name, _ in whole.calls] == [name for name, _ in calls]
    for (_, source), (_, arguments) in zip(whole.calls, calls, strict=True):
        assert json.loads(source) == arguments, (text, source)
    assert (whole.content, whole.reasoning) == (before + after, thought), text
    assert parsed(tools, *text) == whole
    for place in range(len(text)):
        assert parsed(tools, text[:place], text[place:]) == whole, place


def test_python_calls_have_a_name_of_any_kind():
    assert isinstance(TOOL_CALL_FORMATS["pythonic"], PythonicFormat)
    assert parsed("pythonic", "[a.b-c_d(city='x')]").calls == [("a.b-c_d", '{"city": "x"}')]
