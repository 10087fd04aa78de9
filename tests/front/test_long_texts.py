"""Texts far beyond the model length: refused or cut without reading all of them, few at a time."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from patience import PATIENCE
from scripted_core import EVERY_TASK, facts
from slipstream import SamplingParams
from slipstream.base.errors import InvalidPrompt, PromptTooLong
from slipstream.front import prompts as offload
from slipstream.front.core_state import QueueLoad
from slipstream.front.inputs import InputProcessor
from slipstream.front.pooling_inputs import PoolingInputs
from slipstream.front.pooling_prompts import PoolingBatch
from slipstream.front.prompts import LONG, GenerationPrompts, TokenizerThreads
from slipstream.params.pooling import PoolingParams
from text.test_pieces import Counting, bytewise, wordpiece

WORDS = "the cat sat on a mat " * 50_000  # a million characters
MODEL = dict(max_model_len=64, max_batch_tokens=16)


def generating(backend):
    tokenizer = Counting(backend)
    tokenizer.read = 0
    return InputProcessor(facts("nowhere", **MODEL), tokenizer)


def pooling(backend, **more):
    info = msgspec.structs.replace(EVERY_TASK, **more)
    reader = PoolingInputs(facts("nowhere", pooling=info, **MODEL), Counting(backend))
    reader._encoder()
    reader.tokenizer.read = 0
    return reader


@pytest.fixture(params=[wordpiece, lambda: bytewise(True)], ids=["wordpiece", "bytes"])
def backend(request):
    return request.param()


def test_a_prompt_that_is_far_too_long_is_refused_after_its_beginning(backend):
    inputs = generating(backend)
    with pytest.raises(PromptTooLong, match="1050000 characters and more than 64 tokens"):
        inputs.prepare("a", WORDS, SamplingParams())
    with pytest.raises(PromptTooLong, match="^prompt 2 of 3: .* more than 64 tokens"):
        list(GenerationPrompts(inputs, ["the", WORDS, "cat"], [None] * 3, iter("abc").__next__))
    assert inputs.tokenizer.read < 5_000


def test_a_prompt_that_is_cut_is_read_at_its_end(backend):
    inputs = generating(backend)
    whole = inputs.tokenizer.encode(WORDS)
    inputs.tokenizer.read = 0
    for keep, wanted in ((5, whole[-5:]), (-1, whole[-63:])):
        message, _ = inputs.prepare("a", WORDS, SamplingParams(truncate_prompt_tokens=keep))
        assert message.prompt_token_ids == wanted
    assert inputs.tokenizer.read < 10_000


def test_texts_to_be_pooled_that_are_far_too_long_are_refused_after_their_beginning(backend):
    reader = pooling(backend)
    params = PoolingParams(task="embed")
    for prompts in (["the", WORDS], ["the", ("the", WORDS)], ["the", (WORDS, "cat")]):
        with pytest.raises(PromptTooLong, match="^prompt 2 of 2: .* more than 64 tokens"):
            reader.read(PoolingBatch(prompts, params), slice(0, 2))
    with pytest.raises(PromptTooLong):
        reader.text_ids(WORDS, params)
    with pytest.raises(PromptTooLong):
        reader.text_to_read(WORDS, params)
    assert reader.tokenizer.read < 10_000


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_to_be_pooled_that_are_cut_are_read_where_they_are_kept(backend, side):
    reader = pooling(backend)
    params = PoolingParams(task="embed", truncate_prompt_tokens=20, truncation_side=side)
    whole = reader.tokenizer.encode(WORDS, add_special_tokens=False)
    reader.tokenizer.read = 0
    (found,) = reader.read(PoolingBatch([WORDS], params), slice(0, 1))
    kept = whole[-20:] if side == "left" else whole[:20]
    marks = reader.tokenizer.backend.num_special_tokens_to_add(is_pair=False)
    assert len(found.ids) == 20
    assert list(found.ids)[marks // 2 : 20 - marks // 2] == (kept[marks:] if side == "left" else kept[: 20 - marks])
    reader.read(PoolingBatch([(WORDS, WORDS)], params), slice(0, 1))
    part = reader.text_to_read(WORDS, params)
    ids = reader.tokenizer.encode(part, add_special_tokens=False)
    assert (ids[-20:] if side == "left" else ids[:20]) == kept
    assert reader.tokenizer.read < 40_000


def test_the_beginnings_of_long_documents_are_found_at_their_beginnings(backend):
    reader = pooling(backend)
    assert reader.beginnings([WORDS, "the cat"], 4)[1] == "the cat"
    assert WORDS.startswith(reader.beginnings([WORDS], 3)[0])
    assert reader.tokenizer.read < 10_000


def test_a_text_of_spaces_alone_is_read_so_far_and_no_further():
    inputs = generating(wordpiece())
    with pytest.raises(InvalidPrompt, match="spaces"):
        inputs.prepare("a", " " * 2_000_000, SamplingParams())
    assert inputs.tokenizer.read < 3_000_000


def test_no_more_texts_are_read_at_once_than_there_are_threads_and_all_are_read():
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert go_on.wait(PATIENCE)
        with lock:
            running -= 1
        return "done"

    async def main():
        pool = TokenizerThreads(threads=2)
        tasks = [asyncio.create_task(pool.run(LONG, work)) for _ in range(6)]
        await asyncio.sleep(0)
        assert pool.size == 6 * LONG
        go_on.set()
        assert await asyncio.gather(*tasks) == ["done"] * 6
        assert pool.size == 0

    go_on = threading.Event()
    asyncio.run(main())
    assert most <= 2


def test_cancelled_work_is_not_started():
    begun = []

    def hold():
        assert go_on.wait(PATIENCE)

    async def main():
        pool = TokenizerThreads(threads=1)
        first = asyncio.create_task(pool.run(LONG, hold))
        second = asyncio.create_task(pool.run(LONG, lambda: begun.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert pool.size == LONG
        go_on.set()
        await first
        assert pool.size == 0

    go_on = threading.Event()
    asyncio.run(main())
    assert not begun


def test_the_heap_is_trimmed_after_a_large_text_also_after_an_error(monkeypatch):
    given = []
    monkeypatch.setattr(offload, "trim_heap", lambda: given.append(1))

    async def main():
        pool = TokenizerThreads(threads=1)
        assert await pool.run(LONG, lambda: 7) == 7 and not given
        assert await pool.run(2**18, lambda: 7) == 7 and len(given) == 1
        with pytest.raises(ZeroDivisionError):
            await pool.run(2**18, lambda: 1 // 0)
        assert len(given) == 2

    asyncio.run(main())


def test_prompts_that_are_tokenised_count_as_waiting():
    load = QueueLoad()
    with load.encoding(3, "me"):
        assert (load.num_not_started, load.num_queued, load.queued_by["me"]) == (3, 0, 3)
        load.enter("", 5, "me")
    assert (load.num_not_started, load.queued_by["me"]) == (1, 1)
    load.start("", 5, "me")
    assert load.num_not_started == 0 and not load.queued_by
