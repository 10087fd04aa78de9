"""Logprobs in OpenAI's two formats: four parallel lists for completions, one object per token for chat.

An answer may have many, so all are JsonLists: a token's logprobs are made when they are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from slipstream.front.results import Logprob, own_logprobs, read_once
from slipstream.serve.http.response import JsonList
from slipstream.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity
_FEW = 512  # tokens with one number or name each


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


Entry = dict[int, Logprob]
"""The logprobs at one token: its own first, then those of the most likely tokens."""


class TokenNames:
    """Names of tokens in logprobs: their text, or bytes if a token ends within a character. Tokens without text,
    as ids that the tokenizer does not have, are named by their id: else all of them would have one name."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes_of(self, token: int) -> bytes | None:
        return None if self._tokenizer is None else self._tokenizer.bytes_of(token)

    def name(self, token: int, prefix: str = "") -> str:
        """`prefix`: put before a name of bytes, such as \\xe6\\x97."""
        data = self.bytes_of(token)
        if self._as_ids or not data:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[Sequence[Entry | None]], starts: Iterable[int], names: TokenNames
) -> CompletionLogprobs:
    """`entries`: of the tokens in one or more parts, None for the first token of a prompt. `starts`: the offset of each
    token in the text."""
    lists: tuple[Any, ...] = (
        JsonList((names.name(token, "bytes:") for token in ids), _FEW),
        JsonList((_bounded(own) for part in entries for own in own_logprobs(part)), _FEW),
        JsonList(_completion_logprob(entry, names) for part in entries for entry in read_once(part)),
        JsonList(starts, _FEW),
    )
    return CompletionLogprobs(*lists)


def _completion_logprob(entry: Entry | None, names: TokenNames) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in entry.items():
        top.setdefault(names.name(token, "bytes:"), _finite(logprob))
    return top


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[Entry], num_top: int, names: TokenNames, given: Sequence[int] = ()
) -> ChatLogprobs:
    """`given`: logprob_token_ids, which follow the `num_top` most likely tokens."""
    content: Any = JsonList(_chat_logprobs(ids, entries, num_top, names, given))
    return ChatLogprobs(content)


def _chat_logprobs(
    ids: Sequence[int], entries: Sequence[Entry], num_top: int, names: TokenNames, given: Sequence[int]
) -> Iterator[ChatLogprob]:
    for token, entry in zip(ids, read_once(entries), strict=True):
        likeliest = sorted(
            (item for item in entry.items() if item[1].rank is not None and item[1].rank <= num_top),
            key=lambda item: item[1].rank or 0,
        )
        shown = dict(likeliest) | {other: entry[other] for other in given if other in entry}
        top = [TopLogprob(*_named(other, logprob, names)) for other, logprob in shown.items()]
        yield ChatLogprob(*_named(token, entry[token], names), top)


def prompt_logprobs(entries: Sequence[Entry | None]) -> Any:
    """vLLM's format: one object per prompt token, keyed by token id. A JsonList of dict[str, PromptLogprob] | None."""
    return JsonList(None if entry is None else _prompt_logprob(entry) for entry in read_once(entries))


def _prompt_logprob(entry: Entry) -> dict[str, PromptLogprob]:
    return {str(token): PromptLogprob(_finite(p), p.rank, p.decoded_token) for token, p in entry.items()}


def token_ids(ids: Sequence[int]) -> Any:
    """A JsonList of token ids."""
    return JsonList(ids, _FEW)


def _named(token: int, logprob: Logprob, names: TokenNames) -> tuple[str, float, list[int] | None]:
    data = names.bytes_of(token)
    return names.name(token), _finite(logprob), None if data is None else list(data)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)


def _bounded(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
