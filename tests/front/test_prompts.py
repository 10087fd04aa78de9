"""The prompts of a call: checked at once, encoded in parts."""

from __future__ import annotations

import gc
import threading
import weakref
from array import array

import numpy as np
import pytest

from patience import PATIENCE
from scripted_core import facts
from slipstream import SamplingParams
from slipstream.base.errors import InvalidPrompt, PromptTooLong
from slipstream.front import prompts as module
from slipstream.front.inputs import InputProcessor
from slipstream.front.prompts import GenerationPrompts, Lookahead, size_of
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import byte_tokenizer

SIXTEEN = [slice(start, start + 4) for start in range(0, 16, 4)]


def inputs(tokenizer=True, **more):
    known = dict(max_batch_tokens=2, max_model_len=64) | more
    return InputProcessor(facts("nowhere", **known), Tokenizer(byte_tokenizer()) if tokenizer else None)


def made(given, prompts, params=None, **how):
    numbers = iter(range(99))
    return GenerationPrompts(given, prompts, [params] * len(prompts), lambda: f"r{next(numbers)}", **how)


def test_parts_are_computed_in_order_and_one_ahead():
    begun, go_on = [], threading.Event()

    def make(part):
        begun.append(part.start)
        if part.start:
            assert go_on.wait(PATIENCE)
        return list(range(part.start, part.stop))

    numbers = Lookahead(make, SIXTEEN)
    assert not numbers.is_ready() and not begun
    assert [next(numbers) for _ in range(3)] == [0, 1, 2] and numbers.is_ready()
    assert next(numbers) == 3 and not numbers.is_ready() and set(begun) <= {0, 4}
    go_on.set()
    assert list(numbers) == list(range(4, 16)) and begun == [0, 4, 8, 12]
    assert numbers.is_ready() and list(numbers) == []


def test_an_error_in_a_part_is_raised_when_the_part_is_reached():
    def make(part):
        if part.start == 8:
            raise InvalidPrompt("no")
        return list(range(part.start, part.stop))

    numbers = Lookahead(make, SIXTEEN)
    assert [next(numbers) for _ in range(8)] == list(range(8))
    with pytest.raises(InvalidPrompt):
        next(numbers)
    assert list(numbers) == []


@pytest.mark.parametrize("bad", [None, "\ud800", "x" * 65])
def test_texts_and_threads_are_gone_with_their_call(bad):
    """Without the collector's help: texts are large, and so few objects that it may not come for long."""
    gc.collect()
    gc.disable()
    try:
        prompts = made(inputs(), ["abcdefgh"] * 9 + ([bad] if bad else []))
        gone = weakref.ref(prompts)
        try:
            assert len(list(prompts)) == 9
        except (InvalidPrompt, PromptTooLong):
            assert bad
        else:
            assert not bad
        del prompts
        assert gone() is None
        for thread in threading.enumerate():
            if thread.name.startswith("slipstream-texts"):
                thread.join(PATIENCE)
                assert not thread.is_alive()
    finally:
        gc.enable()


def test_one_part_needs_no_thread():
    threads = threading.active_count()
    numbers = Lookahead(lambda part: [threading.current_thread()], [slice(0, 1)])
    assert list(numbers) == [threading.current_thread()] and threading.active_count() == threads


def test_every_form_of_prompt_has_a_size():
    ids = {"prompt_token_ids": [1, 2, 3], "prompt": "ab"}
    sizes = [("abc", 3), ([1, 2], 2), (("ab", "c"), 3), ((1, 2), 2), (ids, 5), (np.array(3), 0), (None, 0), (7, 0)]
    sizes += [(np.arange(5), 5), (array("i", [1, 2]), 2), ({"prompt_token_ids": np.arange(4)}, 4), ((), 0)]
    assert [size_of(prompt) for prompt, _ in sizes] == [size for _, size in sizes]


def test_a_batch_gives_the_messages_of_its_prompts_one_by_one():
    given = inputs()
    prompts = ["abc", [1, 2], {"prompt": "wide", "cache_salt": "s"}, "x" * 30, {"prompt_token_ids": [7], "prompt": "q"}]
    params = SamplingParams(truncate_prompt_tokens=20)
    together = list(made(given, prompts, params))
    alone = [given.prepare(f"r{place}", prompt, params) for place, prompt in enumerate(prompts)]
    assert [text for _, text in together] == [text for _, text in alone] == ["abc", None, "wide", "x" * 30, "q"]
    for (message, _), (wanted, _) in zip(together, alone, strict=True):
        assert message.prompt_token_ids == wanted.prompt_token_ids and message.request_id == wanted.request_id
        assert message.cache_salt == wanted.cache_salt and message.params == wanted.params
    assert together[3][0].prompt_token_ids == list(b"x" * 20)


def test_parts_are_a_steps_worth_and_then_larger(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PART", 20)
    given, portions = inputs(), []
    encode = given.tokenizer.encode_batch
    given.tokenizer.encode_batch = lambda texts, *how: (portions.append(texts), encode(texts, *how))[1]
    list(made(given, [*["abcd"] * 6, [1], *["abcde"] * 6]))
    assert [len(texts) for texts in portions] == [2, 4, 4, 2]  # of 8, 16, 20 and what is left


@pytest.mark.parametrize("bad", [5, [999], {"other": 1}, []])
def test_bad_parameters_are_refused_before_tokenising(bad):
    given = inputs()
    given.tokenizer.encode_batch = None  # nothing is encoded
    with pytest.raises(InvalidPrompt, match="prompt 3 of 3: "):
        made(given, ["a", "b", bad])
    with pytest.raises(InvalidPrompt) as caught:
        made(given, [bad])
    assert "of 1" not in str(caught.value)


def test_a_text_is_refused_when_it_is_encoded_and_named_by_its_place():
    given = inputs()
    for bad, error in (("x" * 64, PromptTooLong), ("", InvalidPrompt), ("\ud800", InvalidPrompt)):
        prompts = made(given, ["aaaa", "bbbb", [1], "cccc", bad, "d"])
        assert not prompts.is_sure
        with pytest.raises(error, match="prompt 5 of 6: "):
            list(prompts)
    with pytest.raises(InvalidPrompt):
        made(inputs(tokenizer=False), ["a"])


@pytest.mark.parametrize(
    ("prompt", "params", "is_sure"),
    [
        ("x" * 47, {}, True),
        ("x" * 48, {}, False),  # with the tokens that a tokenizer may add
        ("é" * 23, {}, True),
        ("é" * 24, {}, False),
        ("\ud800", {}, False),
        ("", {}, False),
        (" \n", {}, False),
        ([1] * 63, {}, True),
        ("x" * 99, dict(truncate_prompt_tokens=63), True),
        ("x" * 99, dict(truncate_prompt_tokens=-1), True),
        ("x" * 99, dict(truncate_prompt_tokens=64), False),
        ("x", dict(prompt_logprobs=101), False),
        ("x", dict(logprobs=101), False),
        ("x", dict(logprobs=5, prompt_logprobs=5), True),
    ],
)
def test_texts_that_surely_fit_are_known_before_tokenising(prompt, params, is_sure):
    given = inputs()
    prompts = made(given, ["fine", prompt], SamplingParams(**params))
    assert prompts.is_sure == is_sure
    if is_sure:
        assert len(list(prompts)) == 2
