"""suffix of /v1/completions, with a model that has the tokens for it."""

from __future__ import annotations

import threading

import pytest
from tokenizers import Tokenizer

from serve.asgi import at_door
from slipstream.serve.http.dialects import completions
from slipstream.text.excerpt import Excerpts
from tiny_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coder")
    write_byte_tokenizer(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])  # 259 to 261
    backend.save(str(folder / "tokenizer.json"))
    return folder


def complete(folder, **body):
    async def scenario(door):
        answer = await door.post("/v1/completions", {"max_tokens": 4, **body})
        return answer, door.core.submits

    return at_door(folder, scenario)


def test_the_suffix_follows_the_prompt(coder):
    answer, submits = complete(coder, prompt=["def", "if"], suffix="end", stop_token_ids=[7])
    assert answer.status == 200 and len(answer.json()["choices"]) == 2
    assert submits[0].prompt_token_ids == [259, *b"def", 260, *b"end", 261]
    assert submits[1].prompt_token_ids == [259, *b"if", 260, *b"end", 261]
    assert {7, 256, 259, 260, 261} <= set(submits[0].params.stop_token_ids)
    assert complete(coder, prompt="def", suffix="")[1][0].prompt_token_ids == [*b"def"]


def test_long_texts_are_tokenised_outside_the_event_loop(coder, monkeypatch):
    threads = []

    def infill(*_):
        threads.append(threading.current_thread())
        return [65] * 8

    monkeypatch.setattr(completions, "infill_ids", infill)
    answer, submits = complete(coder, prompt="x", suffix="y" * 20_000)
    assert answer.status == 400 and "20000 characters" in answer.error and not submits and not threads
    monkeypatch.setattr(Excerpts, "exceeds", lambda *_: False)
    answer, submits = complete(coder, prompt="x", suffix="y" * 20_000)
    assert answer.status == 200 and threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_a_suffix_needs_a_text_and_no_echo(coder, body, param):
    answer, submits = complete(coder, suffix="end", **body)
    assert answer.status == 400 and answer.json()["error"]["param"] == param and not submits
