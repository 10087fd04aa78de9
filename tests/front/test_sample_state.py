"""SampleState: text that was held back comes out at the end, whatever ends the sample and however it is read."""

from __future__ import annotations

import pytest

from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason
from slipstream.front.sample_state import SampleState
from slipstream.params.sampling import SamplingParams
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import IM_END, write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


def make(tokenizer, stream, **params):
    return SampleState(0, SamplingParams(max_tokens=100, **params), tokenizer, streaming=stream)


def give(sample, text: str | bytes, **end) -> bool:
    data = text.encode() if isinstance(text, str) else text
    return sample.take(Output("a", 0, list(data), **end))


def end_by(sample, how: str) -> None:
    if how == "abort":
        sample.abort()
    elif how == "length":
        assert not give(sample, "", finish_reason=FinishReason.LENGTH)
    else:
        output = Output("a", 0, [IM_END], finish_reason=FinishReason.STOP, stop_token=IM_END)
        assert not sample.take(output)


ENDS = pytest.mark.parametrize("how", ["length", "stop token", "abort"])
STREAMS = pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])


def whole(sample, stream: bool, so_far: str = "") -> str:
    """The text of the result, which a reader of increments has got too."""
    text = sample.result().text
    if stream:
        increment = sample.increment()
        assert increment is not None and so_far + increment.text == text
        assert sample.increment() is None
    return text


@ENDS
@STREAMS
def test_a_tail_that_could_have_begun_a_stop_string_comes_with_the_end(tokenizer, stream, how):
    sample = make(tokenizer, stream, stop=["END"])
    assert not give(sample, "one EN")
    so_far = sample.increment().text if stream else ""
    assert (sample.text, so_far) == ("one ", "one " if stream else "")
    end_by(sample, how)
    assert whole(sample, stream, so_far) == "one EN"
    assert sample.finish_reason == ("abort" if how == "abort" else "length" if how == "length" else "stop")
    assert sample.stop_reason is None


@ENDS
@STREAMS
@pytest.mark.parametrize("stop", [None, ["END"]])
def test_bytes_that_could_have_begun_a_character_come_with_the_end(tokenizer, stream, how, stop):
    sample = make(tokenizer, stream, stop=stop)
    give(sample, "é€".encode()[:-1])  # the last character lacks a byte
    so_far = sample.increment().text if stream else ""
    assert so_far == ("é" if stream else "")
    end_by(sample, how)
    assert whole(sample, stream, so_far) == "é\ufffd"


@STREAMS
def test_a_stop_string_that_the_last_bytes_complete_ends_the_text(tokenizer, stream):
    """The character that completes it is certain only when no more bytes can come."""
    sample = make(tokenizer, stream, stop=["E\ufffd"])
    give(sample, b"one E" + "€".encode()[:-1])
    assert sample.finish_reason is None
    give(sample, "", finish_reason=FinishReason.LENGTH)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "E\ufffd")
    assert whole(sample, stream) == "one "


@STREAMS
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_ends_it_and_nothing_after_it_is_text(tokenizer, stream, include):
    sample = make(tokenizer, stream, stop=["END"], include_stop_str_in_output=include)
    assert not give(sample, "one E")
    assert give(sample, "ND two"), "the core still runs it"
    assert not give(sample, "three", finish_reason=FinishReason.LENGTH)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "END")
    assert whole(sample, stream) == ("one END" if include else "one ")
    assert bytes(sample.token_ids) == b"one END"


@STREAMS
def test_a_stop_string_in_the_cores_last_output_is_not_asked_to_be_aborted(tokenizer, stream):
    sample = make(tokenizer, stream, stop=["END"])
    assert not give(sample, "one END", finish_reason=FinishReason.LENGTH)
    assert sample.finish_reason == "stop" and whole(sample, stream) == "one "


@STREAMS
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
def test_a_stop_string_counts_once_min_tokens_are_there(tokenizer, stream, min_tokens):
    sample = make(tokenizer, stream, stop=["b"], min_tokens=min_tokens)
    give(sample, "abcab", finish_reason=FinishReason.LENGTH)
    assert sample.result().text == ("a" if min_tokens < 2 else "abca")
    assert len(sample.token_ids) == (2 if min_tokens < 2 else 5)


@STREAMS
@pytest.mark.parametrize("include", [True, False])
def test_the_token_that_ended_it_is_text_where_it_is_asked_for(tokenizer, stream, include):
    params = dict(include_stop_str_in_output=include, skip_special_tokens=False)
    for stop in (None, ["zzz"]):
        sample = make(tokenizer, stream, stop=stop, stop_token_ids=[IM_END], **params)
        give(sample, "ok")
        end_by(sample, "stop token")
        assert whole(sample, stream) == ("ok<|im_end|>" if include else "ok")
        assert sample.stop_reason == IM_END and sample.token_ids == [*b"ok", IM_END]
