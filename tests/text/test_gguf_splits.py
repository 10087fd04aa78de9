"""Each `tokenizer.ggml.pre` splits texts as the models of that name do.

tests/data/gguf_splits.json has, by name, the pre-tokenizers that published tokenizer.json files hold, or where we have
none, the expressions that llama.cpp applies one after another.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from slipstream.text.gguf_vocab import SPLIT_RULES
from tiny_tokenizer import byte_tokenizer

FACTS = json.loads((Path(__file__).parent.parent / "data" / "gguf_splits.json").read_text())
PUBLISHED = [(name, entry["steps"]) for entry in FACTS["published"] for name in entry["names"]]
BY_LLAMA_CPP = [(name, entry["patterns"]) for entry in FACTS["llama.cpp"] for name in entry["names"]]

TEXTS = [
    "", " ", "Hello, world!", "  two  spaces\tand a tab\n\nand lines  ", "don't, I'LL, we've 'S 'tis", "IT'S",
    "1 12 123 1234 12345 1234567 3.14 1e-9 v1.2.3", "a1b22c333d4444", "½ ² Ⅻ ٣٤٥٦", "x\r\ny\r\n\r\nz\r", "\n \n  \n",
    "camelCaseWord ABCdef HTMLParser McDonald", "naïve café – “quotes” … €5", "日本語のテキスト、中文字符。カタカナ",
    "한국어 텍스트 ㄱㄴ", "Привет, мир! Ἀθῆναι", "مرحبا بالعالم۔", "नमस्ते दुनिया।", "e\u0301 and \u00e9 a\u0301b",
    "👩‍👩‍👧 family 🇫🇷", "def f(x):\n    return x ** 2  # squared\n\tpass", "f(x)[0]={'a':1}//path/to/file/\n",
    "<sentinel:12> IMGIMGABZ", "    four  two", " (a) [b] {c} a|b", "$1,234.56 + 7%", "\u3000wide\u00a0spaces\u2028x",
    "ﬁ ﬀ Ａｂｃ ǅ ʔ ᾼ K Ω", "end \n", "ไทย ลาว ខ្មែរ မြန်မာ", "A_b-c.d@e", "...!!!???\n\n", "\x00\x01\x7f",
]  # fmt: skip
EDGE = [*"aZé1٣½.,'’-_()|$ \t\n\r", "\u3000", "\u00a0", "\u0301", "漢", "字", "か", "한", "Ж", "क", "ा", "  ", "\r\n",
        "'s", "'LL", "123", "…", "。", "🙂", "Ab", "aB"]  # fmt: skip


def texts() -> list[str]:
    rng = random.Random(22)
    return TEXTS + ["".join(rng.choice(EDGE) for _ in range(rng.randint(1, 14))) for _ in range(200)]


def test_every_name_has_an_oracle() -> None:
    known = [name for name, _ in (*PUBLISHED, *BY_LLAMA_CPP)]
    assert len(known) == len(set(known))
    assert set(SPLIT_RULES) - set(known) == {"default"}  # as GPT-2's, for files of before the field was invented
    assert set(known) <= set(SPLIT_RULES)


def published(steps: list[dict[str, Any]]) -> Any:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    chain = {"type": "Sequence", "pretokenizers": steps}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": chain})).pre_tokenizer


@pytest.mark.parametrize(("name", "steps"), PUBLISHED, ids=[name for name, _ in PUBLISHED])
def test_texts_are_split_as_the_models_tokenizer_json_says(name: str, steps: list[dict[str, Any]]) -> None:
    ours, theirs = SPLIT_RULES[name].build(), published(steps)
    for text in texts():
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), repr(text)


def split_by(text: str, patterns: list[str]) -> list[str]:
    """Matches and what lies between them, of each expression in the pieces that those before it made."""
    pieces = [text]
    for pattern in patterns:
        expression, split = regex.compile(pattern), []
        for piece in pieces:
            start = 0
            for match in expression.finditer(piece):
                split += [piece[start : match.start()], match.group()]
                start = match.end()
            split.append(piece[start:])
        pieces = [piece for piece in split if piece]
    return pieces


@pytest.mark.parametrize(("name", "patterns"), BY_LLAMA_CPP, ids=[name for name, _ in BY_LLAMA_CPP])
def test_texts_are_split_as_llama_cpp_splits_them(name: str, patterns: list[str]) -> None:
    rule = SPLIT_RULES[name].build()
    for text in texts():
        ours = [text[start:end] for _, (start, end) in rule.pre_tokenize_str(text)]
        assert ours == split_by(text, patterns), repr(text)


@pytest.mark.parametrize("name", SPLIT_RULES)
def test_pieces_hold_all_bytes_of_a_text_once(name: str) -> None:
    """In the letters that byte-level BPE writes bytes with, encoded once."""
    letters = byte_letters()
    rule = SPLIT_RULES[name].build()
    for text in texts():
        pieces = "".join(piece for piece, _ in rule.pre_tokenize_str(text))
        assert pieces == "".join(letters[byte] for byte in text.encode())


def byte_letters() -> list[str]:
    vocabulary = sorted(byte_tokenizer().get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    return [letter for letter, _ in vocabulary]
