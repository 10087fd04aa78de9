"""Checks that a chat template reads every field of the messages, and converts tool calls for templates without them.

A template silently drops a field that it does not read, such as a mistyped name. So messages record which fields are
read, and a field that was given and not read is an error after rendering.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Annotated, Any

from slipstream.base.errors import InvalidPrompt
from slipstream.base.typed import InnerFields, Mismatch, convert, wanted
from slipstream.params.values import is_deep_json

IS_TEXT = b"="  # begins an answer of the process that runs templates, if it is a text: the others are JSON objects

_TOOL_FIELDS = ("tool_call_id", "name")  # of a tool message: name the call, which a template need not read


_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names of one field of the assistant's messages


class TextPart(InnerFields, tag="text"):
    text: str


Part = Annotated[TextPart, wanted("an object of type text: models read text only")]
"""A part of a message's content. Another kind that models read is a further member of it: `Annotated[TextPart | ...,
untagged("text")]`."""
Content = str | list[str | Part]


class ImageMark:
    """The position of an image among the parts of a message, where the front end has taken the image."""


def read_content(given: Any, path: str) -> str | list[Part | ImageMark] | None:
    """The content of a message, checked: a text, or parts, where a string is a text. `path`: its place, for errors."""
    if given is None or isinstance(given, str):
        return given
    marks = {}
    if isinstance(given, list):
        marks = {number: part for number, part in enumerate(given) if isinstance(part, ImageMark)}
        given = ["" if number in marks else part for number, part in enumerate(given)] if marks else given
    try:
        parts = convert(Content, given, path)
    except Mismatch as error:
        raise InvalidPrompt(str(error), param=error.path, code=error.code) from None
    read = [TextPart(part) if isinstance(part, str) else part for part in parts]
    return [marks.get(number, part) for number, part in enumerate(read)] if marks else read


class NotedMessage(dict[str, Any]):
    """A message that records which of its fields are read."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(message)
        self._read: set[str] = set()

    def unread(self) -> list[str]:
        return [name for name in dict.keys(self) if name not in self._read]

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._read_all()
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self._read_all()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._read_all()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._read_all()
        return super().items()

    def __repr__(self) -> str:
        self._read_all()
        return super().__repr__()

    __str__ = __repr__

    def _read_all(self) -> None:
        self._read.update(dict.keys(self))


class Parts(list[dict[str, str]]):
    """The text parts of a message. A template that prints it as a string fails, instead of printing a Python list."""

    def __repr__(self) -> str:
        raise TypeError("the content of a message is a list of parts")

    __str__ = __repr__


def check_read(messages: Sequence[NotedMessage]) -> None:
    """Raises for a given field that the template did not read, and for a message that it skipped."""
    shows_content = any("content" not in message.unread() for message in messages)
    for index, message in enumerate(messages):
        role = dict.get(message, "role")
        unread = [name for name in message.unread() if dict.get(message, name) not in (None, "", [], {})]
        unread = [name for name in unread if name != "role" and (name != "content" or shows_content)]
        if role == "tool":
            unread = [name for name in unread if name not in _TOOL_FIELDS]
        if role == "assistant":  # templates print the reasoning of some messages only, or of none
            unread = [name for name in unread if name not in _REASONING_FIELDS]
        if "content" in unread:
            # some templates print the tool calls of a message and not its content
            if dict.get(message, "tool_calls") and "tool_calls" not in unread:
                unread.remove("content")
            else:
                raise InvalidPrompt(
                    f"the chat template skips message {index}, of role {role!r}; remove it, or give it another role",
                    param=f"messages[{index}].role",
                )
        if unread:
            near = difflib.get_close_matches(unread[0], ("role", "content", "tool_calls", "tool_call_id", "name"), n=1)
            hint = f"did you mean {near[0]}?" if near and near[0] != unread[0] else "remove it"
            raise InvalidPrompt(
                f"message {index} has the field {unread[0]!r}, which the chat template does not read; {hint}",
                param=f"messages[{index}].{unread[0]}",
            )


def check_tool_calls(calls: Any, message: int) -> list[Any]:
    """Checks tool calls in the format of OpenAI's API, and parses arguments, which clients send as JSON strings and
    templates take as objects."""
    name = f"messages[{message}].tool_calls"
    if not isinstance(calls, list | tuple):
        raise InvalidPrompt(f"{name} is {type(calls).__name__}; give a list of calls", param=name)
    return [_checked_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _checked_call(call: Any, name: str) -> Mapping[str, Any]:
    shape = 'give {"type": "function", "id": ..., "function": {"name": ..., "arguments": ...}}'
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        raise InvalidPrompt(f"{name} is not a function call; {shape}", param=name)
    inner = call.get("function", call)
    if not isinstance(inner.get("name"), str):
        raise InvalidPrompt(f"{name} has no function name; {shape}", param=f"{name}.function.name")
    if "function" not in call:
        _check_fields(call, name, (*_CALL_FIELDS, "name", "arguments"))
    else:
        _check_fields(call, name, _CALL_FIELDS)
        _check_fields(inner, f"{name}.function", ("name", "arguments"))
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        if is_deep_json(arguments):
            return call
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return call  # arguments generated by a model may be invalid JSON
        inner = {**inner, "arguments": arguments}
        return {**call, "function": inner} if "function" in call else inner
    return call


_CALL_FIELDS = ("id", "type", "index", "function")  # index: of a call in a stream, the same as in the list


def _check_fields(given: Mapping[str, Any], path: str, known: tuple[str, ...]) -> None:
    for field, value in given.items():
        if value is not None and field not in known:
            name = f"{path}.{field[:100]}"
            raise InvalidPrompt(f"there is no field {name}; remove it", param=name)


def with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """For a template without tool calls: appends them to the content as JSON, so that the history keeps them."""
    made = dict(message)
    calls = made.pop("tool_calls", None)
    if calls:
        shown = []
        for call in calls:
            inner = call.get("function", call)
            known = {"id": call.get("id"), "name": inner["name"], "arguments": inner.get("arguments")}
            shown.append({name: value for name, value in known.items() if value is not None})
        text = json.dumps({"tool_calls": shown}, ensure_ascii=False)
        made["content"] = f"{made['content']}\n{text}" if made.get("content") else text
    return made


def with_reasoning(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message with its reasoning under the name that the template reads, whichever name the request has."""
    given = [name for name in _REASONING_FIELDS if name in message]
    if not given or message.get("role") != "assistant":
        return message
    known = [name for name in _REASONING_FIELDS if re.search(rf"\b{name}\b", template) is not None]
    if not known or known[0] in given:
        return message
    made = {name: value for name, value in message.items() if name not in given}
    made[known[0]] = message[given[0]]
    return made


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON, for templates that take no objects."""
    return _with_arguments(message, lambda given: _as_json(given) if isinstance(given, Mapping) else given)


def with_object_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as objects, for templates that take nothing else: a model may have
    written text that is none."""

    def as_object(given: Any) -> Any:
        if isinstance(given, Mapping):
            return given
        return {} if given is None else {"text": given if isinstance(given, str) else _as_json(given)}

    return _with_arguments(message, as_object)


def _with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    made = dict(message)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = []
        for call in calls:
            inner = call.get("function", call)
            if (changed := change(inner.get("arguments"))) is not None:
                inner = {**inner, "arguments": changed}
            made["tool_calls"].append({**call, "function": inner} if "function" in call else inner)
    return made


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def knows_calls(template: str) -> bool:
    return re.search(r"\btool_calls\b", template) is not None
