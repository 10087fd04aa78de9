"""A folder's words and their token ids, for settings that name words. No tokenizer is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.json_file import read_file, read_utf8
from slipstream.errors import BadCheckpoint


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}  # by word; or a list of words in order, each with a weight


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def read_vocabulary_lines(path: Path) -> dict[str, int]:
    """From a vocab.txt: one word per line, whose id is the line number."""
    try:
        lines = read_utf8(path).split("\n")
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download it again") from None
    if lines and not lines[-1]:  # after the last line break
        del lines[-1]
    return {line.rstrip(): number for number, line in enumerate(lines)}


def read_vocabulary(folder: Path) -> dict[str, int]:
    if not (folder / "tokenizer.json").is_file() and (folder / "vocab.txt").is_file():
        return read_vocabulary_lines(folder / "vocab.txt")
    try:
        found = msgspec.json.decode(read_file(folder / "tokenizer.json"), type=_Tokenizer)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder} has no tokenizer.json, in which its special words are looked up; add it"
        ) from None
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        raise BadCheckpoint(f"{folder}/tokenizer.json cannot be read: {error}; download it again") from None
    words = found.model.vocab
    if isinstance(words, list):
        words = {str(entry[0]): index for index, entry in enumerate(words) if isinstance(entry, list) and entry}
    return words | {added.content: added.id for added in found.added_tokens}
