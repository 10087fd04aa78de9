from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from slipstream.text.detokenizer import Detokenizer
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import IM_END, byte_tokenizer

PIECES = ["▁", "▁▁", "▁the", "the", "▁a▁b", "é", "漢", "", " ", ".", "n't", "<0x+1>", "<0xZZ>", "##s", "Ġ", "Ãĥ"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def piece_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """A vocabulary of awkward pieces; only decoding matters."""
    vocab = {piece: i for i, piece in enumerate([*PIECES, *BYTES])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("ÿ plain", special=False), AddedToken("é", special=False)])
    return Tokenizer(backend)


DECODERS: dict[str, Callable[[], decoders.Decoder | None]] = {
    "byte level": decoders.ByteLevel,
    "llama": lambda: decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": lambda: decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "two spaces off": lambda: decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]
    ),
    "metaspace": decoders.Metaspace,
    "metaspace never": lambda: decoders.Metaspace(prepend_scheme="never"),
    "none": lambda: None,
    "word piece, not modelled": decoders.WordPiece,
}


def in_increments(tokenizer: Tokenizer, ids: list[int], rng: random.Random, skip: bool) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    increments = []
    place = 0
    while place < len(ids):
        count = rng.choice((0, 1, 1, 1, 2, 5))
        increments.append(detokenizer.push(ids[place : place + count]))
        place += count
    return increments, detokenizer.finish()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_increments_are_the_whole_decoding(name: str, skip: bool) -> None:
    tokenizer = piece_tokenizer(DECODERS[name]())
    rng = random.Random(7)
    few = range(len(PIECES))
    high = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "A €🙂".encode()]
    for _ in range(400):
        pool = rng.choice((few, [*few, *high], high, range(tokenizer.vocab_size + 3)))
        ids = [rng.choice(pool) for _ in range(rng.randrange(12))]
        increments, rest = in_increments(tokenizer, ids, rng, skip)
        assert "".join(increments) + rest == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("skip", [True, False])
def test_bytes_in_any_order_decode_as_a_whole(skip: bool) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    rng = random.Random(3)
    awkward = [*"A é€🙂".encode(), 0xED, 0xA0, 0x80, 0xFF, 0xC0, 0xF5, IM_END]
    for _ in range(3000):
        ids = [rng.choice(awkward) for _ in range(rng.randrange(10))]
        increments, rest = in_increments(tokenizer, ids, rng, skip)
        assert "".join(increments) + rest == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_random_ids_of_the_real_vocabulary(smollm: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(50):
        ids = [rng.randrange(smollm.vocab_size + 2) for _ in range(200)]
        increments, rest = in_increments(smollm, ids, rng, skip=True)
        assert "".join(increments) + rest == smollm.decode(ids)


def test_a_character_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(Tokenizer(byte_tokenizer()))
    assert [detokenizer.push([byte]) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.finish() == ""


def test_a_broken_character_appears_when_it_is_known_to_be_broken_or_at_the_end() -> None:
    detokenizer = Detokenizer(Tokenizer(byte_tokenizer()))
    assert [detokenizer.push([byte]) for byte in (0xE2, 0x82, 0x41, 0xF0)] == ["", "", "\ufffdA", ""]
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert Detokenizer(tokenizer).push([65, IM_END, 66]) == "AB"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([65, IM_END, 66]) == "A<|im_end|>B"


def test_words_of_a_long_output_stream_as_they_come(smollm: Tokenizer) -> None:
    ids = smollm.encode("The quick brown fox. " * 50)
    detokenizer = Detokenizer(smollm)
    assert all(detokenizer.push([token]) for token in ids)  # each of these tokens is certain at once


def test_a_llama_word_streams_without_its_leading_space() -> None:
    tokenizer = piece_tokenizer(DECODERS["llama"]())
    the, first = (tokenizer.backend.token_to_id(piece) for piece in ("▁the", "<0xE2>"))
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in (the, the, first, the)] == ["the", " the", "", "\ufffd the"]


def test_spaces_between_special_tokens() -> None:
    """A tokenizer that joins tokens by spaces; two special tokens in a row may do without."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(backend)
    ids = [2, 3, 0, 1, 3, 2, 2, 0]
    for spaces, text in ((True, "<s> </s> a b </s> <s> <s> a"), (False, "<s></s> a b </s><s><s> a")):
        whole = Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert whole.push(ids) + whole.finish() == text
        single = Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert "".join(single.push([token]) for token in ids) + single.finish() == text
    hidden = Detokenizer(tokenizer, skip_special_tokens=True, spaces_between_special_tokens=False)
    assert hidden.push(ids) + hidden.finish() == "a b a"
