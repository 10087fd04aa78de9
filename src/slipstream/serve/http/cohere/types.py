"""The bodies of Cohere's POST /v2/chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from slipstream.serve.http.openai.fields import Refused


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class CohereChatRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    messages: list[dict[str, Any]]
    stream: bool | None = None
    tools: Annotated[list[Any] | None, _doc("functions that the model can call")] = None
    strict_tools: Annotated[bool | None, _doc("arguments must match the schemas of the tools")] = None
    tool_choice: Annotated[Literal["REQUIRED", "NONE"] | None, _doc("default: the model decides")] = None
    response_format: Annotated[dict[str, Any] | None, _doc("type text or json_object, with json_schema")] = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: Annotated[int | None, _doc("keep this many most likely tokens; 0: all")] = None
    p: Annotated[float | None, _doc("keep the smallest set of tokens whose probabilities sum to this")] = None
    thinking: Annotated[dict[str, Any] | None, _doc("type enabled or disabled, token_budget")] = None
    priority: Annotated[int | None, _doc("lower values are scheduled first")] = None
    documents: Refused = None
    citation_options: Refused = None
    safety_mode: Refused = None
    logprobs: Refused = None
    raw_prompting: Refused = None


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "documents": (([],), "put them into the messages"),
    "citation_options": (({"mode": "OFF"}, {"mode": "off"}, {"mode": "DISABLED"}), "answers have no citations"),
    "safety_mode": (("OFF", "NONE"), "put instructions into the system message"),
    "logprobs": ((False,), "use /v1/chat/completions"),
    "raw_prompting": ((False,), "use /v1/completions"),
}


class CohereFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CohereToolCall(msgspec.Struct, omit_defaults=True):
    function: CohereFunction
    id: str | None = None
    type: str | None = None


class CohereContent(msgspec.Struct, omit_defaults=True):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None


class CohereMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: list[CohereContent] | None = None
    tool_plan: str | None = None
    tool_calls: list[CohereToolCall] | None = None


class CohereTokens(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class CohereUsage(msgspec.Struct):
    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int


class CohereChatResponse(msgspec.Struct):
    id: str
    finish_reason: str
    message: CohereMessage
    usage: CohereUsage
