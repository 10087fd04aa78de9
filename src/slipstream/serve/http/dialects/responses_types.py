"""The bodies of OpenAI's POST /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from slipstream.base.typed import Fields, unsupported
from slipstream.front.served import ServedModel
from slipstream.serve.http.generation.chat_run import Block, BlockDelta, BlockEvent, BlockKind, BlockStart
from slipstream.serve.http.generation.dialect import assistant_message
from slipstream.serve.http.generation.fields import Label, check_fields
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.response import named_event
from slipstream.text.chat_template import known_roles


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class ResponsesRequest(Fields, kw_only=True):
    """Fields that are null or absent have the defaults of the model's generation_config.json."""

    input: Annotated[str | list[dict[str, Any]], _doc("a text, or messages, calls and their results")]
    model: Annotated[str | None, _doc("a name from /v1/models; default: the first model that generates")] = None
    instructions: Annotated[str | None, _doc("the system message; not kept for later responses")] = None
    previous_response_id: Annotated[str | None, _doc("continue the conversation of a stored response")] = None
    store: Annotated[bool | None, _doc("keep the response for later ones; default: true")] = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[dict[str, Any]] | None, _doc("functions that the model can call")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, _doc("auto, none, required, a function, or allowed_tools")] = (
        None
    )
    parallel_tool_calls: Annotated[bool | None, _doc("false: at most one call")] = None
    text: Annotated[dict[str, Any] | None, _doc("format: text, json_object or json_schema")] = None
    reasoning: Annotated[dict[str, Any] | None, _doc("effort, passed to the chat template")] = None
    metadata: Annotated[dict[str, str] | None, _doc("returned with the response")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, _doc("auto: leave out the oldest messages of a long conversation")
    ] = None

    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    include: Annotated[list[str] | None, _doc("nothing: the output has all there is; other values are refused")] = None

    background: Annotated[Any, unsupported("use /v1/batches", False)] = None
    conversation: Annotated[Any, unsupported("use previous_response_id")] = None
    prompt: Annotated[Any, unsupported("the server stores no prompts")] = None
    max_tool_calls: Annotated[Any, unsupported("the server runs no tools; use parallel_tool_calls")] = None
    top_logprobs: Annotated[Any, unsupported("use /v1/chat/completions", 0)] = None
    service_tier: Annotated[Any, unsupported("there is one tier", "auto", "default")] = None
    stream_options: Annotated[Any, unsupported("events are not padded", {}, {"include_obfuscation": False})] = None
    prompt_cache_retention: Annotated[
        Any, unsupported("cached prompts stay until their memory is needed", "in_memory")
    ] = None
    prompt_cache_options: Annotated[Any, unsupported("cached prompts stay until their memory is needed", {})] = None
    context_management: Annotated[Any, unsupported("send the items that the model shall read", [])] = None
    moderation: Annotated[Any, unsupported("the server has no moderation")] = None
    image: Annotated[Any, unsupported("models write text only")] = None
    access_programs: Annotated[Any, unsupported("there are none")] = None


class ResponsesContent(msgspec.Struct, omit_defaults=True):
    """A part of type output_text or reasoning_text."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponsesItem(msgspec.Struct, omit_defaults=True):
    """An item of type reasoning, message or function_call."""

    id: str
    type: str
    status: str
    role: str | None = None
    content: list[ResponsesContent] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ResponsesItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    metadata: dict[str, str] = {}


class ResponsesDeleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"


# Converts the input items of /v1/responses to messages of a chat.

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


# The output of /v1/responses: items of an answer, and the events of a stream.

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseItems:
    """Makes items of blocks; the ids of a response's items have its id."""

    def __init__(self, id: str) -> None:
        self._id = id

    def item(self, block: Block, status: str) -> ResponsesItem:
        id = f"{_PREFIXES[block.kind]}_{self._id}_{block.index}"
        if block.kind == "call":
            return ResponsesItem(id, "function_call", status, call_id=block.id, name=block.name, arguments=block.text)
        if block.kind == "reasoning":
            content = [_part("reasoning", block.text)] if block.text else []
            return ResponsesItem(id, "reasoning", status, summary=[], content=content)
        content = [_part("text", block.text)] if block.text else []
        return ResponsesItem(id, "message", status, role="assistant", content=content)


def _part(kind: BlockKind, text: str) -> ResponsesContent:
    if kind == "reasoning":
        return ResponsesContent("reasoning_text", text)
    return ResponsesContent("output_text", text, annotations=[], logprobs=[])


class ResponseEvents:
    """Writes the events of one stream, which are numbered."""

    def __init__(self, items: ResponseItems) -> None:
        self._items = items
        self._number = 0

    def failed(self, error: HTTPException) -> bytes:
        return self.event("error", message=error.message, code=error.code, param=error.param)

    def event(self, kind: str, **fields: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, numbered)

    def of_block(self, event: BlockEvent, status: str = "completed") -> bytes:
        """`status`: of a block that ends here."""
        block = event.block
        item = self._items.item(Block(block.kind, block.index, "", block.name, block.id), "in_progress")
        ids: dict[str, Any] = {"item_id": item.id, "output_index": block.index}
        if isinstance(event, BlockStart):
            return self._start(block, item, ids)
        if isinstance(event, BlockDelta):
            kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
            if block.kind != "call":
                ids["content_index"] = 0
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            return self.event(f"response.{kind}.delta", **ids, delta=event.text, **more)
        return self._end(block, ids, status)

    def _start(self, block: Block, item: ResponsesItem, ids: dict[str, Any]) -> bytes:
        begun = self.event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return begun
        part = _part(block.kind, "")
        return begun + self.event("response.content_part.added", **ids, content_index=0, part=part)

    def _end(self, block: Block, ids: dict[str, Any], status: str) -> bytes:
        whole = self._items.item(block, status)
        if block.kind == "call":
            name = "response.function_call_arguments.done"
            ended = self.event(name, **ids, name=block.name, arguments=block.text)
        else:
            name = f"response.{'output' if block.kind == 'text' else 'reasoning'}_text.done"
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            ended = self.event(name, **ids, content_index=0, text=block.text, **more)
            part = _part(block.kind, block.text)
            ended += self.event("response.content_part.done", **ids, content_index=0, part=part)
        return ended + self.event("response.output_item.done", output_index=block.index, item=whole)
