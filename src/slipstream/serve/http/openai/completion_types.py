"""The bodies of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.fields import GenerationFields
from slipstream.serve.http.openai.generation import Usage
from slipstream.serve.http.openai.logprobs import CompletionLogprobs, PromptLogprob


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        msgspec.Meta(description="a text, a list of token ids, or a list of either; required without prompt_embeds"),
    ] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        msgspec.Meta(description="base64 of a tensor [tokens, hidden size] by torch.save, or a list; before prompt"),
    ] = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[
        str | None, msgspec.Meta(description="text after the output, for models with fill-in-the-middle tokens")
    ] = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def prompts_of(given: str | list[str | int | list[int]] | None) -> list[Any]:
    """Returns a list of prompts, where one prompt or a list is given. A list of integers is one prompt."""
    if given is None:
        raise bad_request("prompt is missing; give a text, token ids or a list of them", "prompt")
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if kinds in ({str}, {list}):
        return list(given)
    raise bad_request(
        "prompt is empty; give a text, token ids or a list of them"
        if not given
        else "prompt mixes texts and token ids; give a list of one kind",
        "prompt",
    )
