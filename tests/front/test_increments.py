"""Increments: together they are the whole output at any pace of the reader, at a cost proportional to the new text."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from scripted_core import ScriptedCore, facts
from slipstream.contracts.messages import LOGPROB, Output, Submit
from slipstream.contracts.request import FinishReason
from slipstream.front.request_state import GenerationRequestState
from slipstream.params.sampling import SamplingParams
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import write_byte_tokenizer

TEXT = "Zwölf große Boxkämpfer jagen Viktor quer über den Sylter Deich 🥊 und zurück."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


@pytest.mark.parametrize("stop", [None, ["quer"], ["🥊 und"]])
@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("pace", [1, 3, 1000])
def test_increments_make_the_whole_at_any_pace(folder, stop, logprobs, pace):
    params = SamplingParams(n=2, max_tokens=1000, stop=stop, logprobs=logprobs)
    track = GenerationRequestState(Submit("a", [1], params, 0.0), None, Tokenizer.load(folder), streaming=True)
    draw = random.Random(pace)
    ids = list(TEXT.encode())
    merged = {0: ("", [], []), 1: ("", [], [])}
    place = 0
    while not track.finished:
        num = draw.randint(1, 3)
        new, place = ids[place : place + num], place + num
        end = FinishReason.LENGTH if place >= len(ids) else None
        for sample in range(2):
            told = np.array([(-1.0 - place, token, 1) for token in new], LOGPROB).tobytes()
            given = None if logprobs is None else told
            track.take(Output("a", sample, new, given, end), 0.0)
        if draw.random() < 1 / pace or track.finished:
            for increment in track.increment():
                text, tokens, scores = merged[increment.index]
                merged[increment.index] = (
                    text + increment.text, tokens + increment.token_ids, scores + (increment.logprobs or []),
                )  # fmt: skip
                assert (increment.finish_reason is None) == (not track.samples[increment.index].finish_reason)
    result = track.result()
    for sample in result.outputs:
        text, tokens, scores = merged[sample.index]
        assert (text, tokens) == (sample.text, sample.token_ids)
        assert logprobs is None or scores == sample.logprobs
        assert text == (TEXT if stop is None else TEXT[: TEXT.index(stop[0])])
    assert track.increment() == []


def test_an_increment_costs_what_is_new_and_text_is_made_when_it_is_read(folder, monkeypatch):
    tokenizer = Tokenizer.load(folder)
    looked_up: list[int] = []
    piece = tokenizer.piece
    monkeypatch.setattr(tokenizer, "piece", lambda token: looked_up.append(token) or piece(token))
    submit = Submit("a", [1], SamplingParams(max_tokens=1000), 0.0)
    track = GenerationRequestState(submit, None, tokenizer, streaming=True)
    for _ in range(50):
        track.take(Output("a", 0, [65]), 0.0)
    assert not looked_up  # it was not read
    assert [new.text for new in track.increment()] == ["A" * 50]
    track.take(Output("a", 0, [66]), 0.0)
    assert [(new.text, new.token_ids) for new in track.increment()] == [("B", [66])]
    assert len(looked_up) == 51


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, ["High"]])
def test_an_aborted_sample_keeps_what_it_had(folder, stream, stop):
    """Also what was held back because more might come: half a stop string, half a character."""
    submit = Submit("a", [1], SamplingParams(stop=stop), 0.0)
    track = GenerationRequestState(submit, None, Tokenizer.load(folder), streaming=stream)
    track.take(Output("a", 0, list("Hi, ö".encode())[:-1]), 0.0)
    track.take(Output("a", 0, list(b"Hi")), 0.0)
    early = "".join(new.text for new in track.increment()) if stream else ""
    track.abort()
    assert track.result().outputs[0].text == "Hi, \ufffdHi" and track.finished
    if stream:
        assert early + "".join(new.text for new in track.increment()) == "Hi, \ufffdHi"


def test_a_reader_that_sleeps_finds_one_increment(folder):
    async def scenario():
        engine, core = await ScriptedCore.open(facts(folder))
        stream = engine.increments("x", SamplingParams(max_tokens=13))
        got = []
        async for new in stream:
            got.append(new)
            while engine._requests:
                await asyncio.sleep(0)  # until all has come
        await engine.close()
        return got

    got = asyncio.run(scenario())
    assert len(got) <= 2
    assert "".join(new.text for (new,) in got) == "All is well. "
