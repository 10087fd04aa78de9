"""Logprobs of tokens that end within a character: their real bytes, and offsets that slice the text."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from patience import PATIENCE
from serve.asgi import at_door
from slipstream.contracts.messages import LOGPROB, Output
from slipstream.contracts.request import FinishReason
from slipstream.front.results import Logprob
from slipstream.serve.http.generation.generation import TokenNames, completion_logprobs
from slipstream.serve.http.server.response import json_pieces
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import IM_END
from tokenizer_zoo import make_tokenizer

PROMPT = "日本語 is"


def slices(text: str, starts: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [PROMPT, list(PROMPT.encode())], ids=["text", "ids"])
def test_text_offsets_slice_the_echoed_text(folder, stream, given):
    async def scenario(door):
        body = {"prompt": given, "echo": True, "logprobs": 2, "max_tokens": 4, "stream": stream}
        exchange = await door.post("/v1/completions", body)
        assert exchange.status == 200, exchange.body
        choices = [event["choices"][0] for event in exchange.events()] if stream else exchange.json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        starts = [start for choice in choices for start in choice["logprobs"]["text_offset"]]
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        assert text.startswith(PROMPT) and len(starts) == len(tokens) == len(PROMPT.encode()) + 4
        parts = slices(text, starts)
        assert "".join(parts) == text
        assert parts[:12] == ["", "", "日", "", "", "本", "", "", "語", " ", "i", "s"]
        assert tokens[:3] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"] and tokens[9:12] == [" ", "i", "s"]

    at_door(folder, scenario)


def test_pieces_with_spaces_and_a_token_before_the_text_are_sliced_too(tmp_path):
    """A SentencePiece vocabulary: the first token is special, pieces bring their spaces, and 日 falls back to bytes."""
    make_tokenizer("gguf pieces").backend.save(str(tmp_path / "tokenizer.json"))

    async def scenario(door):
        body = {"prompt": "the 日 is", "echo": True, "logprobs": 0, "max_tokens": 0}
        (choice,) = (await door.post("/v1/completions", body)).json()["choices"]
        assert choice["text"] == "the 日 is"
        assert choice["logprobs"]["tokens"][:2] == ["<s>", " the"]
        parts = slices(choice["text"], choice["logprobs"]["text_offset"])
        assert parts == ["", "the", " ", "", "", "日", " is"]

    at_door(tmp_path, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_a_prompt_alone_have_no_token_of_an_answer(folder, stream):
    async def scenario(door):
        body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        exchange = await door.post("/v1/completions", body)
        first, *_, last = exchange.events() if stream else [exchange.json()] * 2
        (choice,), usage = first["choices"], last["usage"]
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([], "length", None)
        assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 3)

    at_door(folder, scenario)


def test_tokens_that_are_no_text_are_distinct_in_top_logprobs(folder):
    async def scenario(door):
        body = {"prompt": [0xE6, 0x97, 0xA5], "echo": True, "logprobs": 2, "max_tokens": 1}
        (choice,) = (await door.post("/v1/completions", body)).json()["choices"]
        assert choice["logprobs"]["top_logprobs"][1].keys() == {"bytes:\\x97", "\x01", "\x02"}

    at_door(folder, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_a_stop_string_and_an_end_token_is_sliced_too(folder, stream):
    async def scenario(door):
        body = {"prompt": "a", "logprobs": 0, "max_tokens": 9, "stop": ["END"], "stream": stream}
        exchange = door.begin("POST", "/v1/completions", body)
        await door.core.until(lambda: door.core.submits)
        (submit,) = door.core.submits
        for token in "é END".encode():
            door.core.say(logged(submit, token))
        await exchange.end()
        choices = [event["choices"][0] for event in exchange.events()] if stream else exchange.json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        starts = [start for choice in choices for start in choice["logprobs"]["text_offset"]]
        assert (text, starts) == ("é ", [0, 0, 1, 2, 2, 2])

    at_door(folder, scenario, answers=False)


def test_a_stream_sends_tokens_of_a_stop_string_that_does_not_come_with_their_text(folder):
    async def scenario(door):
        body = {"prompt": "a", "logprobs": 0, "max_tokens": 9, "stop": ["ENDING"], "stream": True}
        exchange = door.begin("POST", "/v1/completions", body)
        await door.core.until(lambda: door.core.submits)
        (submit,) = door.core.submits
        for count, token in enumerate(b"ENDED", 1):
            door.core.say(logged(submit, token))
            while exchange.body.count(b"data: ") < count:  # each token has a chunk
                exchange.got.clear()
                await asyncio.wait_for(exchange.got.wait(), PATIENCE)
        door.core.say(logged(submit, ord("E"), FinishReason.LENGTH))
        await exchange.end()
        length, starts = 0, []
        for (choice,) in (event["choices"] for event in exchange.events()):
            length += len(choice["text"])
            starts += choice["logprobs"]["text_offset"]
            assert max(starts) <= length
        assert (length, starts) == (6, [0, 1, 2, 3, 4, 5])

    at_door(folder, scenario, answers=False)


def logged(submit, token, end=None):
    """A token that was drawn, and was the likeliest."""
    told = [(-0.5, token, 1)] * (1 + submit.params.logprobs)
    return Output(submit.request_id, 0, [token], np.array(told, LOGPROB).tobytes(), end)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_chat_logprobs_have_the_bytes_of_each_token(folder, stream, as_ids):
    async def scenario(door):
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1, "stream": stream}
        exchange = door.begin("POST", "/v1/chat/completions", body | {"return_tokens_as_token_ids": as_ids})
        await door.core.until(lambda: door.core.submits)
        (submit,) = door.core.submits
        *most, last = [*"日 a".encode(), IM_END]
        for token in most:
            door.core.say(logged(submit, token))
        door.core.say(logged(submit, last, FinishReason.STOP))
        await exchange.end()
        choices = [event["choices"][0] for event in exchange.events()] if stream else exchange.json()["choices"]
        told = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert [one["bytes"] for one in told] == [[0xE6], [0x97], [0xA5], [0x20], [0x61], list(b"<|im_end|>")]
        assert b"".join(bytes(one["bytes"]) for one in told[:5]).decode() == "日 a"
        names = ["\\xe6", "\\x97", "\\xa5", " ", "a", "<|im_end|>"]
        if as_ids:
            names = [f"token_id:{token}" for token in (*most, last)]
        assert [one["token"] for one in told] == names
        assert [one["top_logprobs"][0]["bytes"] for one in told] == [one["bytes"] for one in told]

    at_door(folder, scenario, answers=False)


def test_ids_that_the_tokenizer_does_not_have_keep_their_own_entries(folder):
    """The vocabulary of the model is larger: all such tokens would be the empty text."""
    names = TokenNames(Tokenizer.load(folder), as_ids=False)
    entry = {97: Logprob(-1.0), 300: Logprob(-2.0), 301: Logprob(-3.0)}
    found = json.loads(b"".join(json_pieces(completion_logprobs([97], [[entry]], [0], names))))
    assert found["top_logprobs"] == [{"a": -1.0, "token_id:300": -2.0, "token_id:301": -3.0}]
