"""Folders of sentence-transformers, read by it and by us: prompts, projections, lengths, pairs and weights of words."""

import json

import numpy as np
import pytest

from slipstream import LLM, PoolingParams
from tiny import write_tiny
from tiny_encoder import write_modules, write_tiny_encoder

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["a", "the cat sat on the mat", "x" * 90, "where is the station, please?"]  # one is cut to 64 tokens
PROMPTS = {"query": "search: ", "document": "text: "}


def write_prompts(folder, default=None):
    settings = {"prompts": PROMPTS, "default_prompt_name": default, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def ours(folder, call, **options):
    with LLM(str(folder), use_tqdm_on_load=False, num_threads=1, device="cpu", **options) as llm:
        return call(llm)


def vectors(found):
    return np.stack([one.outputs.data for one in found])


@pytest.mark.parametrize(
    ("family", "pooling", "normalize"), [("bert", "mean", True), ("bert", "cls", False), ("distilbert", "cls", True)]
)
def test_pooling_projections_and_prompts(tmp_path, family, pooling, normalize):
    dense = ((48, 24, "GELU"), (24, 16, "Identity"))
    write_modules(write_tiny_encoder(tmp_path, family), pooling, dense=dense, normalize=normalize)
    write_prompts(tmp_path, default="document")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")

    def call(llm):
        named = {"prompt_name": "query"}
        return vectors(llm.embed(TEXTS)), vectors(llm.embed(TEXTS, **named)), vectors(llm.embed(TEXTS, prompt="find: "))

    plain, named, given = ours(tmp_path, call)
    np.testing.assert_allclose(plain, theirs.encode(TEXTS), atol=2e-5)
    np.testing.assert_allclose(named, theirs.encode(TEXTS, prompt_name="query"), atol=2e-5)
    np.testing.assert_allclose(given, theirs.encode(TEXTS, prompt="find: "), atol=2e-5)
    cut = ours(tmp_path, lambda llm: vectors(llm.embed(TEXTS, PoolingParams(dimensions=6, normalize=True))))
    expected = theirs.encode(TEXTS, truncate_dim=6)
    if normalize:  # it cuts a vector that has length 1 already
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(cut, expected, atol=2e-5)


def test_a_decoder_by_its_last_token(tmp_path):
    write_modules(write_tiny(tmp_path, "qwen3"), "lasttoken")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": settings["eos_token"]}))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    found = ours(tmp_path, lambda llm: vectors(llm.embed(TEXTS)), num_pages=64, max_model_len=256)
    np.testing.assert_allclose(found, np.stack([theirs.encode(text) for text in TEXTS]), atol=2e-5)


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_a_cross_encoder(tmp_path, activation):
    write_tiny_encoder(tmp_path, task="ForSequenceClassification", num_labels=1)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if activation is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": activation, "version": "4.1.0"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    documents = ["of cats", "weather", "a longer document about the station, and how to get there from here"]
    theirs = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    expected = theirs.predict([("a query", document) for document in documents])
    found = ours(tmp_path, lambda llm: [one.outputs.score for one in llm.score("a query", documents)])
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_weights_of_words(tmp_path):
    write_tiny_encoder(tmp_path, task="ForMaskedLM")
    theirs = sentence_transformers.SparseEncoder(str(tmp_path), device="cpu")
    expected = theirs.encode(TEXTS[:2], convert_to_sparse_tensor=False).numpy()
    found = ours(tmp_path, lambda llm: llm.encode(TEXTS[:2], pooling_task="sparse"))
    for one, row in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.outputs.indices, row.nonzero()[0])
        np.testing.assert_allclose(one.outputs.data, row[row > 0], atol=1e-4)
