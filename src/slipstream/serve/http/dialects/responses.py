"""OpenAI's /v1/responses, with conversations that the server keeps."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from slipstream.front.prompts import off_loop
from slipstream.front.served import ServedModel
from slipstream.serve.http.dialects.responses_types import (
    InputItemList,
    ResponseEvents,
    ResponseItems,
    ResponsesDeleted,
    ResponsesObject,
    ResponsesRequest,
    ResponsesUsage,
    input_messages,
)
from slipstream.serve.http.generation.chat_run import AnswerBlocks, Block, ChatRun, blocks_of, start_chat
from slipstream.serve.http.generation.conversation import ChatConversation, text_messages
from slipstream.serve.http.generation.dialect import assistant_message, chat_params, think_variables
from slipstream.serve.http.generation.fields import check_fields
from slipstream.serve.http.generation.tools import Tools
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.request import Request, delete, get, limit_of, newest_first, post, query_of, refused
from slipstream.serve.http.server.response import (
    COMMENT,
    EVENT_STREAM,
    Response,
    StreamFormat,
    StreamingResponse,
    json_response,
)
from slipstream.serve.http.server.state import StoredResponse


async def create_response(request: Request, body: ResponsesRequest) -> Response | StreamingResponse:
    job = _Job(request, body)
    run = await start_chat(request, job.conversation, stream=bool(body.stream))
    if body.stream:
        events = ResponseEvents(job.items)
        return StreamingResponse(job.events(run, events), StreamFormat(EVENT_STREAM, COMMENT, events.failed))
    with run:
        (answer,) = await run.answers()
        return json_response(await job.finish(run, blocks_of(answer), answer.finish_reason))


class _Job:
    """One request: its conversation, and the construction of its response."""

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
        _check_include(body.include)
        before = self._before()
        self.history = [*before, *input_messages(self.served, body.input, "input")]
        if not self.history:
            raise bad_request("input is empty; give a text or items", "input")
        self.conversation = self._conversation()
        self.items = ResponseItems(self.token)

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
        messages = text_messages(request, [*system, *self.history], served.tokenizer)
        request.set_input_field("input")
        self.shape, shape = _text_format(body.text)
        given = {"temperature": body.temperature, "top_p": body.top_p, "response_format": shape}
        names = {"max_tokens": "max_output_tokens", "response_format": "text"}
        names["response_format.json_schema"] = "text.format"
        self.params = chat_params(request, served, given, body.max_output_tokens, names)
        return ChatConversation(
            model=served,
            messages=messages,
            params=self.params,
            max_tokens=body.max_output_tokens,
            truncates=body.truncation == "auto",
            tools=_tools(request, body),
            chat_template_kwargs=_reasoning(served, body.reasoning),
        )

    async def events(self, run: ChatRun, events: ResponseEvents) -> AsyncIterator[bytes]:
        blocks, has_begun = AnswerBlocks(), False
        with run:
            async for parts in run:
                chunks = []
                for part in parts:
                    if not has_begun:
                        has_begun = True
                        begun = self.response("in_progress", [])
                        chunks += [events.event(f"response.{name}", response=begun) for name in _BEGIN]
                    chunks += [events.of_block(each) for each in blocks.feed(part.events)]
                    if part.finish_reason is not None:
                        chunks += [events.of_block(each, _status(part.finish_reason)) for each in blocks.end()]
                        whole = await self.finish(run, blocks.all, part.finish_reason)
                        chunks.append(events.event(f"response.{whole.status}", response=whole))
                if chunks:
                    yield b"".join(chunks)

    async def finish(self, run: ChatRun, blocks: list[Block], reason: str | None) -> ResponsesObject:
        """Returns the response, and stores it."""
        status = _status(reason)
        response = self.response(status, blocks)
        if status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens" if reason == "length" else str(reason)}
        response.usage = await self.usage(run, blocks)
        if self.stores:
            texts = {kind: "".join(block.text for block in blocks if block.kind == kind) for kind in _TEXTS}
            calls = [(block.id, block.name, block.text or "{}") for block in blocks if block.kind == "call"]
            answer = assistant_message(self.served, texts["text"], texts["reasoning"], calls)
            messages = [*self.history, *([answer] if texts["text"] or calls else [])]
            given = self.body.input
            items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
            stored = StoredResponse(_owner(self.request), *map(msgspec.json.encode, (response, messages, items)))
            self.request.state.responses.add(self.id, stored)
        return response

    async def usage(self, run: ChatRun, blocks: list[Block]) -> ResponsesUsage:
        state = run.state
        num_prompt, num_output = len(state.message.prompt_token_ids), state.num_tokens
        thought = "".join(block.text for block in blocks if block.kind == "reasoning")
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
        items = [self.items.item(block, "completed") for block in blocks]
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
            reasoning=body.reasoning or {"effort": None, "summary": None},
            store=self.stores,
            temperature=self.params.temperature,
            text={"format": self.shape},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=self.params.top_p,
            truncation=body.truncation or "disabled",
            metadata=body.metadata or {},
        )


def _status(reason: str | None) -> str:
    return "completed" if reason in ("stop", "tool_calls") else "incomplete"


_BEGIN = ("created", "in_progress")
_TEXTS = ("text", "reasoning")


def _check_include(given: list[str] | None) -> None:
    for name in given or ():
        fact = f"include has {name[:100]!r}, which is not supported"
        if name == "reasoning.encrypted_content":
            fact += ": reasoning is returned as text, in the content of its item, which can be sent back"
        raise bad_request(f"{fact}; remove it", "include")


def _check_batch(request: Request, body: ResponsesRequest) -> None:
    """Raises for fields that need the store, which has an owner for each response: a line of a batch has no API key."""
    for name, is_given in (("store", body.store), ("previous_response_id", body.previous_response_id is not None)):
        if request.in_batch and is_given:
            fact = f"{name} is not supported in a batch, whose responses are in its output file only"
            raise bad_request(f"{fact}; remove it, and send whole conversations", name, "unsupported_parameter")


def _text_format(given: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the format as given, and as `response_format` of the chat API."""
    given = {name: value for name, value in (given or {}).items() if value is not None}
    shape = given.get("format", {"type": "text"})
    check_fields(given, "text", ("format",), {"verbosity": ("medium",)})
    if not isinstance(shape, dict) or shape.get("type") not in ("text", "json_object", "json_schema"):
        raise bad_request("text.format has another type than text, json_object or json_schema; give one", "text")
    if shape["type"] == "json_schema":
        return shape, {"type": "json_schema", "json_schema": {k: v for k, v in shape.items() if k != "type"}}
    if shape.keys() - {"type"}:
        raise bad_request(f"text.format of type {shape['type']} takes no other field; remove it", "text")
    return shape, None if shape["type"] == "text" else {"type": "json_object"}


_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_NEUTRAL_TOOL = {"defer_loading": (False,), "allowed_callers": (["direct"],)}


def _tools(request: Request, body: ResponsesRequest) -> Tools:
    request.check_count(len(body.tools or ()), "tools")
    tools = []
    for index, tool in enumerate(body.tools or ()):
        name = f"tools[{index}]"
        if (kind := tool.get("type")) != "function":
            fact = f"{name} is of type {kind!r:.50}, and the server runs no tools"
            raise bad_request(f"{fact}; give functions", f"{name}.type")
        check_fields(tool, name, _TOOL_FIELDS, _NEUTRAL_TOOL)
        function = {field: tool[field] for field in _TOOL_FIELDS[1:] if tool.get(field) is not None}
        tools.append({"type": "function", "function": function})
    choice: Any = body.tool_choice
    if isinstance(choice, dict):
        choice = _choice(choice)
    return Tools.check(tools, choice, body.parallel_tool_calls, schema="parameters")


def _choice(given: dict[str, Any]) -> dict[str, Any]:
    """The object `tool_choice` in the format of the chat API."""
    kind, some = given.get("type"), given.get("tools")
    if kind == "allowed_tools" and isinstance(some, list) and all(isinstance(each, dict) for each in some):
        check_fields(given, "tool_choice", ("type", "mode", "tools"))
        for index, each in enumerate(some):
            check_fields(each, f"tool_choice.tools[{index}]", ("type", "name"))
        tools = [{"type": each.get("type"), "function": {"name": each.get("name")}} for each in some]
        return {"type": kind, kind: {"mode": given.get("mode"), "tools": tools}}
    if kind != "function":
        fact, named = f"tool_choice is {given!r:.100}", '{"type": "function", "name": ...}'
        hint = f'give auto, none, required, {named} or {{"type": "allowed_tools", "mode": ..., "tools": [...]}}'
        raise bad_request(f"{fact}; {hint}", "tool_choice")
    check_fields(given, "tool_choice", ("type", "name"))
    return {"type": "function", "function": {"name": given.get("name")}}


def _reasoning(served: ServedModel, given: dict[str, Any] | None) -> dict[str, Any]:
    given = given or {}
    # auto: reasoning is returned whole, not summarised
    check_fields(given, "reasoning", ("effort",), {"summary": ("auto",), "generate_summary": ("auto",)})
    if not isinstance(effort := given.get("effort"), str | None):
        raise bad_request(f"reasoning.effort is {effort!r:.50}; give a string", "reasoning")
    return think_variables(served, effort, "reasoning")


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
