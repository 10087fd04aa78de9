"""Names that scripts for vLLM import besides LLM: prompts, and what methods have no use for.

docs/vllm.md lists what each does here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypedDict

from slipstream.base.errors import InvalidParams


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str  # its text, for the result
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    prompt_embeds: Any  # a torch tensor or numpy array [tokens, hidden size]
    prompt: str  # its text, for the result
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt

_UNUSED = {
    "tokenization_kwargs": "give truncate_prompt_tokens in the parameters",
    "mm_processor_kwargs": "models read text only",
    "trace_headers": "traces are those of slipstream serve",
    "data_parallel_rank": "one device runs the whole model",
    "reasoning_ended": "a thinking budget follows the text of the prompt",
    "reset_connector": "cached pages of other engines are copied when they are used",
    "reasoning_parser_kwargs": "parsers have no arguments",
}


def check_unused(given: Mapping[str, Any], *known: str) -> None:
    """Raises for arguments of a method that are not in this list, or whose value is not None or empty."""
    for name in given:
        if name not in known:
            raise TypeError(f"unexpected argument {name!r}")
    refuse_unused(**given)


def refuse_unused(**given: Any) -> None:
    """Raises for an argument of vLLM that this engine does not use, unless it is None or empty."""
    for name, value in given.items():
        if value not in (None, {}, [], False):
            raise InvalidParams(f"{name} is not supported: {_UNUSED[name]}", param=name)


def refuse_running_reset() -> NoReturn:
    """Raises for `reset_running_requests` of engines that run in another thread or process."""
    raise InvalidParams(
        "reset_running_requests is for LLM and LLMEngine with one replica; use pause_generation(mode='wait') first",
        param="reset_running_requests",
    )
