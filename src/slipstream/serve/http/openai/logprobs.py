"""Logprobs in OpenAI's two formats: four parallel lists for completions, one object per token for chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from slipstream.frontend.results import Logprob
from slipstream.text.tokenizer import Tokenizer

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
    ids: Sequence[int], entries: Sequence[Entry | None], starts: Sequence[int], names: TokenNames
) -> CompletionLogprobs:
    """`starts`: the offset of each token in the text. An entry is None for the first token of a prompt."""
    shape = CompletionLogprobs([], [], [], list(starts))
    for token, entry in zip(ids, entries, strict=True):
        shape.tokens.append(names.name(token, "bytes:"))
        if entry is None:
            shape.token_logprobs.append(None)
            shape.top_logprobs.append(None)
            continue
        shape.token_logprobs.append(_finite(entry[token]))
        top: dict[str, float] = {}
        for other, logprob in entry.items():
            top.setdefault(names.name(other, "bytes:"), _finite(logprob))
        shape.top_logprobs.append(top)
    return shape


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[Entry], num_top: int, names: TokenNames, given: Sequence[int] = ()
) -> ChatLogprobs:
    """`given`: logprob_token_ids, which follow the `num_top` most likely tokens."""
    content = []
    for token, entry in zip(ids, entries, strict=True):
        likeliest = sorted(
            (item for item in entry.items() if item[1].rank is not None and item[1].rank <= num_top),
            key=lambda item: item[1].rank or 0,
        )
        shown = dict(likeliest) | {other: entry[other] for other in given if other in entry}
        top = [TopLogprob(*_named(other, logprob, names)) for other, logprob in shown.items()]
        content.append(ChatLogprob(*_named(token, entry[token], names), top))
    return ChatLogprobs(content)


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's format: one object per prompt token, keyed by token id."""
    return [
        None
        if entry is None
        else {str(token): PromptLogprob(_finite(p), p.rank, p.decoded_token) for token, p in entry.items()}
        for entry in entries
    ]


def _named(token: int, logprob: Logprob, names: TokenNames) -> tuple[str, float, list[int] | None]:
    data = names.bytes_of(token)
    return names.name(token), _finite(logprob), None if data is None else list(data)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
