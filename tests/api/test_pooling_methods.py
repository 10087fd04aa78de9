"""Every pooling method and module, in folders that sentence-transformers itself wrote, in the precision people run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from slipstream import LLM, PoolingParams
from slipstream.base.errors import InvalidParams
from slipstream.checkpoint.sentence_modules import ELEMENTWISE, HALVING, OVER_LAST_DIM
from tiny import write_tiny
from tiny_encoder import scatter, write_tiny_encoder

sentence_transformers = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
base_modules = pytest.importorskip("sentence_transformers.base.modules")

MODES = [
    "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("cls", "max"), ("weightedmean", "lasttoken", "mean"),
    ("mean", "mean_sqrt_len_tokens", "max", "weightedmean", "cls", "lasttoken"),
]  # fmt: skip
TEXTS = ["a", "the cat sat on the mat", "x" * 70, "", "where is the station, please?"]
PROMPTS = {"query": "search: ", "long": "a prompt of some length, in words: "}


def save(folder, body, mode="mean", *others, include_prompt=True, seed=0, prompts=None):
    """The folder as sentence-transformers saves it, with random weights in all that has weights."""
    hidden = json.loads((body / "config.json").read_text()).get("hidden_size") or 48
    transformer = base_modules.Transformer(str(body))
    size = hidden if isinstance(mode, str) else hidden * len(mode)
    behind = [make if isinstance(make, torch.nn.Module) else make(size) for make in others]
    for module in behind:
        scatter(module, seed)
    pooling = modules.Pooling(hidden, mode, include_prompt=include_prompt)
    listed = [transformer, pooling, *behind]
    model = sentence_transformers.SentenceTransformer(modules=listed, device="cpu", prompts=prompts)
    model.save(str(folder))
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_tiny_encoder(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]  # by which sentence-transformers would render each text
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": settings["eos_token"]}))
    return folder


def vectors(folder, texts, options=None, **how):
    given = dict(use_tqdm_on_load=False, num_threads=1, device="cpu") | (options or {})
    with LLM(str(folder), **given) as llm:
        return np.stack([one.outputs.data for one in llm.embed(texts, use_tqdm=False, **how)])


def near(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_encoder_by_every_method(tmp_path, encoder, mode):
    theirs = save(tmp_path, encoder, mode)
    expected = theirs.encode(TEXTS)
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    near(vectors(tmp_path, TEXTS), expected)


def causal(depth, chunk):
    steps = dict(depth=depth, max_num_batched_tokens=chunk, max_num_seqs=4)
    return dict(num_pages=256, max_model_len=128, page_size=4, **steps)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_causal_model_by_every_method_whole_and_in_chunks(tmp_path, decoder, mode):
    theirs = save(tmp_path, decoder, mode)
    texts = [text for text in TEXTS if text]
    expected = np.stack([theirs.encode(text) for text in texts])
    for depth, chunk in ((0, 512), (0, 7), (1, 7), (2, 5)):
        near(vectors(tmp_path, texts, causal(depth, chunk)), expected)


@pytest.mark.parametrize("mode", ["cls", "max", "weightedmean", ("mean", "lasttoken", "mean_sqrt_len_tokens")], ids=str)
def test_an_encoder_that_leaves_the_prompt_out(tmp_path, encoder, mode):
    theirs = save(tmp_path, encoder, mode, base_modules.Normalize(), include_prompt=False, prompts=PROMPTS)
    texts = [*TEXTS, "y" * 130] if mode == "cls" else TEXTS
    for how in ({}, {"prompt_name": "query"}, {"prompt": "x"}, {"prompt_name": "long"}):
        near(vectors(tmp_path, texts, **how), theirs.encode(texts, **how))
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": PROMPTS, "default_prompt_name": "query"})
    )
    near(vectors(tmp_path, texts), theirs.encode(texts, prompt_name="query"))


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "lasttoken", ("weightedmean", "mean_sqrt_len_tokens")], ids=str)
def test_a_causal_model_that_leaves_the_prompt_out(tmp_path, decoder, mode):
    """The prompt ends inside a chunk, or takes several."""
    theirs = save(tmp_path, decoder, mode, include_prompt=False, prompts=PROMPTS)
    # of an empty text nothing is left to pool: zeros, the first token of all, or nothing that is a number
    texts = [text for text in TEXTS if text or mode != "max"]
    expected = {name: np.stack([theirs.encode(text, prompt_name=name) for text in texts]) for name in PROMPTS}
    for depth, chunk in ((0, 512), (1, 7), (2, 5)):
        with LLM(str(tmp_path), use_tqdm_on_load=False, num_threads=1, device="cpu", **causal(depth, chunk)) as llm:
            for name, wanted in expected.items():
                found = llm.embed(texts, prompt_name=name, use_tqdm=False)
                near(np.stack([one.outputs.data for one in found]), wanted)
            if mode == "max":
                empty, _ = llm.embed(["", "a"], prompt_name="query", use_tqdm=False)
                assert "not finite" in (empty.error or "")


def test_token_ids_are_pooled_whole_unless_they_say_how_many_are_not(tmp_path, encoder):
    """Also where a text of the same call has the same tokens."""
    theirs = save(tmp_path, encoder, "mean", include_prompt=False, prompts=PROMPTS)
    ids = theirs.tokenizer(PROMPTS["query"] + "cat")["input_ids"]
    with LLM(str(tmp_path), use_tqdm_on_load=False, num_threads=1, device="cpu") as llm:
        text, whole = llm.embed(["cat", ids], prompt_name="query", use_tqdm=False)
        (told,) = llm.embed([ids], PoolingParams(skip_tokens=9), use_tqdm=False)
        with pytest.raises(InvalidParams, match="skip_tokens is 2 and the task token_embed"):
            llm.encode([ids], PoolingParams(skip_tokens=2), pooling_task="token_embed")
    near(text.outputs.data, theirs.encode("cat", prompt_name="query"))
    near(whole.outputs.data, theirs.encode(PROMPTS["query"] + "cat", prompt=""))
    near(told.outputs.data, text.outputs.data)  # [CLS] and eight letters
    assert np.abs(text.outputs.data - whole.outputs.data).max() > 0.01


def dense(size, out=12, activation="Tanh", **how):
    kind = getattr(torch.nn, activation)
    return base_modules.Dense(size, out, activation_function=kind(), **how)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("activation", sorted({*ELEMENTWISE, *OVER_LAST_DIM, HALVING}))
def test_projections_with_every_activation_of_torch(tmp_path, encoder, activation):
    theirs = save(tmp_path, encoder, "mean", lambda size: dense(size, activation=activation))
    near(vectors(tmp_path, TEXTS[:3]), theirs.encode(TEXTS[:3]))


def test_modules_in_any_order(tmp_path, encoder):
    mode = ("cls", "max")
    behind = [
        modules.LayerNorm,
        base_modules.Normalize(),
        lambda size: dense(size, 20, "SiLU", bias=False, use_residual=True),
        base_modules.Normalize(),
        lambda size: dense(20, 20, "Identity", use_residual=True),
        modules.LayerNorm(20),
    ]
    theirs = save(tmp_path, encoder, mode, *behind)
    near(vectors(tmp_path, TEXTS), theirs.encode(TEXTS))


def test_a_cross_encoder_that_pools(tmp_path, encoder):
    """Scores by a projection behind the pooling, as CrossEncoder reads it."""
    transformer = base_modules.Transformer(str(encoder))
    head = dense(96, 1, "Identity", module_output_name="scores")
    scatter(head, 1)
    pooling = modules.Pooling(48, ("mean", "max"))
    model = sentence_transformers.CrossEncoder(modules=[transformer, pooling, head], device="cpu")
    model.save(str(tmp_path))
    theirs = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    documents = ["of cats", "weather", ""]
    with LLM(str(tmp_path), use_tqdm_on_load=False, num_threads=1, device="cpu") as llm:
        found = [one.outputs.score for one in llm.score("a query", documents, use_tqdm=False)]
    np.testing.assert_allclose(found, theirs.predict([("a query", document) for document in documents]), atol=2e-5)


@pytest.mark.parametrize("activation", ["Tanh", "Softplus", "PReLU", "LogSigmoid"])
def test_scores_through_any_activation_of_torch(tmp_path, activation):
    folder = write_tiny_encoder(tmp_path, task="ForSequenceClassification", num_labels=1)
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.activation.{activation}"}
    (folder / "config.json").write_text(json.dumps(config))
    expected = sentence_transformers.CrossEncoder(str(folder), device="cpu").predict([("a", "b"), ("a", "cd")])
    with LLM(str(folder), use_tqdm_on_load=False, num_threads=1, device="cpu") as llm:
        found = [one.outputs.score for one in llm.score("a", ["b", "cd"], use_tqdm=False)]
    np.testing.assert_allclose(found, expected, atol=2e-5)
