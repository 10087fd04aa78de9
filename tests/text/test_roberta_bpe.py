"""Folders that have only vocab.json and merges.txt, read by us and by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.errors import BadTokenizer
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import byte_tokenizer

transformers = pytest.importorskip("transformers")

MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
TEXTS = ["the cats sat", " a <mask> b</s>", "", "h\u00e9 \u4e2d <s>", "thethe  the"]


def write(folder: Path, settings: dict[str, Any], kind: str = "roberta") -> Path:
    letters = list(json.loads(byte_tokenizer().to_str())["model"]["vocab"])
    merges = [("t", "h"), ("th", "e"), ("\u0120", "a"), ("\u0120", "the")]
    words = [*MARKS, *letters, *("".join(pair) for pair in merges), "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"tokenizer_class": "RobertaTokenizerFast"}])
def test_ids_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write(tmp_path, settings)
    mine, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert mine.encode_batch(TEXTS) == [theirs(text)["input_ids"] for text in TEXTS]
    assert len(mine.encode("the the")) < 9  # merged
    for first, second in zip(TEXTS, reversed(TEXTS), strict=True):
        assert mine.encodings([(first, second)])[0].ids == theirs([(first, second)])["input_ids"][0]


def test_what_cannot_be_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="its vocab.json is for TokenizersBackend; only RobertaTokenizer is built"):
        Tokenizer.load(write(tmp_path, {}, kind="llama"))
    folder = write(tmp_path, {})
    (folder / "merges.txt").write_text("t h x y\n")
    with pytest.raises(BadTokenizer, match="vocab.json and merges.txt of .* cannot be read"):
        Tokenizer.load(folder)
