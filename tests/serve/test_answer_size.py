"""Answers of a bounded size: how many numbers one has is known before anything runs."""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import pytest

import scripted_core
from scripted_core import EVERY_TASK
from serve.asgi import at_door
from slipstream.front.results import LogprobStore
from slipstream.serve.http.generation.generation import TokenNames
from slipstream.serve.http.server import response
from slipstream.text.detokenizer import TokenStarts

MODEL = {"pooling": msgspec.structs.replace(EVERY_TASK, token_size=8, num_labels=1)}


def test_an_answer_with_too_many_numbers_is_refused_before_it_is_computed(folder):
    """Equal prompts are computed once and written as often as they came, so they count as often."""

    async def scenario(door):
        ask = {"input": [[1] * 8, [2] * 8], "task": "token_embed"}  # 2 x 8 x 8 numbers of 4 bytes
        assert (await door.post("/pooling", ask)).status == 200
        for prompts in ([[1] * 8, [2] * 9], [[1] * 8] * 3):
            refused = await door.post("/pooling", ask | {"input": prompts})
            assert refused.status == 400 and refused.json()["error"]["code"] == "answer_too_large"
            assert "512" in refused.error and "--max-answer-bytes" in refused.error
        smaller = {"input": [[1] * 8, [2] * 9], "task": "token_embed", "dimensions": 4}
        assert len(door.core.submits) == 2  # none of those refused
        assert (await door.post("/pooling", smaller)).status == 200

    at_door(folder, scenario, model=MODEL, max_answer_bytes=512)


def test_one_vector_each_is_small(folder):
    async def scenario(door):
        assert (await door.post("/v1/embeddings", {"input": ["a"] * 16})).status == 200  # 16 x 8 numbers
        assert (await door.post("/v1/embeddings", {"input": ["a"] * 17})).status == 400

    at_door(folder, scenario, model=MODEL, max_answer_bytes=512)


ASK = {"prompt": [[1] * 8, [2] * 8], "max_tokens": 10}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10}
SIX = {"logprobs": True, "logprob_token_ids": [1, 2, 3, 4, 5, 6]}


@pytest.mark.parametrize(
    ("path", "body", "fits"),
    [
        ("/v1/completions", ASK | {"logprobs": 2, "n": 2}, {"n": 1}),  # 2 x 10 x 3 logprobs: 3,840 bytes
        ("/v1/completions", ASK | {"logprobs": 4}, {"logprobs": 2}),
        ("/v1/completions", ASK | {"logprobs": 2, "max_tokens": 20}, {"max_tokens": 10}),
        ("/v1/completions", ASK | {"logprobs": 2, "n": 2, "stream": True}, {"n": 1}),
        ("/v1/completions", ASK | {"prompt_logprobs": 4}, {"prompt_logprobs": 2}),
        ("/v1/completions", ASK | {"prompt_logprobs": 1, "n": 4}, {"n": 1}),  # with each sample
        ("/v1/completions", ASK | {"prompt": [1] * 24, "echo": True, "logprobs": 2, "max_tokens": 1}, {"logprobs": 1}),
        ("/v1/completions", ASK | {"return_token_ids": True, "n": 16}, {"n": 8}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 4, "n": 2}, {"n": 1}),
        ("/v1/chat/completions", CHAT | SIX, {"logprob_token_ids": [1]}),
        ("/v1/chat/completions", CHAT | {"prompt_logprobs": 20}, {"prompt_logprobs": 0}),
        ("/v1/chat/completions", CHAT | {"return_token_ids": True, "n": 64}, {"n": 8}),
    ],
)
def test_logprobs_and_token_ids_of_all_samples_count(folder, path, body, fits):
    async def scenario(door):
        refused = await door.post(path, body)
        assert refused.status == 400 and refused.json()["error"]["code"] == "answer_too_large"
        assert "4000" in refused.error and "--max-answer-bytes" in refused.error
        assert not door.core.submits
        assert (await door.post(path, body | fits)).status == 200

    at_door(folder, scenario, max_answer_bytes=4000)


def test_what_the_request_says_alone_is_refused_before_prompts_are_tokenised(folder, monkeypatch):
    async def scenario(door):
        monkeypatch.setattr(type(door.state), "encode", None)
        for path, body in (("/v1/completions", ASK | {"logprobs": 4}), ("/v1/chat/completions", CHAT | SIX)):
            assert (await door.post(path, body)).json()["error"]["code"] == "answer_too_large"

    at_door(folder, scenario, max_answer_bytes=4000)


def test_an_answer_without_max_tokens_ends_where_it_would_be_too_large(folder):
    async def scenario(door):
        ask = CHAT | {"max_tokens": None, "logprobs": True, "top_logprobs": 4}
        assert (await door.post("/v1/chat/completions", ask)).status == 200
        assert door.core.submits[-1].params.max_tokens == 12  # of 320 bytes each
        (message,) = (await door.post("/v1/chat/completions", ask | {"top_logprobs": 0, "n": 2})).json()["choices"][:1]
        assert door.core.submits[-1].params.max_tokens == 31 and message["finish_reason"] == "length"
        few = ask | {"min_tokens": 13}
        assert (await door.post("/v1/chat/completions", few)).json()["error"]["code"] == "answer_too_large"
        assert (await door.post("/v1/chat/completions", few | {"logprobs": None, "top_logprobs": None})).status == 200
        assert door.core.submits[-1].params.max_tokens is None

    at_door(folder, scenario, max_answer_bytes=4000)


class _Turns:
    """Counts the work of one kind, at most in one turn of the event loop."""

    def __init__(self) -> None:
        self.most = self.total = self._now = 0

    def add(self, count: int) -> None:
        self._now += count
        self.total += count
        self.most = max(self.most, self._now)

    def run(self) -> None:
        self._now = 0
        asyncio.get_running_loop().call_soon(self.run)


def count_calls(monkeypatch, turns: _Turns, owner: object, name: str, size=lambda result: 1) -> None:
    function = getattr(owner, name)

    def counted(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        turns.add(size(result))
        return result

    monkeypatch.setattr(owner, name, counted)


TEXTS = [f"text {index}" for index in range(100)]
SHAPES = {"embed": (2048,), "classify": (1024,), "token_embed": (8, 256), "token_classify": (8, 256), "sparse": (999,)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
        *(("/pooling", {"input": TEXTS * 2, "task": task}) for task in SHAPES),
        ("/classify", {"input": TEXTS}),
        ("/embed", {"inputs": TEXTS}),
        ("/embed_all", {"inputs": TEXTS}),
        ("/embed_sparse", {"inputs": TEXTS}),
        ("/api/embed", {"model": "tiny", "input": TEXTS}),
        ("/v2/embed", {"model": "tiny", "texts": TEXTS, "embedding_types": ["float", "base64", "binary"]}),
    ],
)
def test_other_requests_run_between_the_pieces_of_arrays(folder, monkeypatch, path, body):
    encoded = _Turns()
    count_calls(monkeypatch, encoded, response.msgspec.json, "encode", len)
    count_calls(monkeypatch, encoded, response, "_encode", len)
    monkeypatch.setattr(scripted_core, "_SHAPES", {task: lambda _, own=own: own for task, own in SHAPES.items()})

    async def scenario(door):
        encoded.run()
        exchange = await door.post(path, body)
        assert exchange.status == 200, exchange.body
        assert encoded.total > 250_000 and encoded.most < 80_000
        assert exchange.parsed()

    pooling = msgspec.structs.replace(EVERY_TASK, embed_size=2048, token_size=256, num_labels=1024)
    at_door(folder, scenario, model={"pooling": pooling})


MANY = {"max_tokens": 200, "n": 16}
LONG_PROMPT = {"prompt": [list(b"abcdefgh" * 64)] * 8, "max_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | MANY | {"logprobs": True, "top_logprobs": 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcd" * 1024}], "prompt_logprobs": 20}),
        ("/v1/completions", {"prompt": "a"} | MANY | {"logprobs": 20}),
        ("/v1/completions", LONG_PROMPT | {"logprobs": 20, "echo": True}),
        ("/v1/completions", LONG_PROMPT | {"prompt_logprobs": 20}),
        ("/v1/completions", {"prompt": list(b"abcdefgh" * 512), "n": 32, "max_tokens": 1, "return_token_ids": True}),
        ("/v1/completions", {"prompt": list(b"abcdefgh" * 3750), "n": 4, "max_tokens": 1, "return_token_ids": True}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 30000, "n": 2, "return_token_ids": True}),
        ("/v1/completions", {"prompt": list(b"abcdefgh" * 512), "n": 64, "max_tokens": 1, "echo": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 20000, "logprobs": 0}),
    ],
)
def test_other_requests_run_between_the_pieces_of_a_large_answer(folder, monkeypatch, path, body, stream):
    """Counts what is done in one turn of the loop: bytes of JSON, logprobs, names and offsets of tokens."""
    entries, names, offsets, encoded = _Turns(), _Turns(), _Turns(), _Turns()
    count_calls(monkeypatch, entries, LogprobStore, "new_entry", len)
    count_calls(monkeypatch, names, TokenNames, "name")
    count_calls(monkeypatch, offsets, TokenStarts, "_push")
    count_calls(monkeypatch, encoded, response.msgspec.json, "encode", len)
    count_calls(monkeypatch, encoded, response, "_encode", len)

    async def scenario(door):
        for turns in (entries, names, offsets, encoded):
            turns.run()
        exchange = await door.post(path, body | {"stream": stream})
        assert exchange.status == 200, exchange.body
        assert encoded.total > 250_000 and encoded.most < 80_000
        assert entries.most < 4000 and names.most < 10_000 and offsets.most < 8000
        assert exchange.parsed()

    at_door(folder, scenario, model={"max_model_len": 2**15}, max_logprobs=20)


@pytest.mark.parametrize(
    "body", [{"prompt": "abcd " * 10**4, "return_token_strs": True}, {"inputs": ["abcd " * 10**3] * 10}]
)
def test_other_requests_run_between_the_pieces_of_token_lists(folder, monkeypatch, body):
    encoded = _Turns()
    count_calls(monkeypatch, encoded, response.msgspec.json, "encode", len)
    count_calls(monkeypatch, encoded, response, "_encode", len)

    async def scenario(door):
        encoded.run()
        answer = (await door.post("/tokenize", body)).json()
        assert encoded.total > 250_000 and encoded.most < 80_000
        tokens = answer["token_strs"] if "prompt" in body else [token["text"] for token in answer[-1]]
        assert "".join(tokens) == body.get("prompt", "abcd " * 10**3)

    at_door(folder, scenario)


@pytest.mark.parametrize("shape", [(0,), (1,), (1024,), (1025,), (5000,), (3, 5), (40, 100), (2, 3000), (0, 4)])
def test_an_array_in_pieces_has_the_numbers_of_the_array(shape):
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    assert json.loads(b"".join(response.json_pieces({"data": response.json_array(array)}))) == {"data": array.tolist()}
