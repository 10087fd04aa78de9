"""Logprobs in OpenAI's two shapes: four lists side by side for completions, an object a token for chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from slipstream.engine.front.results import Logprob

LOWEST = -9999.0  # JSON has no infinity


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


Entry = Mapping[int, Logprob]
"""Of one token: itself first, then the likeliest."""


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[Entry | None], offset: int, text_of: Callable[[int], str] | None
) -> tuple[CompletionLogprobs, int]:
    """Of tokens from this place in the text on; and the place after them. None has no logprob: a text's first token.

    `text_of` writes a token; without it tokens are written as ids.
    """
    shape = CompletionLogprobs([], [], [], [])
    as_ids = text_of is None
    for token, entry in zip(ids, entries, strict=True):
        text = f"token_id:{token}" if text_of is None else text_of(token)
        shape.tokens.append(text)
        shape.text_offset.append(offset)
        offset += len(text)
        if entry is None:
            shape.token_logprobs.append(None)
            shape.top_logprobs.append(None)
            continue
        shape.token_logprobs.append(_finite(entry[token]))
        top: dict[str, float] = {}
        for other, logprob in entry.items():
            top.setdefault(_name(other, logprob, as_ids), _finite(logprob))
        shape.top_logprobs.append(top)
    return shape, offset


def chat_logprobs(ids: Sequence[int], entries: Sequence[Entry], num_top: int, *, as_ids: bool) -> ChatLogprobs:
    content = []
    for token, entry in zip(ids, entries, strict=True):
        likeliest = sorted(
            (item for item in entry.items() if item[1].rank is not None and item[1].rank <= num_top),
            key=lambda item: item[1].rank or 0,
        )
        top = [TopLogprob(*_named(other, logprob, as_ids)) for other, logprob in likeliest]
        content.append(ChatLogprob(*_named(token, entry[token], as_ids), top))
    return ChatLogprobs(content)


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's shape: for each prompt token an object by token id."""
    return [
        None
        if entry is None
        else {str(token): PromptLogprob(_finite(p), p.rank, p.decoded_token) for token, p in entry.items()}
        for entry in entries
    ]


def _named(token: int, logprob: Logprob, as_ids: bool) -> tuple[str, float, list[int]]:
    text = _name(token, logprob, as_ids)
    return text, _finite(logprob), list(text.encode())


def _name(token: int, logprob: Logprob, as_ids: bool) -> str:
    if as_ids or logprob.decoded_token is None:
        return f"token_id:{token}"
    return logprob.decoded_token


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
