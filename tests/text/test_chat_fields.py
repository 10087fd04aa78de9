"""Fields of messages: what a template reads reaches it as in transformers, and what it does not read is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.base.errors import InvalidPrompt
from slipstream.text.chat_fields import check_tool_calls
from slipstream.text.chat_template import known_roles, render_chat
from tiny_tokenizer import CHATML

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
PARSED = {**CALL, "function": {"name": "weather", "arguments": {"city": "Köln"}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "And now?"},
]
# in the manner of templates that know tools: calls as JSON in tags, answers of tools in tags of their own
IN_TAGS = """\
{%- for m in messages %}
{%- if m.role == "assistant" and m.tool_calls %}
<|assistant|>{{ m.content if m.content else "" }}
{%- for call in m.tool_calls %}<call>{{ call.function | tojson }}</call>{%- endfor %}
{%- elif m.role == "tool" %}
<|tool|>{{ m.tool_call_id }}: {{ m.content }}
{%- else %}
<|{{ m.role }}|>{{ m.content }}
{%- endif %}<end>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# that adds texts to the content, null or not
BY_PLUS = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)


def render(template: str, messages: Any, **more: Any) -> str:
    return render_chat(template, messages, **more)


def test_null_content_beside_calls_is_rendered_as_transformers_does() -> None:
    parsed = [{**each, "tool_calls": [PARSED]} if "tool_calls" in each else each for each in HISTORY]
    theirs = render_jinja_template([parsed], chat_template=IN_TAGS, add_generation_prompt=True)[0][0]
    assert render(IN_TAGS, HISTORY) == theirs
    assert '<call>{"name": "weather", "arguments": {"city": "Köln"}}</call>' in theirs and "call_1: rain" in theirs


def test_null_content_works_with_templates_that_add_to_it() -> None:
    """transformers fails here."""
    text = render(BY_PLUS, HISTORY)
    assert "[assistant][{" in text and "[tool]rain" in text and "None" not in text


def test_calls_are_shown_by_templates_that_know_none() -> None:
    text = render(CHATML, HISTORY)
    assert (
        "<|im_start|>assistant\n"
        '{"tool_calls": [{"id": "call_1", "name": "weather", "arguments": {"city": "Köln"}}]}<|im_end|>'
    ) in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text and "None" not in text
    said = [{**HISTORY[1], "content": "One moment."}]
    assert 'One moment.\n{"tool_calls"' in render(CHATML, said)
    assert HISTORY[1]["tool_calls"] == [CALL]  # the caller's list is left alone


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("weather", "messages[0].tool_calls"),
        (["weather"], "messages[0].tool_calls[0]"),
        ([{"function": "weather"}], "messages[0].tool_calls[0]"),
        ([CALL, {"function": {}}], "messages[0].tool_calls[1].function.name"),
    ],
)
def test_calls_that_are_none_are_named(calls: Any, param: str) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        render(CHATML, [{"role": "assistant", "content": None, "tool_calls": calls}])
    assert caught.value.param == param


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    """A model wrote them."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{broken"}}
    text = render(IN_TAGS, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '<call>{"name": "f", "arguments": "{broken"}</call>' in text
    deep = "[" * 200_000  # deeper than a decoder can go
    assert check_tool_calls([{"function": {"name": "f", "arguments": deep}}], 0)[0]["function"]["arguments"] == deep


@pytest.mark.parametrize(
    ("message", "name", "words"),
    [
        ({"role": "user", "content": "x", "cotnent": "y"}, "cotnent", "did you mean content?"),
        ({"role": "user", "content": "x", "name": "Ann"}, "name", "remove it"),
        ({"role": "user", "content": "x", "weight": 0}, "weight", "does not read"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id", "does not read"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "refusal", "does not read"),
        ({"role": "user", "content": "x", "reasoning_content": "hm"}, "reasoning_content", "does not read"),
    ],
)
def test_a_field_that_the_template_does_not_read_is_refused(message: dict[str, Any], name: str, words: str) -> None:
    with pytest.raises(InvalidPrompt, match=words) as caught:
        render(CHATML, [{"role": "user", "content": "first"}, message])
    assert caught.value.param == f"messages[1].{name}"


def test_fields_that_ask_for_nothing_are_let_through() -> None:
    """As clients send an answer of theirs back."""
    nothing = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": [], "name": ""}
    text = render(CHATML, [{"role": "assistant", "content": "x", **nothing}])
    assert text == render(CHATML, [{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m['name'] }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m.get('name', '') }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if 'name' in m %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m | tojson(indent=1) }}{% endfor %}",
        "{% for m in messages %}{{ m }}{% endfor %}",
        "{% for m in messages %}{% for key, value in m.items() %}{{ key }}{{ value }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for key in m %}{{ key }}{% endfor %}{% endfor %}",
        "{{ messages | map(attribute='name') | join }}{{ messages | map(attribute='content') | join }}",
        "{{ messages | tojson }}",
        "{{ messages }}",
    ],
)
def test_a_field_is_read_in_any_way_that_templates_have(template: str) -> None:
    message = {"role": "user", "content": "x", "name": "Ann"}
    theirs = render_jinja_template([[message]], chat_template=template)[0][0]
    assert render(template, [message]) == theirs


def test_a_message_that_the_template_passes_over_is_refused() -> None:
    template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidPrompt, match="skips message 0, of role 'system'") as caught:
        render(template, messages)
    assert caught.value.param == "messages[0].role"
    assert render(template, messages[1:]) == "Hi"


def test_words_beside_calls_may_be_passed_over() -> None:
    """As the templates of Llama 3.1 do."""
    template = "{% for m in messages %}{{ m.tool_calls[0].function.name if m.tool_calls else m.content }};{% endfor %}"
    assert render(template, [{**HISTORY[1], "content": "One moment."}, HISTORY[3]]) == "weather;It rains.;"


def test_an_argument_that_the_template_does_not_read_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="'enable_thinkng', which the chat template does not read") as caught:
        render(CHATML + "{{ enable_thinking }}", HISTORY[:1], enable_thinkng=False)
    assert caught.value.param == "chat_template_kwargs.enable_thinkng"


def test_parts_have_a_type_and_a_text_alone() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(InvalidPrompt, match="no field messages.0..content.0..cache_control"):
        render(CHATML, [{"role": "user", "content": [part]}])


def test_roles_that_a_template_names_are_known() -> None:
    assert {"tool", "assistant"} <= known_roles(IN_TAGS) and "ipython" not in known_roles(IN_TAGS)
    assert "ipython" in known_roles("{% if messages[0].role in ['tool', 'ipython'] %}{% endif %}")


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("known", ["reasoning_content", "thinking"])
def test_reasoning_of_the_history_reaches_the_template_under_its_name(given: str, known: str) -> None:
    template = "{% for message in messages %}{{ message.content }}{{ message." + known + " }}{% endfor %}"
    assert render_chat(template, [{"role": "assistant", "content": "a", given: "why"}]) == "awhy"


def test_a_template_may_leave_out_reasoning_of_the_assistant_only() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    message = {"role": "assistant", "content": "a", "reasoning": "why", "reasoning_content": "why"}
    assert render_chat(template, [message]) == "a"
    with pytest.raises(InvalidPrompt, match="reasoning"):
        render_chat(template, [{**message, "role": "user"}])


@pytest.mark.parametrize(
    ("given", "shown"),
    [("{'a': 1}", "text={'a': 1}"), ("[1]", "text=[1]"), ("null", ""), ("", ""), ('{"b": 2}', "b=2")],
)
def test_arguments_are_objects_for_templates_that_take_nothing_else(given: str, shown: str) -> None:
    loop = "{% for k, v in message.tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    template = "{% for message in messages %}{{ message.content }}" + loop + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    assert render_chat(template, [{"role": "assistant", "content": "", "tool_calls": [call]}]) == shown


def test_arguments_are_text_for_templates_that_add_to_them() -> None:
    template = "{% for message in messages %}{{ message.tool_calls[0].function.arguments + '|' }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\u00e9"}'}}
    assert render_chat(template, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == '{"a": "é"}|'
