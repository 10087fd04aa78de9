"""Converts Anthropic's messages, system prompt and tools to a ChatConversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.anthropic.types import CountTokensRequest, MessagesRequest
from slipstream.serve.http.chat.conversation import ChatConversation
from slipstream.serve.http.chat.dialects import (
    assistant_message,
    chat_params,
    json_shape,
    think_variables,
    thinking_budget,
)
from slipstream.serve.http.chat.nested import check_fields
from slipstream.serve.http.chat.tools import Tools
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.messages import text_messages
from slipstream.serve.http.request import Request

_CACHE = "cache_control"  # prompts are cached without it


def messages_conversation(request: Request, body: CountTokensRequest) -> ChatConversation:
    """Checks the request."""
    served = request.choose_model(body.model, "generate")
    messages = [*_system(body.system), *_messages(served, body.messages)]
    checked = text_messages(request, messages, served.tokenizer)
    effort, shape = _output_config(body.output_config, body.output_format)
    variables, budget = _thinking(served, body.thinking)
    if effort is not None:
        variables |= think_variables(served, effort, "output_config")
    last = messages[-1] if body.messages else {}
    params, limit = SamplingParams(), None
    if isinstance(body, MessagesRequest):
        limit = body.max_tokens
        given = {
            "temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p, "stop": body.stop_sequences,
            "response_format": shape, **budget,
        }  # fmt: skip
        names = {"stop": "stop_sequences", "response_format": "output_config", "thinking_token_budget": "thinking"}
        params = chat_params(request, served, given, limit, names)
    return ChatConversation(
        model=served,
        messages=checked,
        params=params,
        max_tokens=limit,
        tools=_tools(request, body),
        chat_template_kwargs=variables,
        continue_final_message=last.get("role") == "assistant" and not last.get("tool_calls"),
    )


def _system(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not given:
        return []
    text = given if isinstance(given, str) else _texts(given, "system")
    return [{"role": "system", "content": text}]


def _messages(served: ServedModel, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        name = f"messages[{index}]"
        check_fields(message, name, ("role", "content"))
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{name}.role is {role!r:.50}; give user or assistant", f"{name}.role")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise bad_request(f"{name}.content is missing; give a text or a list of blocks", f"{name}.content")
        elif role == "assistant":
            messages.append(_assistant(served, content, f"{name}.content"))
        else:
            messages += _user(role, content, f"{name}.content")
    return messages


def _assistant(served: ServedModel, content: list[Any], name: str) -> dict[str, Any]:
    text, reasoning, calls = "", "", []
    for index, block in enumerate(content):
        path = f"{name}[{index}]"
        kind = _kind(block, path, ("text", "thinking", "tool_use"))
        if kind == "text":
            text += _string(block, "text", path)
        elif kind == "thinking":
            reasoning += _string(block, "thinking", path)
        else:
            if not isinstance(given := block.get("input") or {}, dict):
                raise bad_request(f"{path}.input is no object; give the arguments", f"{path}.input")
            arguments = json.dumps(given, ensure_ascii=False)
            calls.append((_string(block, "id", path), _string(block, "name", path), arguments))
    return assistant_message(served, text, reasoning, calls)


def _user(role: str, content: list[Any], name: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text."""
    found: list[dict[str, Any]] = []
    texts = []
    for index, block in enumerate(content):
        path = f"{name}[{index}]"
        if _kind(block, path, ("text", "tool_result")) == "text":
            texts.append(_string(block, "text", path))
            continue
        inner = block.get("content") or ""
        text = inner if isinstance(inner, str) else _texts(inner, f"{path}.content")
        if block.get("is_error"):
            text = f"Error: {text}"
        found.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", path), "content": text})
    if texts or not found:
        found.append({"role": role, "content": "\n".join(texts)})
    return found


_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),  # ours are empty: there is nothing to verify
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"citations": ([],), "caller": ({"type": "direct"},)}


def _kind(block: Any, path: str, known: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in known:
        fact = f"{path} is a block of type {kind!r:.50}, which is not supported here"
        raise bad_request(f"{fact}; give {', '.join(known)}", path, "unsupported_content")
    check_fields(block, path, ("type", _CACHE, *_FIELDS[kind]), _NEUTRAL)
    _check_cache(block, path)
    return kind


def _check_cache(given: Mapping[str, Any], path: str) -> None:
    """Prompts are cached without cache_control, so only its form is checked."""
    if (cache := given.get(_CACHE)) is not None:
        name = f"{path}.{_CACHE}"
        if not isinstance(cache, dict) or cache.get("type") != "ephemeral":
            raise bad_request(f"{name} is {cache!r:.100}; give type ephemeral", name)
        check_fields(cache, name, ("type", "ttl"))


def _texts(blocks: Any, name: str) -> str:
    if not isinstance(blocks, list):
        raise bad_request(f"{name} must be a text or a list of text blocks", name)
    texts = []
    for index, block in enumerate(blocks):
        _kind(block, f"{name}[{index}]", ("text",))
        texts.append(_string(block, "text", f"{name}[{index}]"))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], field: str, path: str) -> str:
    if not isinstance(value := block.get(field), str):
        raise bad_request(f"{path}.{field} is missing or no text; give a string", f"{path}.{field}")
    return value


_TOOL_FIELDS = ("type", _CACHE, "name", "description", "input_schema", "strict", "eager_input_streaming")
_NEUTRAL_TOOL = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}


def _tools(request: Request, body: CountTokensRequest) -> Tools:
    request.check_count(len(body.tools or ()), "tools")
    tools = []
    for index, tool in enumerate(body.tools or ()):
        name = f"tools[{index}]"
        if (kind := tool.get("type")) not in (None, "custom"):
            raise bad_request(f"{name} is of type {kind!r:.50}; give functions with an input_schema", f"{name}.type")
        check_fields(tool, name, _TOOL_FIELDS, _NEUTRAL_TOOL)
        _check_cache(tool, name)
        if (eager := tool.get("eager_input_streaming")) not in (None, True, False):
            fact = f"{name}.eager_input_streaming is {eager!r:.50}"
            raise bad_request(f"{fact}; give true or false", f"{name}.eager_input_streaming")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        function |= {field: tool[field] for field in ("description", "strict") if tool.get(field) is not None}
        tools.append({"type": "function", "function": function})
    choice, parallel = _tool_choice(body.tool_choice)
    return Tools.check(tools, choice, parallel, schema="input_schema")


def _tool_choice(given: dict[str, Any] | None) -> tuple[Any, bool | None]:
    if given is None:
        return None, None
    known = {"auto": "auto", "any": "required", "none": "none", "tool": None}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in known:
        fact = f"tool_choice is {given!r:.100}"
        raise bad_request(f"{fact}; give type auto, any, tool (with name) or none", "tool_choice")
    names = ("type", "name") if kind == "tool" else ("type",)
    check_fields(given, "tool_choice", (*names, "disable_parallel_tool_use"))
    choice: Any = known[kind] or {"type": "function", "function": {"name": given.get("name")}}
    return choice, False if given.get("disable_parallel_tool_use") else None


_THINKING = ("enabled", "disabled", "adaptive")


def _thinking(served: ServedModel, given: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables of the chat template, and the parameters of a budget."""
    if given is None:
        return {}, {}
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in _THINKING:
        raise bad_request(f"thinking is {given!r:.100}; give type enabled, disabled or adaptive", "thinking")
    check_fields(given, "thinking", ("type", "budget_tokens", "display"))
    if given.get("display") not in (None, "summarized"):
        raise bad_request("thinking.display is not supported: thinking is returned whole; remove it", "thinking")
    if budget is not None and kind != "enabled":
        raise bad_request(f"thinking.budget_tokens needs type enabled, and it is {kind}; remove one", "thinking")
    return think_variables(served, kind != "disabled", "thinking"), thinking_budget(budget, "thinking")


def _output_config(
    config: dict[str, Any] | None, older: dict[str, Any] | None
) -> tuple[str | None, dict[str, Any] | None]:
    """Returns the effort and OpenAI's `response_format`."""
    given = {name: value for name, value in (config or {}).items() if value is not None}
    check_fields(given, "output_config", ("format", "effort"))
    form, effort = given.get("format", older), given.get("effort")
    if not isinstance(effort, str | None):
        raise bad_request(f"output_config is {given!r:.100}; give effort and format", "output_config")
    if older not in (None, form):
        raise bad_request("output_format and output_config.format differ; remove one of them", "output_format")
    if form is None:
        return effort, None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(form, dict) or not isinstance(schema, dict) or form.get("type") != "json_schema":
        name = "output_config" if older is None else "output_format"
        raise bad_request(f"{name} has no schema; give a format of type json_schema with a schema", name)
    check_fields(form, "output_format" if config is None else "output_config.format", ("type", "schema"))
    return effort, json_shape(schema)
