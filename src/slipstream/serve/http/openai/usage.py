"""Usage: tokens of a request, as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slipstream.frontend.request_state import RequestState


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(tracks: Sequence[RequestState]) -> Usage:
    prompt = sum(len(track.message.prompt_token_ids) for track in tracks)
    completion = sum(track.num_tokens for track in tracks)
    cached = sum(track.num_cached for track in tracks)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
