"""Code that the routes of other chat APIs than OpenAI's share: conversion of parameters, messages and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.params.values import is_deep_json
from slipstream.serve.http.generation.fields import NamedSchema, ObjectFormat, SchemaFormat, sampling_params
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.request import Request
from slipstream.text.chat_template import reads_variable, reasoning_switch

Call = tuple[str, str, str]
"""The id, the name and the arguments (JSON) of a call."""


def chat_params(
    request: Request,
    served: ServedModel,
    given: Mapping[str, Any],
    max_tokens: int | None,
    names: Mapping[str, str],
) -> SamplingParams:
    """Makes SamplingParams of fields in OpenAI's and vLLM's names. `names`: their names in this request."""
    request.field_names.update(names)
    default = served.description.defaults.params.get("max_tokens")
    own = {"logprobs": None, "max_tokens": default if max_tokens is None else max_tokens}
    values = {name: value for name, value in given.items() if value is not None}
    return sampling_params(values, served.inputs, request.state.settings, own, request.field_names)


def json_shape(schema: Mapping[str, Any] | None, *, strict: bool = True) -> ObjectFormat | SchemaFormat:
    """OpenAI's `response_format` for a JSON schema, or for any JSON object."""
    return ObjectFormat() if schema is None else SchemaFormat(NamedSchema(dict(schema), strict=strict))


def assistant_message(served: ServedModel, text: str, reasoning: str, calls: Sequence[Call]) -> dict[str, Any]:
    """An earlier answer of the model. Reasoning is left out where the chat template does not read it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning and _reads_reasoning(served):
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    return message


def _reads_reasoning(served: ServedModel) -> bool:
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    return template is not None and "reasoning_content" in template


def think_variables(served: ServedModel, think: bool | str | None, field: str) -> dict[str, Any]:
    """Variables of the chat template for a switch or an effort of reasoning, whose errors name the request's field.

    Switching off what the template does not have asks for nothing.
    """
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    if think is False and reasoning_switch(template) is None:
        return {}
    try:
        if isinstance(think, str):
            return thinking_variables(served, None, think)
        return thinking_variables(served, think, None)
    except HTTPException as error:
        text = error.message.replace("use enable_thinking", "remove it, or give none to switch reasoning off")
        text = text.replace("reasoning_effort", field).replace("enable_thinking", field)
        raise bad_request(text, field, error.code) from None


def thinking_switch(served: ServedModel, kind: str, budget: int | None, budget_name: str) -> dict[str, Any]:
    """Variables of the chat template for an object `thinking` with a type and a number of tokens."""
    if budget is not None and kind != "enabled":
        name = f"thinking.{budget_name}"
        raise bad_request(f"{name} needs type enabled, and it is {kind}; remove one", name)
    return think_variables(served, kind != "disabled", "thinking")


def call_arguments(text: str) -> dict[str, Any] | msgspec.Raw | None:
    """The arguments of a call as an object, on one line; None if the model wrote none. They are passed on as JSON:
    what a model writes may be nested too deeply for an encoder, or have half of a surrogate pair."""
    if not text.strip():
        return {}
    if is_deep_json(text):
        return None
    try:
        source = msgspec.json.format(text.encode(), indent=-1)
    except msgspec.DecodeError:
        return None
    return msgspec.Raw(source) if source.startswith(b"{") else None


def check_own_fields(message: Any, path: str, owners: Mapping[str, str]) -> None:
    """Raises for a field of a message that has another role than its own: `owners`, by field. Empty ones ask for
    nothing."""
    for name, role in owners.items():
        if getattr(message, name) and message.role != role:
            raise bad_request(f"{path}.{name} is for messages of role {role}; remove it", f"{path}.{name}")


# Turns the fields that control reasoning into variables of the model's chat template.

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def thinking_variables(served: ServedModel, enable_thinking: bool | None, effort: str | None) -> dict[str, Any]:
    """The variables of the template for these fields. Raises for a field that the template does not read."""
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    switch = reasoning_switch(template)
    variables: dict[str, Any] = {}
    if effort is not None:
        if effort not in _EFFORTS:
            raise bad_request(f"reasoning_effort is {effort!r:.100}; give {', '.join(_EFFORTS)}", "reasoning_effort")
        if effort == "none" and switch is not None and enable_thinking is None:
            enable_thinking = False
        elif template is None or not reads_variable(template, "reasoning_effort"):
            raise _unread("reasoning_effort", served, switch)
        else:
            variables["reasoning_effort"] = effort
    if enable_thinking is not None:
        if switch is None:
            raise _unread("enable_thinking", served, switch)
        variables[switch] = enable_thinking
    return variables


def _unread(name: str, served: ServedModel, switch: str | None) -> Exception:
    hint = "use enable_thinking" if name == "reasoning_effort" and switch else "remove it"
    fact = f"{name} has no effect: the chat template of {served.description.name} does not read it"
    return bad_request(f"{fact}; {hint}", name, "unsupported_parameter")
