"""suffix of /v1/completions, with a model that has the tokens for it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from serve.asgi import at_door
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


@pytest.mark.parametrize(("body", "param"), [({"prompt": [1, 2]}, "suffix"), ({"prompt": "x", "echo": True}, "echo")])
def test_a_suffix_needs_a_text_and_no_echo(coder, body, param):
    answer, submits = complete(coder, suffix="end", **body)
    assert answer.status == 400 and answer.json()["error"]["param"] == param and not submits
