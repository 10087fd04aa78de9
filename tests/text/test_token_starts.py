"""Offsets of tokens slice the text."""

from __future__ import annotations

import random

import pytest

from slipstream.text.detokenizer import PromptStarts, TokenStarts
from slipstream.text.tokenizer import Tokenizer
from text.test_detokenizer import DECODERS, PIECES, piece_tokenizer
from tokenizer_zoo import KINDS, make_tokenizer

TEXTS = ["日本語 is", "the 🙂🙂 é", "a", " leading", "don't\n\n  two  spaces ", "é" * 5 + "日本語" * 3]


def slices(text: str, starts: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unigram"])
@pytest.mark.parametrize("text", TEXTS)
def test_each_token_has_the_characters_that_it_completes(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text)
    starts = list(PromptStarts(tokenizer, ids, text, add_special_tokens=True))
    parts = slices(text, starts)
    assert "".join(parts) == text
    whole = b"".join(b"" if tokenizer.is_special(token) else tokenizer.bytes_of(token) for token in ids)
    added = len(whole.decode()) - len(text)  # a space before the text, which it does not have
    data = b""
    for place, token in enumerate(ids):
        data += b"" if tokenizer.is_special(token) else tokenizer.bytes_of(token)
        complete = data.decode(errors="ignore")[added:]
        if place + 1 < len(ids):
            assert "".join(parts[: place + 1]) == complete, (place, parts)


@pytest.mark.parametrize("kind", KINDS)
def test_in_any_increments_they_are_the_same(kind: str) -> None:
    tokenizer, rng = make_tokenizer(kind), random.Random(5)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(20)]
        whole = list(TokenStarts(tokenizer, start=3).push(ids))
        again, place = TokenStarts(tokenizer, start=3), 0
        found: list[int] = []
        while place < len(ids):
            count = rng.randint(0, 4)
            found += again.push(ids[place : place + count])
            place += count
        assert found == whole == sorted(whole) and whole[0] == 3


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_where_no_character_is_open_a_token_starts_where_the_text_before_it_ends(name: str, skip: bool) -> None:
    tokenizer, rng = piece_tokenizer(DECODERS[name]()), random.Random(1)
    bytes_of = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "é日".encode()]
    for _ in range(300):
        pool = rng.choice((range(len(PIECES)), [*range(len(PIECES)), *bytes_of]))
        ids = [rng.choice(pool) for _ in range(rng.randrange(1, 10))]
        text = tokenizer.decode(ids, skip)
        starts = list(TokenStarts(tokenizer, skip_special_tokens=skip).push(ids))
        assert starts == sorted(starts) and starts[0] == 0
        for place, start in enumerate(starts):
            before = tokenizer.decode(ids[:place], skip)
            if text.startswith(before) and "\ufffd" not in text and name != "word piece, not modelled":
                assert start == len(before), (ids, place)


def test_special_tokens_have_no_width_where_the_text_leaves_them_out() -> None:
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    assert list(TokenStarts(tokenizer).push(ids)) == [0, 1, 1]
    assert list(TokenStarts(tokenizer, skip_special_tokens=False).push(ids)) == [0, 1, 11]


def test_a_prompt_that_spells_special_tokens_is_sliced_as_it_was_given() -> None:
    tokenizer = make_tokenizer("pieces, space before the first")
    text = "<|im_start|>the 日<|im_end|>"
    ids = tokenizer.encode(text)
    starts = list(PromptStarts(tokenizer, ids, text, add_special_tokens=True))
    parts = slices(text, starts)
    assert parts[0] == "" and parts[1] == "<|im_start|>" and parts[-1] == "<|im_end|>"
    assert "".join(parts) == text and starts == sorted(starts)


def test_a_prompt_that_the_tokenizer_changes_is_sliced_as_it_was_given() -> None:
    tokenizer = make_tokenizer("byte-level, regex")  # which composes characters first
    text = "cafe\u0301 is"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) != text
    starts = list(PromptStarts(tokenizer, ids, text, add_special_tokens=True))
    assert "".join(slices(text, starts)).endswith(" is") and len(text) - 3 in starts


def test_long_texts_take_the_same_time_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a decoder is not followed token by token: what is decoded for a token has a bounded length."""
    tokenizer = piece_tokenizer(DECODERS["word piece, not modelled"]())
    lengths: list[int] = []
    decode = Tokenizer.decode

    def noted(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    list(TokenStarts(tokenizer).push([3] * 1000))
    assert max(lengths) < 20
