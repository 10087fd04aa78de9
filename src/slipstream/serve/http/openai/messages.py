"""Checks the messages of a chat request: roles, and content that is text or a list of text parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.request import Request
from slipstream.text.chat_template import known_roles
from slipstream.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")

AllowControlTokens = Annotated[
    bool | None,
    msgspec.Meta(description="let the text of messages spell control tokens; default no, unless the server says so"),
]


def text_messages(
    request: Request, messages: Sequence[dict[str, Any]], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Returns the messages after checks of roles and content types; rendering the template checks the rest."""
    request.set_input_field("messages")
    if not messages:
        raise bad_request("there are no messages; give at least one", "messages")
    request.check_count(len(messages), "messages")
    template = None if tokenizer is None else tokenizer.chat_template()
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or (role not in ROLES and (template is None or role not in known_roles(template))):
            shown = "missing" if role is None else repr(role)
            fact = f"messages[{i}].role is {shown}"
            raise bad_request(f"{fact}; give one of {', '.join(ROLES)}", f"messages[{i}].role")
        content = message.get("content")
        name = f"messages[{i}].content"
        if isinstance(content, list):
            for index, part in enumerate(content):
                _check_part(part, f"{name}[{index}]")
        elif content is not None and not isinstance(content, str):
            raise bad_request(f"{name} is {_kind(content)}; give a string or a list of text parts", name)
    return list(messages)


def _check_part(part: Any, name: str) -> None:
    """Raises unless a part is a string, or an object of type text."""
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise bad_request(f"{name} is {_kind(part)}; {_PART}", name)
    kind = part.get("type", "text")
    if kind != "text":
        fact = f"{name} is a part of type {kind!r}; models read text only, send text parts"
        raise bad_request(fact, name, "unsupported_content")
    for field in part:
        if field not in ("type", "text"):
            raise bad_request(f"there is no field {name}.{field}; a text has type and text", f"{name}.{field}")
    if not isinstance(text := part.get("text"), str):
        raise bad_request(f"{name}.text is {_kind(text)}; {_PART}", f"{name}.text")


_PART = 'give {"type": "text", "text": "..."}'


def _kind(value: Any) -> str:
    """The JSON type of a value, with an article."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def prompt_chars(*parts: Any) -> int:
    """The approximate length of a prompt: the characters of all text in its messages, tools and template variables,
    which may be unchecked. A number counts as one."""
    total, rest = 0, list(parts)
    while rest:
        part = rest.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, Mapping):
            rest += part.keys()
            rest += part.values()
        elif isinstance(part, list | tuple):
            rest += part
        else:
            total += 1
    return total
