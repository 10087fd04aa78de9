"""Excerpts: the first and last tokens of long texts, and that a text has too many, without reading all of it."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from slipstream.base.errors import InvalidPrompt
from slipstream.text.excerpt import MARGIN, Excerpts, first_size, max_chars
from slipstream.text.tokenizer import Tokenizer
from text.test_pieces import Counting, bytewise, wordpiece


def unigram() -> Backend:
    """As XLM-RoBERTa's: pieces with scores, and a text without spaces is one word."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.5), ("▁cat", -2.5), ("a", -3.0), ("aa", -4.0), ("ab", -3.5)]
    pieces += [(letter, -4.0) for letter in "bcehtsxyz.,\n"]
    backend = Backend(models.Unigram(pieces, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def joined() -> Backend:
    """As Llama 2's: no words are seen, spaces are letters, and one is put before the text."""
    letters = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz.,\n", "th", "the", "▁the", "ca", "▁ca", "aa", "aaaa", "▁▁"]
    merges = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("▁", "ca"), ("a", "a"), ("aa", "aa")]
    backend = Backend(models.BPE({token: i for i, token in enumerate(letters)}, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


KINDS = {
    "wordpiece": wordpiece, "bytes in words": lambda: bytewise(True), "bytes": lambda: bytewise(False),
    "unigram": unigram, "joined": joined,
}  # fmt: skip
TEXTS = {
    "words": lambda draw: " ".join(draw.choice(["the", "cat", "sat.", "x,y", "aaab"]) for _ in range(6_000)),
    "lines": lambda draw: "".join(draw.choice(["the cat", "\n", "\n\n", " ", "  ", "abc"]) for _ in range(9_000)),
    "one letter": lambda draw: "a" * 30_001,
    "one word": lambda draw: "".join(draw.choice("abctheaa") for _ in range(30_000)),
    "words without spaces": lambda draw: "".join(draw.choice(["the", "cat", ".", "aa", ","]) for _ in range(9_000)),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def tokenizer(request):
    return Counting(request.param())


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("limit", [1, 50, 700])
def test_first_and_last_tokens_and_too_many_are_those_of_the_whole_text(tokenizer, text, limit):
    text = text(random.Random(limit))
    whole = tokenizer.encode(text, add_special_tokens=False)
    excerpts = Excerpts(tokenizer)
    beginning, end = excerpts.beginning(text, limit), excerpts.end(text, limit)
    assert text.startswith(beginning) and text.endswith(end)
    assert tokenizer.encode(beginning, add_special_tokens=False)[:limit] == whole[:limit]
    assert tokenizer.encode(end, add_special_tokens=False)[-limit:] == whole[-limit:]
    assert excerpts.exceeds(text, limit) == (len(whole) > limit)


@pytest.mark.parametrize("text", ["the cat sat. " * 100_000, "thecat" * 200_000], ids=["words", "one word"])
def test_of_a_long_text_about_as_much_is_read_as_is_asked_for(tokenizer, text):
    if isinstance(tokenizer.backend.model, models.WordPiece) and " " not in text:
        return  # which makes one unknown token of a long word, however long it is
    for limit in (10, 1000):
        tokenizer.read = 0
        assert Excerpts(tokenizer).exceeds(text, limit)
        assert tokenizer.read <= 6 * first_size(limit) + 4096
        if " " in text:
            tokenizer.read = 0
            Excerpts(tokenizer).end(text, limit)
            assert tokenizer.read <= 6 * first_size(limit)


def test_a_text_that_has_hardly_any_tokens_is_read_so_far_and_no_further(monkeypatch):
    monkeypatch.setattr("slipstream.text.excerpt._MIN_CHARS", 2**14)  # 2**20 takes the library seconds
    tokenizer = Counting(wordpiece())
    excerpts = Excerpts(tokenizer)
    most = max_chars(100)
    for text in ("x" * (4 * most), " " * (4 * most), "the cat" + " " * (4 * most)):
        for read in (excerpts.beginning, excerpts.end, excerpts.exceeds):
            tokenizer.read = 0
            with pytest.raises(InvalidPrompt, match="spaces"):
                read(text, 100)
            assert tokenizer.read <= 2.5 * most
        assert excerpts.beginning(text[:most], 100) == text[:most]  # which is not too long


def test_where_each_byte_is_a_token_characters_alone_tell_that_a_text_is_too_long():
    tokenizer = Counting(bytewise(True))
    excerpts = Excerpts(tokenizer)
    assert excerpts.longest_token() == 3  # the
    tokenizer.read = 0
    assert excerpts.exceeds("the" * 700, 30) and excerpts.exceeds("é" * 700, 30)
    assert tokenizer.read == 0


@pytest.mark.parametrize("change", ["nfkc", "strips", "removes", "no bytes", "a missing byte", "wordpiece"])
def test_a_tokenizer_that_may_drop_characters_is_asked(change):
    backend = bytewise(True)
    if change == "nfkc":
        backend.normalizer = normalizers.NFKC()
    elif change == "strips":
        backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    elif change == "removes":
        parts = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif change == "no bytes":
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    elif change == "a missing byte":
        backend = Backend(models.BPE({"a": 0, "b": 1}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    else:
        backend = wordpiece()
    assert Excerpts(Tokenizer(backend)).longest_token() is None


def test_composing_characters_may_make_a_text_shorter():
    backend = bytewise(True)
    backend.normalizer = normalizers.NFC()
    assert Excerpts(Tokenizer(backend)).longest_token() == 12


def test_the_margin_is_part_of_what_is_read_first():
    assert first_size(0) >= 2 * MARGIN
