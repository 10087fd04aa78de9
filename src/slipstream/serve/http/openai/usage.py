"""Usage: tokens of a request, as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slipstream.frontend.request_state import GenerationRequestState


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(request_states: Sequence[GenerationRequestState]) -> Usage:
    prompt = sum(len(request_state.message.prompt_token_ids) for request_state in request_states)
    completion = sum(request_state.num_tokens for request_state in request_states)
    cached = sum(request_state.num_cached for request_state in request_states)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
