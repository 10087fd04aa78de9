"""`slipstream serve` and nothing more: the default chat model and the default embedder in one server."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from serve.server_process import ServerProcess
from slipstream import LLM
from slipstream.base.errors import ModelNotFound
from slipstream.checkpoint.locate import default_embedder, locate


@pytest.fixture(scope="module")
def server():
    try:
        locate(None), default_embedder()
    except ModelNotFound as error:
        pytest.skip(f"needs the default models: {error}")
    server = ServerProcess("--max-model-len", "256", "--num-pages", "64")
    yield server
    assert server.stop() == 0, server.lines[-5:]


def test_both_are_listed_and_each_route_finds_its_own(server):
    names = [card["id"] for card in server.call("GET", "/v1/models")[1]["data"]]
    assert len(names) == 2 and "SmolLM2" in names[0] and names[1] == "all-MiniLM-L6-v2"
    _, chat = server.call("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 2})
    _, embedded = server.call("POST", "/v1/embeddings", {"input": "Hello"})
    assert (chat["model"], embedded["model"]) == (names[0], names[1])
    assert server.call("GET", "/info")[1]["model_id"] == names[1]


def test_vectors_are_those_of_the_script_api_and_rerank_works_on_them(server):
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    with LLM(task="embed", use_tqdm_on_load=False, num_threads=1) as llm:
        wanted = [one.outputs.data for one in llm.embed(texts, use_tqdm=False)]
    for given in (texts, texts[0]):
        _, answer = server.call("POST", "/v1/embeddings", {"input": given, "encoding_format": "base64"})
        found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
        np.testing.assert_allclose(found, wanted[: len(found)], atol=1e-5)
    _, ranked = server.call("POST", "/v2/rerank", {"query": texts[0], "documents": texts[1:]})
    assert [one["index"] for one in ranked["results"]] == [0, 1]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(float(wanted[0] @ wanted[1]), abs=1e-5)
    long = "sunny " * 2000  # more than the folder says it reads
    status, refused = server.call("POST", "/v1/embeddings", {"input": long})
    assert status == 400 and "reads 256" in refused["error"]["message"]
    _, cut = server.call("POST", "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 256
    lengths = {each["id"]: each["max_model_len"] for each in server.call("GET", "/v1/models")[1]["data"]}
    assert lengths["all-MiniLM-L6-v2"] == 256
    assert len(server.call("POST", "/embed", {"inputs": long})[1][0]) == 384  # TEI's way: cut, as /info says
    status, refused = server.call("POST", "/embed", {"inputs": long, "truncate": False})
    assert status == 413 and "256" in refused["error"]
