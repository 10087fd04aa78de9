"""The bytes of single tokens, of which some end within a character."""

from __future__ import annotations

import pytest

from slipstream.text.tokenizer import Tokenizer
from tokenizer_zoo import KINDS, make_tokenizer

TEXT = "日本語 is é 🙂, don't\n  two"


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_its_tokens_are_the_text(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    whole = b"".join(map(tokenizer.bytes_of, tokenizer.encode(TEXT, add_special_tokens=False)))
    if kind != "unigram":  # whose vocabulary has not all of these characters
        assert whole.decode().removeprefix(" ") == TEXT


def test_a_character_in_parts_has_its_bytes_in_parts() -> None:
    for kind in ("bytes", "pieces, space before the first", "gguf pieces"):
        tokenizer = make_tokenizer(kind)
        ids = tokenizer.encode("日", add_special_tokens=False)[-3:]
        assert [tokenizer.bytes_of(token) for token in ids] == [b"\xe6", b"\x97", b"\xa5"]
        assert tokenizer.text_of(ids[0]) == "\ufffd"  # by itself it is no text


def test_every_token_of_a_real_vocabulary_has_the_bytes_that_decoding_shows(smollm: Tokenizer) -> None:
    for token in range(smollm.vocab_size):
        assert smollm.bytes_of(token).decode(errors="replace") == smollm.text_of(token)


def test_a_space_at_the_beginning_of_a_piece_is_among_its_bytes() -> None:
    """Decoded alone it would be left out, as it is at the beginning of a text."""
    tokenizer = make_tokenizer("gguf pieces")
    the = tokenizer.backend.token_to_id("▁the")
    assert tokenizer.bytes_of(the) == b" the" and tokenizer.text_of(the) == "the"


def test_special_and_unknown_ids() -> None:
    tokenizer = make_tokenizer("bytes")
    assert tokenizer.bytes_of(258) == b"<|im_end|>" and tokenizer.bytes_of(10**6) == b""
