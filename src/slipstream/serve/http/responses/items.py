"""Converts the input items of /v1/responses to messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.front.served import ServedModel
from slipstream.serve.http.chat.dialects import assistant_message
from slipstream.serve.http.chat.nested import check_fields
from slipstream.serve.http.errors import bad_request
from slipstream.text.chat_template import known_roles

_FIELDS = {  # id and status are labels of an item
    "message": ("role", "content", "id", "status"),
    "function_call": ("call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("call_id", "output", "id", "status"),
    "reasoning": ("summary", "content", "id", "status"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"caller": ({"type": "direct"},), "async": (False,)}
_PART_FIELDS = {
    "input_text": ("text",), "output_text": ("text",), "text": ("text",), "refusal": ("refusal",),
    "reasoning_text": ("text",), "summary_text": ("text",),
}  # fmt: skip
_NEUTRAL_PART: dict[str, tuple[Any, ...]] = {"annotations": ([],), "logprobs": ([],)}


def input_messages(served: ServedModel, given: str | Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The messages of the items. Reasoning, text and calls of one answer are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    answer = _Answer(served)
    for index, item in enumerate(given):
        where = f"{name}[{index}]"
        kind = _kind(item, where)
        if kind == "reasoning":
            content = _texts(item.get("content") or [], f"{where}.content", ("reasoning_text",))
            summary = _texts(item.get("summary") or [], f"{where}.summary", ("summary_text",))
            answer.last_reasoning += content or summary
            continue
        if kind == "function_call":
            answer.settle()
            call = (_string(item, field, where) for field in ("call_id", "name", "arguments"))
            answer.calls.append(tuple(call))
            continue
        if kind == "message" and item.get("role") == "assistant":
            if answer.text or answer.calls:  # the reasoning behind them is that of this item
                reasoning, answer.last_reasoning = answer.last_reasoning, ""
                messages += answer.take()
                answer.last_reasoning = reasoning
            answer.settle()
            answer.text = _texts(item.get("content"), f"{where}.content", _TEXT_KINDS)
            continue
        messages += answer.take()
        if kind == "message":
            text = _texts(item.get("content"), f"{where}.content", _TEXT_KINDS)
            messages.append({"role": _role(served, item.get("role"), where), "content": text})
        else:
            text = _texts(item.get("output"), f"{where}.output", _TEXT_KINDS)
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})
    return messages + answer.take()


_TEXT_KINDS = ("input_text", "output_text", "text", "refusal")


class _Answer:
    """The items of an earlier answer so far."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._reset()

    def _reset(self) -> None:
        self.reasoning, self.text = "", ""
        self.last_reasoning = ""  # of the item that follows, if it is of the answer too
        self.calls: list[Any] = []

    def settle(self) -> None:
        self.reasoning, self.last_reasoning = self.reasoning + self.last_reasoning, ""

    def take(self) -> list[dict[str, Any]]:
        """Takes the message of the turn; none if there are no items."""
        self.settle()
        if not (self.text or self.calls):
            self._reset()
            return []
        message = assistant_message(self._served, self.text, self.reasoning, self.calls)
        self._reset()
        return [message]


def _kind(item: dict[str, Any], where: str) -> str:
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        fact = f"{where} is an item of type {kind!r:.50}, which is not supported"
        raise bad_request(f"{fact}; give {', '.join(_FIELDS)}", where, "unsupported_content")
    if item.get("encrypted_content") is not None:
        name = f"{where}.encrypted_content"
        fact = f"{name} is not supported: only the server that wrote it can read it"
        raise bad_request(f"{fact}; give the reasoning as content", name, "unsupported_parameter")
    check_fields(item, where, ("type", *_FIELDS[kind]), _NEUTRAL)
    return kind


def _role(served: ServedModel, role: Any, where: str) -> str:
    """`developer` is `system` for templates that do not know it."""
    if role not in ("user", "system", "developer"):
        raise bad_request(f"{where}.role is {role!r:.50}; give user, system, developer or assistant", f"{where}.role")
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    if role == "developer" and not (template is not None and "developer" in known_roles(template)):
        return "system"
    return str(role)


def _texts(content: Any, where: str, kinds: tuple[str, ...]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} is missing; give a text or a list of parts", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            fact = f"{where}[{index}] is a part of type {kind!r:.50}, which is not supported here"
            raise bad_request(f"{fact}; give {kinds[0]}", f"{where}[{index}]", "unsupported_content")
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", f"{where}[{index}]"))
        check_fields(part, f"{where}[{index}]", ("type", *_PART_FIELDS[kind]), _NEUTRAL_PART)
    return "".join(texts)


def _string(item: dict[str, Any], field: str, where: str) -> str:
    if not isinstance(value := item.get(field), str):
        raise bad_request(f"{where}.{field} is missing or no text; give a string", f"{where}.{field}")
    return value
