"""A folder's words and their token ids, where its settings name words. No tokenizer is built for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import BadCheckpoint


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}  # by word, or words in their order, each with a weight


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def read_vocabulary(folder: Path) -> dict[str, int]:
    try:
        found = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder} has no tokenizer.json, in which its special words are looked up; add it"
        ) from None
    except msgspec.DecodeError as error:
        raise BadCheckpoint(f"{folder}/tokenizer.json cannot be read: {error}; download it again") from None
    words = found.model.vocab
    if isinstance(words, list):
        words = {str(entry[0]): place for place, entry in enumerate(words) if isinstance(entry, list) and entry}
    return words | {added.content: added.id for added in found.added_tokens}
