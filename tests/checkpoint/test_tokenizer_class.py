"""Beside transformers, which reads the same folders."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.checkpoint.sentence_modules import gives_types, tokenizer_class
from tiny_encoder import write_pair_tokenizer

MODEL_TYPES = ("bert", "distilbert", "nomic_bert", "mpnet", "roberta", "modernbert")
CLASSES = (None, "BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
           "ElectraTokenizer", "DistilBertTokenizer", "NoSuchTokenizer")  # fmt: skip
INPUTS = (None, ["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"])


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_token_types_are_given_where_transformers_gives_them(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    write_pair_tokenizer(tmp_path, types=False)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for place, (name, inputs) in enumerate(itertools.product(CLASSES, INPUTS)):
        config: dict[str, Any] = {"model_type": kind}
        own = written | {"tokenizer_class": name, "model_input_names": inputs}
        if place % 2 and name is not None:  # then config.json names it
            config["tokenizer_class"] = own.pop("tokenizer_class")
        own = {key: value for key, value in own.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert gives_types(own, config) is ("token_type_ids" in theirs.model_input_names), (name, inputs, type(theirs))


def test_a_class_is_named_by_either_file_or_the_model_type() -> None:
    assert tokenizer_class({}, {"model_type": "bert"}) == "BertTokenizer"
    assert tokenizer_class({"tokenizer_class": "MPNetTokenizerFast"}, {"model_type": "bert"}) == "MPNetTokenizer"
    assert tokenizer_class({}, {"model_type": "bert", "tokenizer_class": "XTokenizer"}) == "XTokenizer"
    assert tokenizer_class({}, {}) == tokenizer_class({}, {"model_type": ["bert"]}) == "TokenizersBackend"
