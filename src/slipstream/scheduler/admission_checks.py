"""Checks at submission: raises an error for requests that could never run."""

from __future__ import annotations

from slipstream.base.errors import InvalidPrompt, PromptTooLong, RequestTooLarge
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import NEVER, Request
from slipstream.scheduler.cache.manager import CacheManager


def check_length(num_tokens: int, limit: int, *, wants_output: bool) -> None:
    """Check a prompt against the model length. A prompt that is only pooled may fill it."""
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


def check_admissible(request: Request, config: SchedulerConfig, cache: CacheManager) -> None:
    limit, wants_output = config.max_model_len, request.pooling is None
    check_length(request.num_prompt, limit, wants_output=wants_output)
    max_length = limit if wants_output else request.num_prompt + 1
    assert request.num_prompt < request.max_length <= max_length, f"{request} has a max_length of {request.max_length}"
    length = request.max_length - 1  # the last token is never computed
    if not cache.can_ever_fit(length):
        output = f" and up to {request.max_length - request.num_prompt} of output" if wants_output else ""
        hint = "lower max_tokens" if wants_output else "shorten it"
        raise RequestTooLarge(
            f"the prompt's {request.num_prompt} tokens{output} need {cache.pages_for(length)} cache pages, there are "
            f"{cache.num_usable} in all; {hint} or give the cache more memory"
        )
    if request.next_scored != NEVER and not config.chunked_prefill:
        _check_scores(request.num_prompt - 1, request.params.prompt_logprobs or 0, config.max_step_logprobs)


def admits_any_request(config: SchedulerConfig, cache: CacheManager) -> bool:
    """Whether every prompt within the model length can run."""
    return config.chunked_prefill and cache.can_ever_fit(config.max_model_len - 1)


def _check_scores(num_tokens: int, num_logprobs: int, max_elements: int) -> None:
    """Check a prompt that one step computes as a whole."""
    if (total := num_tokens * (1 + num_logprobs)) > max_elements:
        raise RequestTooLarge(
            f"prompt_logprobs is {num_logprobs}, which makes {total:,} values for {num_tokens} tokens; a step reports "
            f"up to {max_elements:,}, and without chunked prefill a prompt is one step; lower prompt_logprobs, "
            "shorten the prompt or leave enable_chunked_prefill on"
        )
