from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.errors import BadTokenizer
from slipstream.text.gguf_vocab import gguf_tokenizer
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import byte_tokenizer

CASES = json.loads((Path(__file__).parent.parent / "data" / "smollm2_tokens.json").read_text(encoding="utf-8"))["cases"]


def fields(**given: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in given.items()}


def byte_level(**given: Any) -> dict[str, Any]:
    """The letters of all bytes, a few merges, two control tokens and a user-defined one."""
    vocab = sorted(byte_tokenizer().get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocab] + ["he", "12", "123", "Ġa", "zz", "<s>", "</s>", "<tool>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    base = dict(model="gpt2", pre="default", tokens=tokens, token_type=types, merges=["h e", "1 2", "12 3", "Ġ a"])
    return fields(**{**base, "bos_token_id": len(tokens) - 3, "eos_token_id": len(tokens) - 2, **given})


def test_smollm_agrees_with_the_fixture_on_every_string(smollm: Tokenizer) -> None:
    assert len(CASES) == 211
    assert [case["text"] for case in CASES if smollm.encode(case["text"]) != case["ids"]] == []


def test_smollm_gives_back_the_text_it_took(smollm: Tokenizer) -> None:
    for case in CASES:
        assert smollm.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_smollm_ends_a_turn_with_im_end(smollm: Tokenizer) -> None:
    assert smollm.eos_token_id == 2
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.bos_token_id == 1
    assert smollm.vocab_size == 49152
    assert smollm.is_special(2) and not smollm.is_special(19556)


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("default", "he 123 a", ["he", "Ġ", "123", "Ġa"]),
        ("smollm", "he 123 a", ["he", "Ġ", "1", "2", "3", "Ġa"]),
        ("qwen2", "he123", ["he", "1", "2", "3"]),
        ("llama-bpe", "he123123", ["he", "123", "123"]),
        ("llama-bpe", "he1212312", ["he", "12", "1", "2", "3", "1", "2"]),
        ("llama-bpe", "zz", ["zz"]),  # a whole word needs no merges there
        ("default", "zz", ["z", "z"]),
        ("tekken", "zz", ["zz"]),
        ("tekken", "he123heHE", ["he", "1", "2", "3", "he", "H", "E"]),
        ("gpt-4o", "he1231 a", ["he", "123", "1", "Ġa"]),
        ("gpt-4o", "zz", ["z", "z"]),
        ("dbrx", "he1231 a", ["he", "123", "1", "Ġa"]),
        ("deepseek-llm", "he123", ["he", "1", "2", "3"]),
        ("falcon", "he1231", ["he", "123", "1"]),
        ("superbpe", "he 1212", ["he", "Ġ", "1", "2", "12"]),
        ("gpt-2", "he<tool>he<s>", ["he", "<tool>", "he", "<s>"]),
    ],
)
def test_text_is_split_as_the_file_says(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer(byte_level(pre=pre, add_bos_token=False))
    assert tokenizer.encode(text).tokens == pieces


def test_qwen_composes_characters_first() -> None:
    assert gguf_tokenizer(byte_level(pre="qwen2")).encode("e\u0301").ids == gguf_tokenizer(byte_level()).encode("é").ids


@pytest.mark.parametrize(
    "given, begins, ends",
    [
        (dict(add_bos_token=True), True, False),
        (dict(add_bos_token=True, add_eos_token=True), True, True),
        (dict(add_bos_token=False), False, False),
        (dict(pre="llama-bpe"), True, False),
        (dict(pre="qwen2"), False, False),
        (dict(pre="tekken"), True, False),
        (dict(pre="gpt-4o"), False, False),
        (dict(pre="falcon3", add_bos_token=False), False, False),
    ],
)
def test_the_ends_of_a_text_are_added_as_the_file_says(given: dict[str, Any], begins: bool, ends: bool) -> None:
    tokens = gguf_tokenizer(byte_level(**given)).encode("x").tokens
    assert tokens == ["<s>"] * begins + ["x"] + ["</s>"] * ends


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = gguf_tokenizer(byte_level())
    ids = tokenizer.encode("<s>a<tool>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(model="rwkv"), ["'rwkv'", "tokenizer=..."]),
        (dict(pre="klingon"), ["'klingon'", "smollm", "tokenizer=..."]),
        (dict(merges=["he"]), ["'he'", "not two tokens"]),
        (dict(merges=["h zz"]), ["broken"]),
        (dict(tokens=["a", "a"], token_type=[1, 1]), ["'a' is listed twice"]),
        (dict(token_type=[1]), ["1 types"]),
        (dict(tokens=None), ["tokenizer.ggml.tokens is missing"]),
        (dict(merges=[1]), ["tokenizer.ggml.merges is missing or of the wrong kind"]),
    ],
)
def test_a_vocabulary_we_cannot_use_is_refused_with_the_alternative(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadTokenizer) as caught:
        gguf_tokenizer(byte_level(**given))
    for word in [*words, "skip_tokenizer_init"]:
        assert word in str(caught.value)


# -- SentencePiece-like


def sentence_piece(rng: random.Random, **given: Any) -> dict[str, Any]:
    pieces = {"".join(rng.choice("▁abc") for _ in range(rng.randrange(2, 6))) for _ in range(60)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", *sorted(pieces)]
    types = [2, 3, 3] + [6] * 256 + [1] * (4 + len(pieces))
    scores = [0.0] * 259 + [-1000.0] * 4 + [float(-rank) for rank in rng.sample(range(len(pieces)), len(pieces))]
    base = dict(model="llama", tokens=tokens, token_type=types, scores=scores, bos_token_id=1, eos_token_id=2)
    return fields(**{**base, "unknown_token_id": 0, **given})


def merge_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's own rule, the slow way: join the neighbours whose union scores best, the leftmost first."""
    score_of = dict(zip(tokens, scores, strict=True))
    parts = list(text)
    while True:
        joins = [
            (score_of[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in score_of
        ]
        if not joins:
            break
        place = -max(joins)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids = []
    for part in parts:
        names = [part] if part in score_of else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [tokens.index(name) for name in names]
    return ids


def test_pieces_with_scores_merge_by_score_and_fall_back_to_bytes() -> None:
    rng = random.Random(11)
    for _ in range(10):
        given = sentence_piece(rng, add_bos_token=False)
        tokens, scores = given["tokenizer.ggml.tokens"], given["tokenizer.ggml.scores"]
        tokenizer = gguf_tokenizer(given)
        for _ in range(50):
            text = "".join(rng.choice("abc aé") for _ in range(rng.randrange(1, 14)))
            expected = merge_by_score("▁" + text.replace(" ", "▁"), tokens, scores)
            ids = tokenizer.encode(text).ids
            assert ids == expected, text
            assert tokenizer.decode(ids) == text


def test_sentence_pieces_begin_with_bos_and_may_go_without_the_added_space() -> None:
    given = sentence_piece(random.Random(0))
    assert gguf_tokenizer(given).encode("").tokens == ["<s>"]
    plain = gguf_tokenizer({**given, **fields(add_space_prefix=False, add_bos_token=False)})
    assert plain.encode("é").tokens == ["<0xC3>", "<0xA9>"]
    assert plain.decode(plain.encode(" a").ids) == " a"
