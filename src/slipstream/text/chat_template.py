"""Renders a conversation as the text of a prompt, by the model's Jinja chat template.

A template is untrusted code: a child process runs it (`template_sandbox.py`). Control tokens in the text of the request
are encoded as text (`control_tokens.py`).
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.base.errors import BadTokenizer, InvalidPrompt
from slipstream.base.processes import LimitedChild, LimitPassed
from slipstream.params.values import MAX_DEPTH, is_deep
from slipstream.text.chat_fields import (
    IS_TEXT,
    ImageMark,
    Parts,
    check_tool_calls,
    knows_calls,
    read_content,
    with_calls_as_text,
    with_object_arguments,
    with_reasoning,
    with_text_arguments,
)
from slipstream.text.control_tokens import ControlTokens

HINT = "pass chat_template=... with a Jinja template or the path of one"
_MAX_SECONDS = 5.0  # of CPU time of one rendering
_MARK = "\ue000end of the message to continue\ue000"  # private-use characters: no text has them
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    controls: ControlTokens | None = None,
    **chat_template_kwargs: Any,
) -> str:
    """Returns the prompt's text. It has the special tokens: encode it with `add_special_tokens=False`.

    With `controls`, control tokens in the text of messages are encoded as text; without, as control tokens.
    With `continue_final_message` the text ends where the content of the last message ends, and the model continues it.
    """
    if template is None:
        raise BadTokenizer(f"the model has no chat template; {HINT}, or give a plain prompt to generate")
    for name, value in {"messages": messages, "tools": tools, **chat_template_kwargs}.items():
        if is_deep(value):
            raise InvalidPrompt(f"{name}: nested too deeply; the limit is {MAX_DEPTH} levels", param=name)
    conversation = [_checked(message, index) for index, message in enumerate(_listed(messages))]
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidPrompt(
                "continue_final_message and add_generation_prompt are both set; set add_generation_prompt=False"
            )
        _mark_end(conversation[-1])
    _check_arguments(template, chat_template_kwargs)
    conversation = [with_reasoning(message, template) for message in conversation]
    if not knows_calls(template):
        conversation = [with_calls_as_text(message) for message in conversation]
    variables = {
        **(special_tokens or {}),
        "documents": None,
        **chat_template_kwargs,
        "messages": conversation,
        "tools": _checked_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    if controls is None:
        return _render_conversation(template, variables, continue_final_message)
    masked = {name: controls.mask(variables[name]) for name in (*chat_template_kwargs, "tools")}
    masked["messages"] = [controls.mask_message(message) for message in conversation]
    try:
        return controls.unmask(_render_conversation(template, variables | masked, continue_final_message))
    except InvalidPrompt as error:  # it may quote a message
        raise InvalidPrompt(controls.restore(str(error)), param=error.param and controls.restore(error.param)) from None


def known_roles(template: str) -> frozenset[str]:
    """Returns the string constants of a template, among them the roles that it knows."""
    return _summary_of(template)["texts"]


def reads_variable(template: str, name: str) -> bool:
    """Whether a template reads a variable that it does not define."""
    return name in _summary_of(template)["variables"]


def reasoning_switch(template: str | None) -> str | None:
    """The variable of a template that switches reasoning on or off."""
    names = ("enable_thinking", "thinking")
    return None if template is None else next((name for name in names if reads_variable(template, name)), None)


def load_chat_template(given: str) -> str:
    """Returns the template of the option `chat_template`, which is a template or the path of a file."""
    template = given
    if "{{" not in given and "{%" not in given:
        try:
            template = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadTokenizer(
                f"chat_template={given!r} is neither a template nor a readable file: {error}; {HINT}"
            ) from None
    _summary_of(template)  # raises at start, not at the first request
    return template


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, list | tuple):
        raise InvalidPrompt(
            f"messages are of type {type(messages).__name__}; give a list of messages with role and content"
        )
    if not messages:
        raise InvalidPrompt("there are no messages; give at least one")
    return messages


def _checked(message: Any, index: int) -> dict[str, Any]:
    """Returns a copy of a message, with its content as one text or as several parts."""
    if not isinstance(message, Mapping):
        raise InvalidPrompt(
            f"message {index} is of type {type(message).__name__}; give an object with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"message {index} has the role {role!r}; give a name like 'user'")
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = check_tool_calls(calls, index)
    content = message.get("content")
    if content is None and not calls:
        raise InvalidPrompt(f"message {index} has no content; give a string or a list of text parts")
    if "content" in message:  # else it is undefined in the template
        checked["content"] = _content(content, f"messages[{index}].content")
    return checked


def _content(given: Any, path: str) -> str | Parts | None:
    """The content as templates take it: a single part is its text, because not all templates take lists."""
    parts = read_content(given, path)
    if not isinstance(parts, list):
        return parts
    if any(isinstance(part, ImageMark) for part in parts):
        return Parts({"type": "image"} if isinstance(part, ImageMark) else _text_part(part.text) for part in parts)
    texts = [part.text for part in parts if not isinstance(part, ImageMark)]
    return "".join(texts) if len(texts) < 2 else Parts(map(_text_part, texts))


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _render_conversation(template: str, variables: Mapping[str, Any], continue_final_message: bool) -> str:
    try:
        text = _render_adapted(template, variables)
    except LimitPassed as error:
        raise InvalidPrompt(f"the chat template takes {error} for these messages; shorten them, or {HINT}") from None
    return _cut_at_mark(text) if continue_final_message else text


def _render_adapted(template: str, variables: Mapping[str, Any]) -> str:
    try:
        return _render_whole(template, variables)
    except InvalidPrompt as error:
        # some templates concatenate content, which is usually null beside tool calls, and arguments, which are objects;
        # others take objects only
        conversation = variables["messages"]
        filled = [_without_null(message) for message in conversation]
        texts = [with_text_arguments(message) for message in filled]
        objects = [with_object_arguments(message) for message in filled]
        for other in (filled, texts, objects):
            if other == conversation:
                continue
            try:
                return _render_whole(template, {**variables, "messages": other})
            except InvalidPrompt:
                continue
        raise error


def _render_whole(template: str, variables: Mapping[str, Any]) -> str:
    text = _render_parts(template, variables)
    if text is not None:
        return text
    return _rendered(template, {**variables, "messages": [_joined(message) for message in variables["messages"]]})


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": ""} if message.get("tool_calls") and message.get("content", "") is None else message


def _render_parts(template: str, variables: Mapping[str, Any]) -> str | None:
    """Returns the rendering with lists of parts, as transformers does. None if no message has several parts, if the
    template takes only texts, or if it drops a part."""
    parts = [part for message in variables["messages"] if _has_parts(message) for part in message["content"]]
    if not parts:
        return None
    try:
        text = _rendered(template, variables)
    except InvalidPrompt:
        return None
    return text if all(part.get("text", "").strip() in text for part in parts) else None


def _has_parts(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), Parts)


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its content as one text."""
    if not _has_parts(message):
        return message
    if any(part["type"] == "image" for part in message["content"]):
        raise InvalidPrompt(f"the chat template cannot show messages with images; {HINT}")
    return message | {"content": " ".join(part["text"] for part in message["content"])}


def _checked_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidPrompt("tools must be a list of JSON schemas of functions, in the format of the OpenAI API")
    return list(tools) or None


def _check_arguments(template: str, given: Mapping[str, Any]) -> None:
    known = _summary_of(template)["variables"]  # raises if it is invalid
    for name in given:
        if name in _RESERVED:
            raise InvalidPrompt(
                f"chat_template_kwargs cannot have {name!r}; give it as an argument of its own",
                param="chat_template_kwargs",
            )
        if name not in known:
            raise InvalidPrompt(
                f"chat_template_kwargs has {name!r}, which the chat template does not read; remove it",
                param=f"chat_template_kwargs.{name}",
            )


def _mark_end(message: dict[str, Any]) -> None:
    if _has_parts(message) and "text" in message["content"][-1]:
        message["content"][-1]["text"] += _MARK
    elif isinstance(message.get("content"), str):
        message["content"] += _MARK
    else:
        raise InvalidPrompt(
            "the final message has no content to continue; add content or set continue_final_message=False"
        )


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_MARK)
    if end < 0:
        raise InvalidPrompt(
            "the chat template does not print the content of the final message, so it cannot be continued; set "
            "continue_final_message=False"
        )
    return text[:end].replace(_MARK, "")


# The processes that run templates.

_idle: list[LimitedChild] = []  # no more than there are threads that render
os.register_at_fork(after_in_child=_idle.clear)  # they answer the parent


def _end_children() -> None:
    while _idle:
        _idle.pop().close()


atexit.register(_end_children)


@lru_cache(maxsize=16)
def _summary_of(template: str) -> dict[str, frozenset[str]]:
    """The `variables` that a template reads and does not define, and its string constants as `texts`."""
    try:
        found = json.loads(_call(template, None))
    except LimitPassed as error:
        raise BadTokenizer(f"the chat template takes {error} to compile; {HINT}") from None
    if "error" in found:
        raise BadTokenizer(f"{found['error']}; {HINT}")
    return {name: frozenset(values) for name, values in found.items()}


def _rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Raises InvalidPrompt for what the template raises, and for fields that it does not read; LimitPassed."""
    answer = _call(template, variables)
    if answer.startswith(IS_TEXT):
        return answer[len(IS_TEXT) :].decode("utf-8", "surrogatepass")
    failed = json.loads(answer)
    raise InvalidPrompt(failed["error"], param=failed["param"])


def _call(template: str, variables: Mapping[str, Any] | None) -> bytes:
    try:
        data = json.dumps((template, variables), default=_as_dict).encode()
    except (TypeError, ValueError) as error:  # from Python, any object may be in a message
        raise InvalidPrompt(f"a value cannot be given to the chat template: {error}; give what JSON has") from None
    try:
        child = _idle.pop()
    except IndexError:
        child = LimitedChild("slipstream.text.template_sandbox", max_seconds=_MAX_SECONDS)
    try:
        return child.call(data)
    finally:
        _idle.append(child)


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it is of type {type(value).__name__}")
