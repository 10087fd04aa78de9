"""Folders of sentence-transformers, read by it and by us: prompts, projections, lengths, pairs and weights of words."""

import json

import numpy as np
import pytest

from slipstream import LLM, PoolingParams
from tiny import write_tiny
from tiny_encoder import write_modules, write_pair_tokenizer, write_splade, write_static, write_tiny_encoder

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["a", "the cat sat on the mat", "x" * 90, "where is the station, please?"]  # one is cut to 64 tokens
PROMPTS = {"query": "search: ", "document": "text: "}


def write_prompts(folder, default=None, **others):
    settings = {"prompts": PROMPTS, "default_prompt_name": default, "similarity_fn_name": "cosine", **others}
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


@pytest.mark.parametrize("normalize", [True, False])
def test_the_folders_size_of_vectors(tmp_path, normalize):
    """truncate_dim: it cuts vectors that have length 1 already, and only a request for that makes them so again."""
    write_modules(write_tiny_encoder(tmp_path), normalize=normalize)
    write_prompts(tmp_path, truncate_dim=7)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")

    def call(llm):
        asked = [None, PoolingParams(normalize=True), PoolingParams(dimensions=48), PoolingParams(dimensions=9)]
        tokens = llm.encode(TEXTS[:1], pooling_task="token_embed")[0].outputs.data
        return [vectors(llm.embed(TEXTS, params)) for params in asked], tokens, llm.score(TEXTS[0], TEXTS[1:])

    (plain, unit, whole, other), tokens, scores = ours(tmp_path, call)
    np.testing.assert_allclose(plain, theirs.encode(TEXTS), atol=2e-5)
    assert plain.shape == (4, 7) and bool(np.linalg.norm(plain, axis=1).max() < 0.99) is normalize
    np.testing.assert_allclose(unit, theirs.encode(TEXTS, normalize_embeddings=True), atol=2e-5)
    np.testing.assert_allclose(whole, theirs.encode(TEXTS, truncate_dim=48), atol=2e-5)
    assert other.shape == (4, 9) and tokens.shape[1] == 48
    expected = theirs.similarity(theirs.encode(TEXTS[:1]), theirs.encode(TEXTS[1:]))[0]
    np.testing.assert_allclose([one.outputs.score for one in scores], expected, atol=2e-5)


@pytest.mark.parametrize("path", ["", "0_StaticEmbedding"])
@pytest.mark.parametrize("tensor", ["embedding.weight", "embeddings"])
def test_the_mean_of_an_embedding(tmp_path, path, tensor):
    """StaticEmbedding: no network, no config.json or model2vec's, and no special tokens around a text."""
    texts = [*TEXTS, "[SEP] the", "unknown \u1234"]
    write_static(tmp_path, path, tensor, dense=((48, 24, "GELU"),))
    write_prompts(tmp_path, default="document")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")

    def call(llm):
        return vectors(llm.embed(texts)), vectors(llm.embed(texts, prompt="find: ")), llm.score(texts[0], texts[1:])

    plain, given, scores = ours(tmp_path, call)
    np.testing.assert_allclose(plain, theirs.encode(texts), atol=2e-5)
    np.testing.assert_allclose(given, theirs.encode(texts, prompt="find: "), atol=2e-5)
    expected = theirs.similarity(theirs.encode(texts[:1]), theirs.encode(texts[1:]))[0]
    np.testing.assert_allclose([one.outputs.score for one in scores], expected, atol=2e-5)


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
    if activation is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": activation, "version": "4.1.0"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    documents = ["of cats", "weather", "a longer document about the station, and how to get there from here"]
    theirs = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    expected = theirs.predict([("a query", document) for document in documents])
    found = ours(tmp_path, lambda llm: [one.outputs.score for one in llm.score("a query", documents)])
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("typed", [True, False])
def test_pairs_have_token_types_where_the_tokenizer_gives_them(tmp_path, typed):
    """A generic class without model_input_names gives none, whatever its file makes of a pair."""
    write_pair_tokenizer(write_tiny_encoder(tmp_path, task="ForSequenceClassification", num_labels=1), types=typed)
    documents = ["of cats", "weather", ""]
    theirs = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    expected = theirs.predict([("a query", document) for document in documents])
    found = ours(tmp_path, lambda llm: [one.outputs.score for one in llm.score("a query", documents)])
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("lower_case", [True, False])
def test_a_cross_encoders_prompts(tmp_path, lower_case):
    """The default one, or another by its name, stands before the first text of a pair."""
    write_tiny_encoder(tmp_path, task="ForSequenceClassification", num_labels=1)
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    own = {"transformer_task": "sequence-classification", "do_lower_case": lower_case}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(own))
    write_prompts(tmp_path, default="query", model_type="CrossEncoder")
    documents = ["of Cats", "weather"]
    theirs = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    pairs = [("A query", document) for document in documents]

    def call(llm):
        scores = [llm.score("A query", documents, **how) for how in ({}, {"prompt_name": "document"})]
        ranked = [one.score for one in sorted(llm.rerank("A query", documents), key=lambda one: one.index)]
        classes = [one.outputs.data[0] for one in llm.classify(pairs)]
        return [[one.outputs.score for one in found] for found in scores], ranked, classes

    (plain, named), ranked, classes = ours(tmp_path, call)
    expected = theirs.predict(pairs)
    assert np.abs(expected - theirs.predict(pairs, prompt="")).max() > 1e-3  # it matters
    for found in (plain, ranked, classes):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(named, theirs.predict(pairs, prompt_name="document"), atol=2e-5)


def test_an_empty_text_among_many(tmp_path):
    write_modules(write_tiny_encoder(tmp_path), "mean")
    texts = ["a", "", "b", " "]
    expected = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    np.testing.assert_allclose(ours(tmp_path, lambda llm: vectors(llm.embed(texts))), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("strategy", "activation"), [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]
)
def test_of_the_weights_of_words_the_largest_are_kept(strategy, activation, tmp_path):
    write_splade(write_tiny_encoder(tmp_path, task="ForMaskedLM"), strategy, activation)
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "SparseEncoder", "max_active_dims": 5})
    )
    # as an argument too, because older versions do not read it from the file
    theirs = sentence_transformers.SparseEncoder(str(tmp_path), device="cpu", max_active_dims=5)
    expected = theirs.encode(TEXTS[:2], convert_to_sparse_tensor=False).numpy()
    found = ours(tmp_path, lambda llm: llm.encode(TEXTS[:2]) + [llm.encode(text)[0] for text in TEXTS[:2]])
    for one, row in zip(found, [*expected, *expected], strict=True):
        assert len(one.outputs.indices) == 5
        np.testing.assert_array_equal(one.outputs.indices, row.nonzero()[0])
        np.testing.assert_allclose(one.outputs.data, row[row > 0], atol=1e-4)


def test_weights_of_words(tmp_path):
    write_tiny_encoder(tmp_path, task="ForMaskedLM")
    theirs = sentence_transformers.SparseEncoder(str(tmp_path), device="cpu")
    expected = theirs.encode(TEXTS[:2], convert_to_sparse_tensor=False).numpy()
    found = ours(tmp_path, lambda llm: llm.encode(TEXTS[:2], pooling_task="sparse"))
    for one, row in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.outputs.indices, row.nonzero()[0])
        np.testing.assert_allclose(one.outputs.data, row[row > 0], atol=1e-4)
