"""The vocabulary that grammars see: every token's bytes are those that it adds to a text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

import smollm2_oracle
from slipstream.scheduler.grammar.native_matcher import grammar_vocabulary
from slipstream.text.tokenizer import Tokenizer
from tokenizer_zoo import KINDS, make_tokenizer


@pytest.fixture(scope="module")
def smollm2():
    if smollm2_oracle.PATH is None:
        pytest.skip("the default model is not installed")
    return Tokenizer.load(smollm2_oracle.PATH)


def middle(tokenizer):
    """A token that is a letter, to surround others with."""
    return tokenizer.encode("ba", add_special_tokens=False)[-1]


def check_bytes(tokenizer, tokens):
    vocabulary = grammar_vocabulary(tokenizer, tokenizer.vocab_size)
    around = middle(tokenizer)
    text = tokenizer.decode([around, around], skip_special_tokens=False)
    half = len(text) // 2
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_regex("(?s:.*)"))
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert not any(allowed[token] for token in tokenizer.special_ids)
    for token in tokens:
        if tokenizer.is_special(token) or tokenizer.piece(token) is None:
            continue
        own = vocabulary.decode_bytes([token])
        if b"\xff" in tokenizer.bytes_of(token):
            assert not allowed[token], "it is in no text"
            continue
        assert own == tokenizer.bytes_of(token), (token, tokenizer.piece(token))
        seen = tokenizer.decode([around, token, around], skip_special_tokens=False)
        if "\ufffd" in seen:  # a part of a character
            assert "\ufffd" in own.decode(errors="replace"), (token, own, seen)
        else:
            assert (text[:half] + own.decode() + text[half:]) == seen, (token, own, seen)
            assert allowed[token] or not own


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_the_bytes_that_it_adds_to_a_text(kind, more):
    tokenizer = make_tokenizer(kind, more=more)
    check_bytes(tokenizer, range(tokenizer.vocab_size))


def test_every_token_of_a_gguf_file_has_the_bytes_that_it_adds_to_a_text(smollm2):
    check_bytes(smollm2, range(0, smollm2.vocab_size, 3))


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from(' {}[]":,aeth\n\t0é日🙂\x02_'), min_size=1, max_size=24))
@settings(max_examples=40, deadline=None)
def test_the_tokens_of_a_text_have_its_bytes(kind, text):
    tokenizer = make_tokenizer(kind, more=True)
    if kind == "unigram" and any(letter not in "aeth" for letter in text):
        return  # it has no token for some characters
    vocabulary = grammar_vocabulary(tokenizer, tokenizer.vocab_size)
    assert vocabulary.decode_bytes(vocabulary.tokenize_str(text)) == text.encode()


def test_special_tokens_and_tokens_that_one_side_lacks_are_no_text():
    tokenizer = make_tokenizer("byte-level")
    size = tokenizer.vocab_size
    for vocab_size in (size - 5, size, size + 40):
        vocabulary = grammar_vocabulary(tokenizer, vocab_size)
        assert vocabulary.vocab_size == vocab_size + 1 and vocabulary.eos_token == vocab_size
        assert vocabulary.is_special_token(vocab_size)
    assert all(vocabulary.is_special_token(token) for token in tokenizer.special_ids)
    # the text of a special token is spelled by other tokens
    spelled = vocabulary.tokenize_str("<|im_end|>")
    assert vocabulary.decode_bytes(spelled) == b"<|im_end|>" and not tokenizer.special_ids.intersection(spelled)
