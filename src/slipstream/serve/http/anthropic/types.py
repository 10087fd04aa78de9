"""The bodies of Anthropic's POST /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.serve.http.openai.fields import Label, Refused


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that form the prompt."""

    model: str
    messages: Annotated[list[dict[str, Any]], _doc("the last may be the assistant's: its text is continued")]
    system: Annotated[str | list[dict[str, Any]] | None, _doc("the system message")] = None
    tools: Annotated[list[dict[str, Any]] | None, _doc("functions that the model can call")] = None
    tool_choice: Annotated[dict[str, Any] | None, _doc("type is auto, any, tool or none")] = None
    thinking: Annotated[dict[str, Any] | None, _doc("type is enabled, disabled or adaptive")] = None
    output_config: Annotated[dict[str, Any] | None, _doc("effort; format with a JSON schema")] = None
    output_format: Annotated[dict[str, Any] | None, _doc("older name of output_config.format")] = None
    cache_control: Label = None
    user_profile_id: Label = None
    workspace_id: Label = None
    speed: Refused = None
    mcp_servers: Refused = None
    context_management: Refused = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Label = None
    service_tier: Refused = None
    container: Refused = None
    diagnostics: Refused = None
    inference_geo: Refused = None


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "speed": (("standard",), "there is one speed"),
    "diagnostics": (({},), "see /metrics and the server's log"),
    "mcp_servers": (([],), "the server calls no other servers"),
    "context_management": (({},), "send the messages that the model shall read"),
    "service_tier": (("auto", "standard_only"), "there is one tier"),
    "container": ((), "the server runs no code"),
    "inference_geo": (("global",), "there is one region"),
}


class ContentBlock(msgspec.Struct, omit_defaults=True):
    """A block of type text, thinking or tool_use."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | msgspec.Raw | None = None


class MessagesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessagesResponse(msgspec.Struct):
    id: str
    type: str
    role: str
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(msgspec.Struct):
    input_tokens: int
