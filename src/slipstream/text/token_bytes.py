"""The bytes of a token of the vocabulary.

A token may be a part of a character, which has bytes but no text. Byte-level vocabularies write each byte as a letter;
SentencePiece vocabularies have tokens like <0xE2> for bytes without a piece.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any


def token_bytes(decoder: dict[str, Any] | None, piece: str) -> bytes | None:
    """The bytes of a piece inside a text, by the decoder of tokenizer.json; None if that decoder is not supported.

    At the start of a text some decoders remove a space, which is not considered here.
    """
    if decoder is None:
        return piece.encode()
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        match part:
            case {"type": "ByteLevel"}:
                return letter_bytes(piece)
            case {"type": "ByteFallback"}:
                if (byte := fallback_byte(piece)) is not None:
                    return bytes([byte])
            case {"type": "Metaspace", "replacement": mark}:
                piece = piece.replace(mark, " ")
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
                piece = piece.replace(old, new)
            case {"type": "Fuse" | "Strip"}:
                pass
            case _:
                return None
    return piece.encode()


_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the library's parser accepts a plus sign


def fallback_byte(piece: str) -> int | None:
    """The byte of a piece like <0xE2>; None for other pieces."""
    found = _FALLBACK.fullmatch(piece) if len(piece) == 6 else None
    return int(found[1], 16) if found else None


@lru_cache(maxsize=65_536)
def letter_bytes(piece: str) -> bytes:
    """The bytes of a piece in byte letters. A piece with other characters (an added token) is its own text."""
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write printable Latin-1 bytes as themselves and the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
