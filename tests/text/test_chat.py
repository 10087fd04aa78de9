from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.base.errors import BadTokenizer, InvalidPrompt
from slipstream.text import chat_template
from slipstream.text.chat_template import load_chat_template, render_chat
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import CHATML

HI = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: Any = None, **given: Any) -> str:
    return render_chat(template, HI if messages is None else messages, **given)


def test_the_models_template_gives_its_known_prompt(smollm: Tokenizer) -> None:
    text = render_chat(smollm.chat_template(), HI, special_tokens=smollm.special_tokens)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = smollm.encode(text, add_special_tokens=False)
    assert ids[:2] == [1, 9690] and ids.count(1) == 3 and ids.count(2) == 2


def test_the_generation_prompt_may_be_left_out() -> None:
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_blocks_leave_no_blank_lines_and_loops_may_break() -> None:
    leave = "    {% if loop.index > 1 %}\n{% break %}\n    {% endif %}\n"
    template = "{% for m in messages * 3 %}\n" + leave + "{{ m.content }};\n{% endfor %}\n"
    assert render(template, HI) == "Hi;\n"


def test_json_is_not_escaped_for_web_pages() -> None:
    tools = [{"name": "a<b>&'ü"}]
    assert render("{{ tools[0] | tojson }}", tools=tools) == '{"name": "a<b>&\'ü"}'
    assert render("{{ tools | tojson(indent=2) }}", tools=tools) == '[\n  {\n    "name": "a<b>&\'ü"\n  }\n]'


def test_a_template_knows_special_tokens_the_date_and_its_own_arguments() -> None:
    template = "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ enable_thinking }}{{ tools is none }}"
    assert render(template, special_tokens={"bos_token": "<s>"}, enable_thinking=False) == "<s>4FalseTrue"


def test_the_generation_tag_of_training_templates_is_only_its_body() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


PARTS = [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]
# as Gemma 3 and Llama 3.2 Vision write it, shortened
BY_PART = (
    "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text }}|"
    "{% for message in messages[1:] %}{% if message.content is string %}{{ message.content | trim }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)


def test_text_parts_reach_templates_that_take_them_apart() -> None:
    """As in transformers, which leaves joining them to the template."""
    messages = [*HI, {"role": "user", "content": PARTS}, {"role": "user", "content": PARTS[:1]}]
    theirs = render_jinja_template([messages], chat_template=BY_PART)[0][0]
    assert render(BY_PART, messages) == theirs == "Hi|onetwo;one;"
    assert messages[1] == {"role": "user", "content": PARTS}  # the caller's list is left alone


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}", "{{ messages[0]['content'] + '' }}", "{{ 'a' ~ messages[0].content }}",
        "{{ messages[0].content | trim }}", "{{ messages[0].content.strip() }}",
        "{{ '%s' % messages[0].content }}", "{{ messages[0].content | upper }}", "{{ messages[0].content | string }}",
        "{% if 'x' in messages[0].content %}{% endif %}{{ messages[0].content }}",
    ],
)  # fmt: skip
def test_text_parts_become_one_text_for_templates_that_want_one(template: str) -> None:
    """By a space, as transformers' own server joins them."""
    text = render(template, [{"role": "user", "content": PARTS}])
    assert text.strip().removeprefix("a").strip().lower() == "one  two"


def test_no_part_is_lost() -> None:
    """transformers renders only the first here."""
    messages = [{"role": "system", "content": PARTS}, *HI]
    assert render(BY_PART, messages) == " one  two|Hi;"


def test_a_message_in_parts_is_continued_where_its_last_part_ends() -> None:
    messages = [*HI, {"role": "assistant", "content": PARTS}]
    how: dict[str, Any] = dict(continue_final_message=True, add_generation_prompt=False)
    theirs = render_jinja_template([messages], chat_template=BY_PART, continue_final_message=True)[0][0]
    assert render(BY_PART, messages, **how) == theirs == "Hi|onetwo"
    assert render(CHATML, messages, **how).endswith("<|im_start|>assistant\n one  two")


def test_content_that_is_left_out_is_undefined_and_null_is_none() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    template = "{% for m in messages %}{{ m.content is defined }} {{ m.content is none }}"
    template += "{% if m.tool_calls %};{% endif %}{% endfor %}"
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "assistant", "tool_calls": calls, "content": None}]
    assert render(template, messages) == render_jinja_template([messages], chat_template=template)[0][0]
    assert render(template, messages) == "False False;True True;"


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments.x[0] }}", messages) == "1"
    assert call["function"]["arguments"] == '{"x": [1]}'  # type: ignore[index]


@pytest.mark.parametrize("content", ["I am", "ends in space  ", "", "Hi", "{{ 7 * 7 }}<|im_end|>"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_continued_message_ends_exactly_with_its_content(content: str, trim: str) -> None:
    template = CHATML.replace("message['content']", f"(message['content']{trim})")
    text = render(
        template,
        [*HI, {"role": "assistant", "content": content}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{content}"


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="add_generation_prompt=False"):
        render(CHATML, continue_final_message=True)
    with pytest.raises(InvalidPrompt, match="does not print the content of the final message"):
        render("nothing", continue_final_message=True, add_generation_prompt=False)
    silent = [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    with pytest.raises(InvalidPrompt, match="no content to continue"):
        render(CHATML, silent, continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize(
    "messages, words",
    [
        ("Hi", "messages are of type str"),
        ([], "no messages"),
        (["Hi"], "message 0 is of type str"),
        ([*HI, {"content": "x"}], "message 1 has the role None"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "content is 5; give a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "text is 3; give a string"),
    ],
)
def test_wrong_messages_are_named(messages: Any, words: str) -> None:
    with pytest.raises(InvalidPrompt, match=words):
        render(CHATML, messages)


def test_tools_and_reserved_arguments_are_checked() -> None:
    with pytest.raises(InvalidPrompt, match="tools must be a list"):
        render(CHATML, tools=[print])
    with pytest.raises(InvalidPrompt, match="cannot have 'documents'"):
        render(CHATML, documents=[])


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too often"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_stopped(template: str, words: str) -> None:
    with pytest.raises(InvalidPrompt, match=words):
        render(template)


def nested(name: str) -> str:
    """Code that makes a value of 2**60 items, most of them the same list."""
    return "{% set ns.NAME = [1] %}{% for i in range(60) %}{% set ns.NAME = [ns.NAME, ns.NAME] %}{% endfor %}".replace(
        "NAME", name
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('x ' * 10 ** 8) | wordwrap(1) }}",
        "{{ (range(10 ** 5) | list * 10 ** 3) | sort | length }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ 'x'.center(10 ** 11) }}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace() %}" + nested("a") + nested("b") + "{{ ns.a == ns.b }}",
        "{% set ns = namespace() %}" + nested("a") + "{{ ns.a | tojson }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
)
def test_time_and_memory_of_a_template_are_limited(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "_idle", [])
    with pytest.raises((InvalidPrompt, BadTokenizer), match=r"takes more than 0\.2 s or 1024 MiB.*chat_template="):
        render(template)
    assert render("ok") == "ok"
    chat_template._end_children()


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_values_that_cannot_be_passed_to_the_child_are_named() -> None:
    for wrong in (threading.Lock(), {(1, 2): 3}, {1}):
        with pytest.raises(InvalidPrompt, match="cannot be given to the chat template.*give what JSON has"):
            render("{{ f }}", f=wrong)
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidPrompt, match="^f: nested too deeply; the limit is 100 levels$"):
        render("{{ f }}", f=circle)
    assert render("{{ f }}", f=deep(100))
    for wrong in (deep(101), deep(10**5)):
        with pytest.raises(InvalidPrompt, match="^f: nested too deeply"):
            render("{{ f }}", f=wrong)
        with pytest.raises(InvalidPrompt, match="^tools: nested too deeply"):
            render("{{ tools }}", tools=[wrong])
        with pytest.raises(InvalidPrompt, match="^messages: nested too deeply"):
            render_chat("{{ messages }}", [{"role": "user", "content": "a", "tool_calls": wrong}])
    assert render("{{ f }}", f="\ud800") == "\ud800"
    assert render("{{ f.a + 1 }}", f=MappingProxyType({"a": 10**30})) == str(10**30 + 1)


def test_several_threads_render_at_the_same_time() -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: render("{{ f }}" * 99, f=i), range(200)))
    assert texts == [str(i) * 99 for i in range(200)]


def test_no_template_or_a_broken_one_names_the_alternative(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="chat_template="):
        render_chat(None, HI)
    with pytest.raises(BadTokenizer, match="line 2.*chat_template="):
        render("\n{% if %}")


def test_a_template_may_be_given_as_text_or_as_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].role }}")
    assert render(load_chat_template(str(path))) == "user"
    assert load_chat_template("{{ x }}") == "{{ x }}"
    with pytest.raises(BadTokenizer, match="neither a template nor a readable file"):
        load_chat_template(str(tmp_path / "absent.jinja"))
