"""Folders that have only vocab.txt, read by us and by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.errors import BadTokenizer
from slipstream.checkpoint.late_interaction import read_vocabulary
from slipstream.text.excerpt import Pieces
from slipstream.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

WORDS = ["the", "The", "cat", "##s", "sat", "un", "##happ", "##y", "caf", "##e", "##é", "中", "文", "!", ",", "a", "b",
         "1", "##2", "x y"]  # fmt: skip
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MPNET = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
TEXTS = [
    "the cats sat, unhappy!", "The café 中文 12", "", "  a\tb ", "a [MASK] b", "a <mask> b [SEP]", "é" * 120, "A\x00B",
]  # fmt: skip
FOLDERS: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "bert": (BERT, {"model_type": "bert"}, {}),
    "cased": (BERT, {"model_type": "bert"}, {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}),
    "accents": (BERT, {"model_type": "bert"}, {"strip_accents": False, "tokenize_chinese_chars": False}),
    "distilbert": (BERT, {"model_type": "distilbert"}, {"tokenizer_class": "DistilBertTokenizer"}),
    "other marks": (["<unk>", "<c>", "<s>", "[PAD]", "[MASK]"], {"model_type": "bert"},
                    {"unk_token": "<unk>", "cls_token": "<c>",
                     "sep_token": {"content": "<s>", "__type": "AddedToken"}}),
    "mpnet": (MPNET, {"model_type": "mpnet"}, {}),
}  # fmt: skip


def write(folder: Path, marks: list[str], config: dict[str, Any], settings: dict[str, Any]) -> Path:
    (folder / "vocab.txt").write_text("\n".join([*marks, *WORDS]) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path, *FOLDERS[kind])
    mine, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert mine.encode_batch(TEXTS) == [theirs(text)["input_ids"] for text in TEXTS]
    assert any(len(ids) > 6 for ids in mine.encode_batch(TEXTS))
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    for (ids, _), (first, second) in zip(Pieces(mine).pairs(pairs, None), pairs, strict=True):
        assert ids == theirs([(first, second)])["input_ids"][0]
    for ids in mine.encode_batch(TEXTS):
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_words_behind_the_vocabulary(tmp_path: Path) -> None:
    folder = write(tmp_path, *FOLDERS["bert"])
    size = len(BERT) + len(WORDS)
    (folder / "added_tokens.json").write_text(json.dumps({"qqq": size + 1, "Zz top": size}))
    mine, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "the qqq zz top cat"
    assert mine.encode(text) == theirs(text)["input_ids"] and size + 1 in mine.encode(text)
    (folder / "added_tokens.json").write_text(json.dumps({"qqq": size + 7}))
    with pytest.raises(BadTokenizer, match=f"'qqq' as token {size + 7}, and after the vocabulary it is {size}"):
        Tokenizer.load(folder)


def test_what_cannot_be_built_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, BERT, {"model_type": "bert"}, {"tokenizer_class": "BertJapaneseTokenizer"})
    with pytest.raises(
        BadTokenizer, match="its vocab.txt is for BertJapaneseTokenizer; only tokenizers of BERT and MPNet are built"
    ):
        Tokenizer.load(folder)
    write(tmp_path, BERT[:3], {"model_type": "bert"}, {})
    with pytest.raises(BadTokenizer, match="lacks .SEP., the sep_token of a BertTokenizer"):
        Tokenizer.load(folder)
    (folder / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(Exception, match="vocab.txt cannot be read"):
        Tokenizer.load(folder)


def test_words_are_looked_up_there_too(tmp_path: Path) -> None:
    words = read_vocabulary(write(tmp_path, *FOLDERS["bert"]))
    assert (words["[MASK]"], words["the"], len(words)) == (4, 5, len(BERT) + len(WORDS))
