"""Answers of a bounded size: how many numbers one has is known before anything runs."""

from __future__ import annotations

import msgspec

from scripted_core import EVERY_TASK
from serve.asgi import at_door

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
