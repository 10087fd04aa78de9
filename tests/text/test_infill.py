"""Prompts with a suffix, by the tokens that a tokenizer has."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from slipstream.serve.http.dialects.completions import can_infill, infill_ids, infill_stops
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import byte_tokenizer

FAMILIES = [
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "{0}def{1}end{2}"),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}def{1}end{2}"),
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}def{1}end{2}"),
    (("[PREFIX]", "[SUFFIX]"), "{1}end{0}def"),
]


def make(texts=(), *, bos=False):
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
    if bos:
        backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    return Tokenizer(backend, {"bos_token": "<|endoftext|>"})


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("texts", "form"), FAMILIES)
def test_the_prompt_has_the_tokens_of_the_family(texts, form, bos):
    tokenizer = make(texts, bos=bos)
    wanted = tokenizer.encode(form.format(*texts), add_special_tokens=False)
    assert can_infill(tokenizer)
    assert infill_ids(tokenizer, "def", "end") == [256] * bos + wanted and 256 in infill_stops(tokenizer)


def test_a_model_without_such_tokens_has_no_prompt():
    assert not can_infill(make())
    assert not can_infill(make(("<fim_prefix>", "<fim_suffix>")))


def test_the_tokens_end_the_output():
    texts = FAMILIES[0][0]
    tokenizer = make(texts)
    assert {tokenizer.backend.token_to_id(text) for text in texts} < set(infill_stops(tokenizer))
