"""The pooling routes of a real server with five models, against the same models in this process."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from slipstream import LLM, PoolingParams
from slipstream.text.chat_template import render_chat

TEXTS = ["The host never waits.", "A step is a trip.", "Rows are seats, pages are beds."]
LONG = "word " * 60  # 300 tokens and more; the models take 128


@pytest.fixture(scope="module")
def ask(pooling_server):
    def post(path, wanted=200, **body):
        status, answer = pooling_server.call("POST", path, body)
        assert status == wanted, answer
        return answer

    return post


@pytest.fixture(scope="module")
def llms(pooling_folders):
    made = {name: LLM(folder, use_tqdm_on_load=False, num_threads=1) for name, folder in pooling_folders.items()}
    yield made
    for llm in made.values():
        llm.close()


def near(found, wanted):
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(wanted, np.float64), atol=2e-5)


def vectors(llms, prompts, **params):
    return [one.outputs.data for one in llms["vectors"].embed(prompts, PoolingParams(**params), use_tqdm=False)]


def test_embeddings_as_lists_and_as_base64(ask, llms):
    wanted = vectors(llms, TEXTS)
    answer = ask("/v1/embeddings", input=TEXTS, user="me", encoding_format="float")
    assert answer["object"] == "list" and answer["model"] == "vectors"  # the first that is made for it
    assert [one["index"] for one in answer["data"]] == [0, 1, 2] and answer["data"][0]["object"] == "embedding"
    near([one["embedding"] for one in answer["data"]], wanted)
    num_tokens = sum(len(text) + 2 for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    packed = ask("/v1/embeddings", input=TEXTS, model="vectors", encoding_format="base64")
    for one, vector in zip(packed["data"], wanted, strict=True):
        near(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), vector)


def test_embeddings_of_token_ids_cut_and_not_normalised(ask, llms):
    ids = llms["vectors"].get_tokenizer().encode(TEXTS[0])
    for given in (ids, [ids, ids[:5]]):
        found = ask("/v1/embeddings", input=given, dimensions=16, normalize=False)
        wanted = vectors(llms, [ids] if given is ids else given, dimensions=16, normalize=False)
        near([one["embedding"] for one in found["data"]], wanted)
    (whole,) = vectors(llms, [LONG], truncate_prompt_tokens=20, truncation_side="left")
    found = ask("/v1/embeddings", input=LONG, truncate_prompt_tokens=20, truncation_side="left")
    near(found["data"][0]["embedding"], whole)
    assert found["usage"]["prompt_tokens"] == 20


def test_bad_embedding_requests_say_what_is_wrong(ask):
    def error(wanted=400, **body):
        return ask("/v1/embeddings", wanted, **body)["error"]

    assert error(input=[])["param"] == "input"
    assert "mixes" in error(input=["a", 1])["message"]
    assert error(input=["x"] * 65)["code"] == "too_many_inputs"
    assert error(input=LONG)["code"] == "context_length_exceeded"
    assert "49" in error(input="x", dimensions=49)["message"]
    assert error(input="x", colour="red")["param"] == "colour"
    assert error(input="x", add_special_tokens=False)["code"] == "unsupported_parameter"
    assert error(404, input="x", model="gpt-5")["code"] == "model_not_found"
    assert "classes does classify, and this route needs embed" in error(input="x", model="classes")["message"]
    assert error(input="x", cache_salt="s" * 1000)["param"] == "cache_salt"
    assert "prompt 2 of 2" in error(input=[[5], []])["message"]
    assert "out of vocabulary" in error(input=[[5], [9999]])["message"]


def test_an_empty_text_among_many_has_a_vector_too(ask, llms):
    texts = ["x", "", "y"]
    near([one["embedding"] for one in ask("/v1/embeddings", input=texts)["data"]], vectors(llms, texts))
    (one,) = ask("/v1/embeddings", input="")["data"]  # and alone
    near([one["embedding"]], vectors(llms, [""]))
    assert len(ask("/rerank", query="q", documents=["a", ""])["results"]) == 2


def test_a_model_that_generates_can_embed_when_it_is_named(ask):
    assert len(ask("/v1/embeddings", input="x", model="chat")["data"][0]["embedding"]) > 8


def test_pooling_does_every_task(ask, llms):
    for model, task in (("vectors", "embed"), ("vectors", "token_embed"), ("classes", "classify")):
        wanted = [one.outputs.data for one in llms[model].encode(TEXTS, pooling_task=task, use_tqdm=False)]
        answer = ask("/pooling", input=TEXTS, model=model, task=task)
        assert answer["id"].startswith("pool-") and answer["data"][0]["object"] == "pooling"
        for one, numbers in zip(answer["data"], wanted, strict=True):
            near(one["data"], numbers)
    packed = ask("/pooling", input=TEXTS[0], task="token_embed", encoding_format="base64")["data"][0]["data"]
    (wanted,) = llms["vectors"].encode(TEXTS[0], pooling_task="token_embed", use_tqdm=False)
    near(np.frombuffer(base64.b64decode(packed), "<f4").reshape(wanted.outputs.data.shape), wanted.outputs.data)
    words = ask("/pooling", input=TEXTS[0], task="sparse")
    (sparse,) = llms["words"].encode(TEXTS[0], use_tqdm=False)
    assert words["model"] == "words"
    near([one["value"] for one in words["data"][0]["data"]], sparse.outputs.data)


def test_classify(ask, llms):
    wanted = [one.outputs for one in llms["classes"].classify(TEXTS, use_tqdm=False)]
    answer = ask("/classify", input=TEXTS)
    assert answer["model"] == "classes"
    assert [one["label"] for one in answer["data"]] == [one.label for one in wanted]
    near([one["probs"] for one in answer["data"]], [one.probs for one in wanted])
    assert answer["data"][0]["num_classes"] == 3
    raw = ask("/classify", input=TEXTS[0], activation=False)["data"][0]["probs"]
    assert abs(sum(raw) - 1) > 1e-3


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score_reads_pairs_or_compares_vectors(ask, llms, path):
    for model in ("ranker", "vectors"):
        wanted = [one.outputs.score for one in llms[model].score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
        for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
            answer = ask(path, model=model, **{names[0]: TEXTS[0], names[1]: TEXTS[1:]})
            near([one["score"] for one in answer["data"]], wanted)
    assert ask(path, text_1="a", text_2="b")["model"] == "ranker"  # it is made for it
    assert ask(path, 400, text_1="a")["error"]["param"] == "text_2"
    assert ask(path, 400, text_1="a", documents=["b"])["error"]["param"] == "text_1"
    assert "has 3 classes" in ask(path, 400, text_1="a", text_2="b", model="classes")["error"]["message"]


def test_rerank_as_cohere_and_jina_ask(ask, llms):
    ranked = llms["ranker"].rerank(TEXTS[0], TEXTS, use_tqdm=False)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = ask(path, model="ranker", query=TEXTS[0], documents=TEXTS, top_n=2)
        assert [one["index"] for one in answer["results"]] == [one.index for one in ranked[:2]]
        near([one["relevance_score"] for one in answer["results"]], [one.score for one in ranked[:2]])
        assert ("document" in answer["results"][0]) == (path != "/v2/rerank")
        assert answer["meta"]["api_version"]["version"] == path[2:3].replace("e", "1")
        assert answer["usage"]["total_tokens"] > 0 and answer["id"]
    objects = [{"text": text, "id": place} for place, text in enumerate(TEXTS)]
    answer = ask("/v2/rerank", query=TEXTS[0], documents=objects, return_documents=True, top_n=99)
    assert [one["document"] for one in answer["results"]] == [objects[one.index] for one in ranked]
    by_vectors = ask("/rerank", model="vectors", query=TEXTS[0], documents=TEXTS)
    assert by_vectors["results"][0]["index"] == 0 and by_vectors["results"][0]["relevance_score"] > 0.99
    cut = ask("/rerank", query="q", documents=["abcdef" * 50], max_tokens_per_doc=6)
    near(
        cut["results"][0]["relevance_score"],
        llms["ranker"].score("q", "abcdef", use_tqdm=False)[0].outputs.score,
    )


def test_rerank_as_tei_asks(ask, llms):
    ranked = llms["ranker"].rerank(TEXTS[0], TEXTS, use_tqdm=False)
    answer = ask("/rerank", query=TEXTS[0], texts=TEXTS)
    assert [set(one) for one in answer] == [{"index", "score"}] * 3
    near([one["score"] for one in answer], [one.score for one in ranked])
    raw = ask("/rerank", query=TEXTS[0], texts=TEXTS, raw_scores=True, return_text=True)
    assert [one["text"] for one in raw] == [one.document for one in ranked]
    assert abs(raw[0]["score"] - answer[0]["score"]) > 1e-3
    assert ask("/rerank", 413, query="q", texts=[LONG])["error_type"] == "Validation"
    assert ask("/rerank", query="q", texts=[LONG], truncate=True)
    for name, value in {"top_n": 1, "rank_fields": ["text"], "return_documents": True}.items():
        refused = ask("/rerank", 422, query="q", texts=["a"], **{name: value})
        assert refused["error_type"] == "Validation" and refused["error"].startswith(f"{name} needs documents")
    assert ask("/rerank", 400, query="q", texts=[])["error_type"] == "Empty"


@pytest.mark.parametrize("body", [{}, {"documents": []}, {"documents": [{}]}, {"documents": ["a"], "truncate": True},
                                  {"documents": ["a"], "top_n": 0}, {"documents": ["a"], "rank_fields": ["title"]},
                                  {"documents": ["a"], "max_tokens_per_doc": 0}, {"documents": [["a"]]}])  # fmt: skip
def test_bad_reranks_get_a_400(ask, body):
    assert ask("/rerank", 400, query="q", **body)["error"]["message"]


@pytest.mark.parametrize("name, value", [("return_text", True), ("truncate", True), ("truncation_direction", "left")])
def test_what_goes_with_texts_is_refused_beside_documents(ask, name, value):
    assert ask("/rerank", 400, query="q", documents=["a"], **{name: value})["error"]["param"] == name


def test_tei_embed(ask, llms):
    near(ask("/embed", inputs=TEXTS), vectors(llms, TEXTS, normalize=True))
    near(ask("/embed", inputs=TEXTS[0], normalize=False), vectors(llms, TEXTS[:1], normalize=False))
    for side, direction in (("left", "Left"), ("right", "right")):
        found = ask("/embed", inputs=LONG, truncate=True, truncation_direction=direction)
        near(found, vectors(llms, [LONG], truncate_prompt_tokens=-1, truncation_side=side))
    assert "tokens" in ask("/embed", 413, inputs=LONG)["error"]
    assert ask("/embed", 422, inputs="x", prompt_name="query")["error_type"] == "Validation"
    assert ask("/embed", 400, inputs=[])["error_type"] == "Empty"
    assert ask("/embed", 422, text="x")["error_type"] == "Validation"
    assert ask("/embed", 413, inputs=["x"] * 65)["error_type"] == "Validation"


def test_tei_tokens_words_and_similarity(ask, llms):
    wanted = llms["vectors"].encode(TEXTS, PoolingParams(normalize=False), pooling_task="token_embed", use_tqdm=False)
    for found, one in zip(ask("/embed_all", inputs=TEXTS), wanted, strict=True):
        near(found, one.outputs.data)
    (sparse,) = llms["words"].encode(TEXTS[0], use_tqdm=False)
    (found,) = ask("/embed_sparse", inputs=TEXTS[0])
    assert {one["index"] for one in found} == set(sparse.outputs.weights)
    query, *others = vectors(llms, TEXTS)
    found = ask("/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS[1:]})
    near(found, [query @ other for other in others])


def test_tei_predict(ask, llms):
    (wanted,) = llms["classes"].classify(TEXTS[0], use_tqdm=False)
    found = ask("/predict", inputs=TEXTS[0])
    assert found[0]["label"] == wanted.outputs.label and len(found) == 3
    near([one["score"] for one in found], sorted(wanted.outputs.probs, reverse=True))
    batch = ask("/predict", inputs=[[TEXTS[0]], [TEXTS[0], TEXTS[1]]], model="classes")
    assert [one["label"] for one in batch[0]] == [one["label"] for one in found] and len(batch) == 2
    near([one["score"] for one in batch[0]], [one["score"] for one in found])  # in a step with another prompt
    assert batch[1] != found
    (pair,) = llms["ranker"].score(TEXTS[0], TEXTS[1], use_tqdm=False)
    near(ask("/predict", inputs=TEXTS[:2], model="ranker")[0]["score"], pair.outputs.score)
    assert ask("/predict", 422, inputs=TEXTS)["error_type"] == "Validation"


def test_tei_root_does_what_the_model_is_made_for(ask, llms):
    assert ask("/", inputs=TEXTS) == ask("/embed", inputs=TEXTS)
    assert ask("/", inputs=TEXTS[0], model="classes") == ask("/predict", inputs=TEXTS[0], model="classes")
    assert ask("/", inputs=TEXTS[0], model="words") == ask("/embed_sparse", inputs=TEXTS[0], model="words")
    asked = {"query": TEXTS[0], "texts": TEXTS[1:], "model": "ranker"}
    assert ask("/", **asked) == ask("/rerank", **asked)
    assert ask("/", 422, inputs=TEXTS, query="x")["error"] == "there is no field query; remove it"
    assert ask("/", 400, query="x", model="ranker")["error_type"] == "Empty"
    assert ask("/", 422, inputs="x", model=["vectors"])["error_type"] == "Validation"


def test_tei_tokens_and_back(ask, llms):
    tokenizer = llms["vectors"].tokenizer
    (found,) = ask("/tokenize", inputs="a bc")
    assert [one["id"] for one in found] == tokenizer.encode("a bc")
    assert found[0]["special"] and found[0]["start"] is None and found[0]["text"] == "[CLS]"
    assert [(one["text"], one["start"], one["stop"]) for one in found[1:-1]][:2] == [("a", 0, 1), (" ", 1, 2)]
    (plain,) = ask("/tokenize", inputs="a bc", add_special_tokens=False)
    assert plain == found[1:-1]
    assert len(ask("/tokenize", inputs=TEXTS)) == 3
    ids = [one["id"] for one in found]
    assert ask("/decode", ids=ids) == ask("/decode", ids=[ids]) == ["a bc"]
    assert ask("/decode", ids=[ids, ids[1:-1]], skip_special_tokens=False)[0] != "a bc"
    assert ask("/tokenize", 422, inputs="x", prompt_name="query")["error_type"] == "Validation"
    assert ask("/tokenize", 422, inputs="x", prompt="x")["error_type"] == "Validation"
    assert ask("/tokenize", 400, inputs=[])["error_type"] == "Empty"
    assert ask("/decode", 422, ids=[10**9])["error_type"] == "Validation"
    assert ask("/decode", 422, ids=[[1], 2])["error_type"] == "Validation"
    assert ask("/tokenize", prompt="a bc", model="vectors")["tokens"] == ids  # and vLLM's words still mean the same


def chat_ids(tokenizer, messages):
    text = render_chat(
        tokenizer.chat_template(), messages, add_generation_prompt=False, special_tokens=tokenizer.special_tokens
    )
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_vector_of_a_conversation(ask, llms, tiny_folder):
    messages = [{"role": "user", "content": "hello"}]
    answer = ask("/v1/embeddings", messages=messages, model="chat")
    with LLM(tiny_folder, use_tqdm_on_load=False, num_threads=1, num_pages=64, dtype="float32") as llm:
        ids = chat_ids(llm.tokenizer, messages)
        (wanted,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
    near(answer["data"][0]["embedding"], wanted.outputs.data)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    longer = ask("/v1/embeddings", messages=messages, model="chat", add_generation_prompt=True)
    assert longer["usage"]["prompt_tokens"] > len(ids)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "no chat template"),  # of the embedder
        ({"messages": [{"role": "user", "content": "x"}], "input": "x"}, "remove one of them"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "cannot have a template"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
        ({"input": "x", "add_generation_prompt": True}, "needs messages"),
        ({}, "no input"),
    ],
)
def test_conversations_that_cannot_be_embedded_are_refused(ask, body, message):
    assert message in ask("/v1/embeddings", 400, **body)["error"]["message"]


def test_info_is_of_the_first_that_pools(pooling_server):
    status, info = pooling_server.call("GET", "/info")
    assert status == 200 and info["model_id"] == "vectors"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}} and info["max_input_length"] == 128
    assert info["max_client_batch_size"] == 64 and info["model_dtype"] == "float32" and info["max_batch_tokens"] > 0


def test_the_models_are_listed_in_order_and_chosen_by_route(pooling_server):
    names = [card["id"] for card in pooling_server.call("GET", "/v1/models")[1]["data"]]
    assert names == ["chat", "classes", "vectors", "words", "ranker"]
    status, answer = pooling_server.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert status == 200 and answer["model"] == "chat"
    status, answer = pooling_server.call("POST", "/v1/completions", {"prompt": "x", "model": "vectors"})
    assert status == 400 and "vectors" in answer["error"]["message"]
