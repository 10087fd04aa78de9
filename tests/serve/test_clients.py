"""Clients that people have, unmodified, against a real server that pools; of generation: test_openai_client.py."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from patience import PATIENCE
from slipstream import LLM

PREFIX = Path(sys.prefix)
TEXTS = ["The host never waits.", "A step is a trip.", "Rows are seats."]


@pytest.fixture(scope="module")
def server(pooling_server):
    return pooling_server


@pytest.fixture(scope="module")
def vectors(pooling_folders):
    with LLM(pooling_folders["vectors"], use_tqdm_on_load=False, num_threads=1) as llm:
        return [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def ranking(pooling_folders):
    with LLM(pooling_folders["ranker"], use_tqdm_on_load=False, num_threads=1) as llm:
        return llm.rerank("Who waits?", TEXTS, use_tqdm=False)


def near(found, wanted):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=2e-5)


def test_openai_embeddings(server, vectors):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        near([one.embedding for one in client.embeddings.create(model="vectors", input=TEXTS).data], vectors)
        plain = client.embeddings.create(model="vectors", input=TEXTS[0], encoding_format="float")
        near(plain.data[0].embedding, vectors[0])
        short = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=8).data[0].embedding
        near(short, np.array(vectors[0][:8]) / np.linalg.norm(vectors[0][:8]))
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="vectors", input=[])

    async def many():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(client.embeddings.create(model="vectors", input=text) for text in TEXTS * 8))

    near([answer.data[0].embedding for answer in asyncio.run(many())], vectors * 8)


def test_clients_of_every_run_are_installed():
    """Tests of a missing client are skipped; these are packages of `scripts/setup --dev`, so none of them is."""
    missing = [name for name in ("openai", "anthropic", "ollama", "langchain_openai", "cohere") if not has(name)]
    missing += [
        name for name in ("litellm/litellm", "agents/instructor", "agents/pydantic_ai") if not (PREFIX / name).is_dir()
    ]
    assert not missing, f"scripts/setup --dev installs {missing}"


def has(name):
    return importlib.util.find_spec(name) is not None


def test_langchain(server, vectors):
    module = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    chat = module.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="chat", temperature=0, max_completion_tokens=8, max_retries=0
    )
    messages = [("system", "Be short."), ("human", "Hello")]
    whole = chat.invoke(messages)
    assert whole.usage_metadata["output_tokens"] > 0 and whole.response_metadata["finish_reason"] in ("length", "stop")
    assert "".join(chunk.content for chunk in chat.stream(messages)) == whole.content
    embeddings = module.OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model="vectors", check_embedding_ctx_length=False, max_retries=0
    )
    near(embeddings.embed_documents(TEXTS), vectors)
    near(asyncio.run(embeddings.aembed_query(TEXTS[0])), vectors[0])


_LLAMA_INDEX = """
import json, sys
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
url, texts = sys.argv[1], json.loads(sys.argv[2])
llm = OpenAILike(api_base=url, api_key="none", model="chat", is_chat_model=False, max_tokens=8, temperature=0)
chat = OpenAILike(api_base=url, api_key="none", model="chat", is_chat_model=True, max_tokens=8, temperature=0)
whole, streamed = llm.complete("Once upon").text, "".join(part.delta for part in llm.stream_complete("Once upon"))
embedder = OpenAILikeEmbedding(model_name="vectors", api_base=url, api_key="none")
vectors = embedder.get_text_embedding_batch(texts)
print(json.dumps([whole, streamed, chat.complete("Hello").text, vectors]))
"""


def test_llama_index(server, vectors):
    """In a process of its own: its packages want another openai than we test with, so they may live elsewhere."""
    python = os.environ.get("LLAMA_INDEX_PYTHON")
    if importlib.util.find_spec("llama_index") is not None:
        python = sys.executable
    if python is None:
        pytest.skip("needs llama-index-llms-openai-like and -embeddings-openai-like, here or in LLAMA_INDEX_PYTHON")
    command = [python, "-c", _LLAMA_INDEX, f"{server.url}/v1", json.dumps(TEXTS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    whole, streamed, chat, found = json.loads(ran.stdout.splitlines()[-1])
    assert whole and whole == streamed and chat
    near(found, vectors)


def test_cohere_rerank(server, ranking):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own making
        cohere = pytest.importorskip("cohere", reason="needs the cohere client")
        for client in (
            cohere.ClientV2(api_key="none", base_url=server.url),
            cohere.Client("none", base_url=server.url),
        ):
            answer = client.rerank(model="ranker", query="Who waits?", documents=TEXTS, top_n=2)
            assert [one.index for one in answer.results] == [one.index for one in ranking[:2]]
            near([one.relevance_score for one in answer.results], [one.score for one in ranking[:2]])


def test_huggingface_hub_as_to_tei(server, vectors):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    client = hub.InferenceClient(model=f"{server.url}/embed", timeout=PATIENCE)
    found = client.feature_extraction(TEXTS[0], normalize=True, truncate=True, truncation_direction="right")
    near(found[0], vectors[0])
    alike = hub.InferenceClient(model=f"{server.url}/similarity").sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    near(alike, np.asarray(vectors) @ np.asarray(vectors[0]))


@pytest.mark.parametrize("path", ["/embed", "/rerank"])
def test_requests_as_integrations_of_vector_stores_write_them(server, path):
    """LlamaIndex's and Haystack's TEI classes post these bodies."""
    bodies = {"/embed": {"inputs": TEXTS, "truncate": True}}
    bodies["/rerank"] = {"query": "q", "texts": TEXTS, "raw_scores": False, "return_text": True, "truncate": True}
    status, answer = server.call("POST", path, bodies[path])
    assert status == 200 and len(answer) == 3


def test_nothing_that_the_openapi_page_allows_is_answered_by_a_5xx(server):
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=PATIENCE)
    answers = []
    for found in schema.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            database=None, derandomize=True,
        )  # fmt: skip
        def ask(case):
            answers.append(case.call(timeout=PATIENCE).status_code)
            assert answers[-1] < 500, case

        ask()
    assert len(answers) > 100 and {200, 400, 422} <= set(answers), sorted(set(answers))
