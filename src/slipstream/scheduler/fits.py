"""Refuses what could not run however long it waited."""

from __future__ import annotations

from slipstream.errors import InvalidPrompt, PromptTooLong, RequestTooLarge
from slipstream.request import Request
from slipstream.scheduler.cache.manager import CacheManager


def check_length(num_tokens: int, limit: int, *, wants_output: bool) -> None:
    """Of a prompt, against the model length. One that is only pooled may fill it."""
    if num_tokens == 0:
        raise InvalidPrompt("the prompt has no tokens; give at least one")
    if num_tokens + wants_output > limit:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, which leaves no room for output within the model "
            f"length of {limit}; shorten it or raise --max-model-len"
            if wants_output
            else f"the prompt has {num_tokens} tokens, the model length is {limit}; shorten it, set "
            "truncate_prompt_tokens or raise --max-model-len"
        )


def check_fits(request: Request, limit: int, cache: CacheManager) -> None:
    wants_output = request.pooling is None
    check_length(request.num_prompt, limit, wants_output=wants_output)
    most = limit if wants_output else request.num_prompt + 1
    assert request.num_prompt < request.max_length <= most, f"{request} has a max_length of {request.max_length}"
    length = request.max_length - 1  # the last token is never computed
    if not cache.can_ever_fit(length):
        output = f" and up to {request.max_length - request.num_prompt} of output" if wants_output else ""
        way_out = "lower max_tokens" if wants_output else "shorten it"
        raise RequestTooLarge(
            f"the prompt's {request.num_prompt} tokens{output} need {cache.pages_for(length)} cache pages, there are "
            f"{cache.num_usable} in all; {way_out} or give the cache more memory"
        )
