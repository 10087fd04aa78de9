"""The markers of reasoning as token ids: from the options, a parser's name or the chat template."""

from __future__ import annotations

import pytest

from scripted_core import facts
from slipstream.base.errors import InvalidOption, InvalidParams
from slipstream.checkpoint.generation import ReasoningConfig
from slipstream.front.inputs import InputProcessor, ThinkingMarkers
from slipstream.params.sampling import SamplingParams
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import byte_tokenizer, write_byte_tokenizer

BUDGET = SamplingParams(thinking_token_budget=5)


@pytest.fixture
def tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path)
    found = Tokenizer.load(str(tmp_path))
    found.chat_templates = {"default": "{{ messages }}<think>{{ reasoning }}</think>"}
    return found


def ids(tokenizer, *texts):
    return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def test_markers_of_the_template(tokenizer):
    markers = ThinkingMarkers(tokenizer, None)
    closed = markers.of(list(ids(tokenizer, "<think>yes</think> and")[0]), BUDGET)
    assert (closed.start, closed.end) == (ids(tokenizer, "<think>"), ids(tokenizer, "</think>"))
    assert closed.forced == closed.end[0] and not closed.is_open
    for text, is_open in (("a<think>\n", True), ("<think>", True), ("what is <think>?", False), ("</think>", False)):
        assert markers.of(list(ids(tokenizer, text)[0]), BUDGET).is_open == is_open, text


def test_markers_of_a_parser_and_of_the_options(tokenizer):
    named = ThinkingMarkers(tokenizer, None, "mistral").of([5], BUDGET)
    # a call ends the reasoning before it
    ends = ids(tokenizer, "[/THINK]") + ids(tokenizer, "[TOOL_CALLS]")
    assert (named.start, named.end) == (ids(tokenizer, "[THINK]"), ends)
    message = ThinkingMarkers(tokenizer, None, "openai_gptoss").of([5], BUDGET)
    assert (message.start, message.end) == (ids(tokenizer, "<|channel|>analysis<|message|>"), ids(tokenizer, "<|end|>"))
    section = ThinkingMarkers(tokenizer, None, "deepseek_r1").of([5], BUDGET)
    assert section.is_open  # the output begins with reasoning, also without the marker
    long = ThinkingMarkers(tokenizer, ReasoningConfig("<think>", "Done.</think>\n")).of([5], BUDGET)
    # the model ends its reasoning by the marker of its format; the whole text is written when the budget is used
    assert (long.end, (long.forced,)) == (ids(tokenizer, "</think>"), ids(tokenizer, "Done.</think>\n"))
    other = ThinkingMarkers(tokenizer, ReasoningConfig("<a>", "</a>")).of([5], BUDGET)
    assert (other.start, other.end) == (ids(tokenizer, "<a>"), ids(tokenizer, "</a>"))


def test_unknown_and_long_markers_are_refused(tokenizer):
    with pytest.raises(InvalidParams, match="reasoning_config"):
        ThinkingMarkers(tokenizer, None, "none").of([5], BUDGET)
    for start, end, limit in (("<think>", "x" * 40, 32), ("x" * 40, "</think>", 32), ("<think>", "</think>" * 20, 128)):
        with pytest.raises(InvalidOption, match=f"give 1 to {limit} in all"):
            ThinkingMarkers(tokenizer, ReasoningConfig(start, end))


def test_a_structure_must_leave_room_for_the_reasoning_that_the_prompt_begins(tokenizer):
    markers, opened = ThinkingMarkers(tokenizer, None), list(ids(tokenizer, "hi<think>")[0])
    at_once = BUDGET.with_changes(structured_outputs={"regex": "a"})
    after = BUDGET.with_changes(structured_outputs={"regex": "a", "prefix": 'start: "b"'})
    with pytest.raises(InvalidParams, match="no reasoning that thinking_token_budget could end"):
        markers.of(opened, at_once)
    assert markers.of(opened, after).is_open and not markers.of([5], at_once).is_open


def test_a_marker_that_the_model_has_no_token_for_is_refused():
    """Some tokenizers have more tokens than the model; the device could not write such a token."""
    config = ReasoningConfig("<a>", "</a>")
    given = Tokenizer(byte_tokenizer())
    (end,) = ids(given, "</a>")
    known = dict(max_model_len=64, reasoning_config=config)
    assert (
        InputProcessor(facts("nowhere", vocab_size=max(end) + 1, **known), given).prepare("r", [5], BUDGET)[0].thinking
    )
    inputs = InputProcessor(facts("nowhere", vocab_size=max(end), **known), given)
    with pytest.raises(InvalidParams, match=f"would write token id {max(end)}; .* reasoning_end_str"):
        inputs.prepare("r", [5], BUDGET)
    assert inputs.prepare("r", [5], SamplingParams())[0].thinking is None
