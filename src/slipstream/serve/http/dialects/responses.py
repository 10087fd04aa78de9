"""OpenAI's /v1/responses, with conversations that the server keeps."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from slipstream.front.prompts import off_loop
from slipstream.serve.http.dialects.responses_types import (
    FlatSchema,
    InputMessage,
    ReasoningOptions,
    ResponsesChoice,
    ResponsesRequest,
    ResponsesTool,
    TextOptions,
    input_messages,
    tools_of,
)
from slipstream.serve.http.generation.chat_run import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockKind,
    BlockStart,
    ChatRun,
    Ended,
    respond,
    text_of,
)
from slipstream.serve.http.generation.conversation import ChatConversation, read_messages
from slipstream.serve.http.generation.dialect import assistant_message, chat_params, json_shape, think_variables
from slipstream.serve.http.generation.fields import TextFormat
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.request import Request, delete, get, limit_of, newest_first, post, query_of, refused
from slipstream.serve.http.server.response import (
    COMMENT,
    EVENT_STREAM,
    Response,
    StreamFormat,
    StreamingResponse,
    json_response,
    named_event,
)
from slipstream.serve.http.server.state import StoredResponse

_NO_REASONING = ReasoningOptions(effort=None, summary=None)


class _Job:
    """One request: its conversation, and the writer of its response."""

    def __init__(self, request: Request, body: ResponsesRequest) -> None:
        self.request = request
        self.body = body
        self.served = request.choose_model(body.model, "generate")
        self.stores = body.store is not False and not request.in_batch
        _check_batch(request, body)
        # random: without API keys, and for the item ids, the id is what another caller would have to guess
        self.token = secrets.token_hex(24)
        self.id = f"resp_{self.token}"
        self.created = int(time.time())
        self.history = [*self._before(), *input_messages(self.served, body.input)]
        if not self.history:
            raise bad_request("input is empty; give a text or items", "input")
        self.conversation = self._conversation()
        self.format = StreamFormat(EVENT_STREAM, COMMENT, self._failed)
        self._number = 0  # of the next event

    def _before(self) -> list[dict[str, Any]]:
        """The messages of the response that this one continues."""
        if (id := self.body.previous_response_id) is None:
            return []
        found = self.request.state.responses.find(_owner(self.request), id)
        if found is None:
            error = _not_found(id)
            error.param = "previous_response_id"
            raise error
        messages: list[dict[str, Any]] = msgspec.json.decode(found.messages)
        return messages

    def _conversation(self) -> ChatConversation:
        body, request, served = self.body, self.request, self.served
        system = [] if not body.instructions else [{"role": "system", "content": body.instructions}]
        messages = read_messages(request, [*system, *self.history], served.tokenizer)
        request.set_input_field("input")
        request.check_count(len(body.tools or ()), "tools")
        self.shape = (body.text.format if body.text is not None else None) or TextFormat()
        shape: Any = self.shape
        if isinstance(shape, FlatSchema):
            shape = json_shape(shape.schema, strict=shape.strict is not False)
        given = {"temperature": body.temperature, "top_p": body.top_p, "response_format": shape}
        names = {"max_tokens": "max_output_tokens", "response_format": "text"}
        self.params = chat_params(request, served, given, body.max_output_tokens, names)
        effort = None if body.reasoning is None or body.reasoning.effort is UNSET else body.reasoning.effort
        return ChatConversation(
            model=served,
            messages=messages,
            params=self.params,
            max_tokens=body.max_output_tokens,
            truncates=body.truncation == "auto",
            tools=tools_of(body),
            chat_template_kwargs=think_variables(served, effort, "reasoning"),
        )

    async def whole(self, ended: Ended) -> ResponsesObject:
        """Returns the response, and stores it."""
        blocks, status = ended.blocks, _status(ended.reason)
        response = self.response(status, blocks)
        if status == "incomplete":
            reason = "max_output_tokens" if ended.reason == "length" else str(ended.reason)
            response.incomplete_details = {"reason": reason}
        response.usage = await self.usage(ended)
        if self.stores:
            text, calls = text_of(blocks, "text"), [block for block in blocks if block.kind == "call"]
            made = [(call.id, call.name, call.text or "{}") for call in calls]
            answer = assistant_message(self.served, text, text_of(blocks, "reasoning"), made)
            messages = [*self.history, *([answer] if text or calls else [])]
            given = self.body.input
            items = [InputMessage(role="user", content=given)] if isinstance(given, str) else given
            stored = StoredResponse(_owner(self.request), *map(msgspec.json.encode, (response, messages, items)))
            self.request.state.responses.add(self.id, stored)
        return response

    async def usage(self, ended: Ended) -> ResponsesUsage:
        state, thought = ended.run.state, text_of(ended.blocks, "reasoning")
        num_prompt, num_output = len(state.message.prompt_token_ids), state.num_tokens
        tokenizer, num_thought = self.served.tokenizer, 0
        if thought and tokenizer is not None:
            ids = await off_loop(len(thought), partial(tokenizer.encode, thought, add_special_tokens=False))
            num_thought = len(ids)
        details = {"reasoning_tokens": min(num_thought, num_output)}
        cached = {"cached_tokens": state.num_cached}
        return ResponsesUsage(num_prompt, cached, num_output, details, num_prompt + num_output)

    def response(self, status: str, blocks: list[Block]) -> ResponsesObject:
        """`status`: also that of the last item, with which the output ends."""
        body = self.body
        items = [_item(self.token, block, "completed") for block in blocks]
        if items:
            items[-1].status = status
        return ResponsesObject(
            id=self.id,
            created_at=self.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.served.description.name,
            output=items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=_NO_REASONING if body.reasoning in (None, ReasoningOptions()) else body.reasoning,
            store=self.stores,
            temperature=self.params.temperature,
            text=TextOptions(self.shape),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=self.params.top_p,
            truncation=body.truncation or "disabled",
            metadata=body.metadata or {},
        )

    # the events of a stream, which are numbered

    def _failed(self, error: HTTPException) -> bytes:
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, numbered)

    def begin(self, run: ChatRun) -> bytes:
        begun = self.response("in_progress", [])
        return b"".join([self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")])

    def events(self, found: list[BlockEvent]) -> bytes:
        return b"".join(map(self._of_block, found))

    async def end(self, ended: Ended) -> bytes:
        whole = await self.whole(ended)
        return self._event(f"response.{whole.status}", response=whole)

    def _of_block(self, event: BlockEvent) -> bytes:
        block = event.block
        item = _item(self.token, Block(block.kind, block.index, "", block.name, block.id), "in_progress")
        ids: dict[str, Any] = {"item_id": item.id, "output_index": block.index}
        if block.kind != "call":
            ids["content_index"] = 0
        name = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        match event:
            case BlockDelta(text=text):
                return self._event(f"response.{name}.delta", **ids, delta=text, **more)
            case BlockStart():
                begun = self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind == "call":
                    return begun
                return begun + self._event("response.content_part.added", **ids, part=_part(block.kind, ""))
            case BlockEnd(reason=reason):
                status = "completed" if reason is None else _status(reason)
                whole = _item(self.token, block, status)
                if block.kind == "call":
                    ended = self._event(f"response.{name}.done", **ids, name=block.name, arguments=block.text)
                else:
                    ended = self._event(f"response.{name}.done", **ids, text=block.text, **more)
                    part = _part(block.kind, block.text)
                    ended += self._event("response.content_part.done", **ids, part=part)
                return ended + self._event("response.output_item.done", output_index=block.index, item=whole)


def _status(reason: str | None) -> str:
    return "completed" if reason in ("stop", "tool_calls") else "incomplete"


def _check_batch(request: Request, body: ResponsesRequest) -> None:
    """Raises for fields that need the store, which has an owner for each response: a line of a batch has no API key."""
    for name, is_given in (("store", body.store), ("previous_response_id", body.previous_response_id is not None)):
        if request.in_batch and is_given:
            fact = f"{name} is not supported in a batch, whose responses are in its output file only"
            raise bad_request(f"{fact}; remove it, and send whole conversations", name, "unsupported_parameter")


# The response, whole or as the events of a stream.


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
    reasoning: ReasoningOptions
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: ResponsesChoice
    tools: list[ResponsesTool]
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    metadata: dict[str, str] = {}


def _part(kind: BlockKind, text: str) -> ResponsesContent:
    if kind == "reasoning":
        return ResponsesContent("reasoning_text", text)
    return ResponsesContent("output_text", text, annotations=[], logprobs=[])


_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


def _item(response: str, block: Block, status: str) -> ResponsesItem:
    """`response`: the random part of its id, which the ids of its items have too."""
    id = f"{_PREFIXES[block.kind]}_{response}_{block.index}"
    if block.kind == "call":
        return ResponsesItem(id, "function_call", status, call_id=block.id, name=block.name, arguments=block.text)
    content = [_part(block.kind, block.text)] if block.text else []
    if block.kind == "reasoning":
        return ResponsesItem(id, "reasoning", status, summary=[], content=content)
    return ResponsesItem(id, "message", status, role="assistant", content=content)


# The routes.


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


async def create_response(request: Request, body: ResponsesRequest) -> Response | StreamingResponse:
    job = _Job(request, body)
    return await respond(request, job.conversation, job, stream=bool(body.stream))


async def show_response(request: Request, body: None) -> Response:
    query_of(request)
    return Response(_stored(request).body)


async def list_input_items(request: Request, body: None) -> Response:
    query = query_of(request, "limit", "after", "order")
    limit, after = limit_of(query, 100, 20), query.get("after")
    given = msgspec.json.decode(_stored(request).items, type=list[dict[str, Any]])
    items = [{**item, "id": item.get("id") or f"item_{index}"} for index, item in enumerate(given)]
    if newest_first(query):
        items.reverse()
    if after is not None:
        # the last item of that id: the ids are the client's, and may be equal
        start = next((index for index in range(len(items), 0, -1) if items[index - 1]["id"] == after), None)
        if start is None:
            raise bad_request(f"after is {after[:100]!r}, which is the id of no item; remove it", "after")
        items = items[start:]
    shown = items[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return json_response(InputItemList(shown, first, last, len(items) > limit))


async def delete_response(request: Request, body: None) -> Response:
    id = request.path_params["response"]
    if not request.state.responses.delete(_owner(request), id):
        raise _not_found(id)
    return json_response(ResponsesDeleted(id))


def _stored(request: Request) -> StoredResponse:
    id = request.path_params["response"]
    if (found := request.state.responses.find(_owner(request), id)) is None:
        raise _not_found(id)
    return found


def _owner(request: Request) -> str:
    return request.state.keys.owner(request.headers)


def _not_found(id: str) -> HTTPException:
    fact = f"there is no response {id[:100]}: the server keeps the last ones in memory"
    return HTTPException(404, f"{fact}; send the whole conversation", param="response_id", code="response_not_found")


ROUTES = [
    post("/v1/responses", create_response, "OpenAI's responses", ResponsesRequest, response_model=ResponsesObject),
    get("/v1/responses/{response}", show_response, "A stored response", response_model=ResponsesObject),
    get("/v1/responses/{response}/input_items", list_input_items, "Its input", response_model=InputItemList),
    delete("/v1/responses/{response}", delete_response, "Forget a response", response_model=ResponsesDeleted),
    refused("/v1/responses/{response}/cancel", "responses do not run in the background"),
]
