"""AsyncEngine: many streams at once, aborts at any moment."""

from __future__ import annotations

import asyncio
import threading

import pytest

from loop_pace import keep_pace
from patience import PATIENCE
from slipstream import LLM, AsyncEngine, PoolingParams, SamplingParams
from slipstream.base.errors import (
    EngineClosed,
    EngineDead,
    PromptTooLong,
    QueueFull,
    RequestTooLarge,
    UserError,
)
from slipstream.text.tokenizer import Tokenizer
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1)
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def first_core(engine):
    return next(iter(engine.client.core.cores.values()))


def run(folder, scenario, **options):
    async def main():
        engine = AsyncEngine(folder, **(SMALL | options))
        keep_pace(engine)
        try:
            return await asyncio.wait_for(scenario(engine), PATIENCE)
        finally:
            await engine.close()

    return asyncio.run(main())


async def last(stream):
    async for result in stream:
        final = result
    return final


@pytest.mark.parametrize("depth", [0, 2])
def test_streams_side_by_side_equal_the_script_api(folder, depth):
    prompts = [[i, i + 1, i + 2] for i in range(1, 10)]

    async def scenario(engine):
        return await asyncio.gather(*(last(engine.generate(prompt, PARAMS)) for prompt in prompts))

    with LLM(folder, use_tqdm_on_load=False, **SMALL) as llm:
        wanted = [r.outputs[0].token_ids for r in llm.generate(prompts, PARAMS)]
    assert [r.outputs[0].token_ids for r in run(folder, scenario, depth=depth)] == wanted


def test_a_caller_of_many_prompts_does_not_keep_others_waiting(folder):
    """A small request is answered while most of the prompts of another caller still wait, and gets its own tokens."""

    async def scenario(engine):
        many = [engine.inputs.prepare(engine.new_id(), [1, 2, n], PARAMS) for n in range(60)]
        with engine.read(many, caller="a", streaming=False) as reading:
            moved = await reading.mailbox.get()
            small = await last(engine.generate([5, 6, 7], PARAMS, caller="b"))
            waiting = sum(not track.finished for track in reading.states)
            assert moved and waiting > 30, f"only {waiting} of 60 were left when the other caller was served"
        return small.outputs[0].token_ids

    with LLM(folder, use_tqdm_on_load=False, **SMALL) as llm:
        assert run(folder, scenario, max_num_seqs=2) == llm.generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids


def test_prompts_of_one_reader_begin_together_or_not_at_all(folder):
    async def scenario(engine):
        def submits(num):
            return [engine.inputs.prepare(engine.new_id(), [1, 2], PARAMS) for _ in range(num)]

        core = first_core(engine)
        take_in = core._requests
        core._requests = lambda message: take_in(message) if core.scheduler.num_waiting < 2 else 1 / 0
        with engine.read(submits(3)) as reading:
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                await reading.wait()
        assert core.num_steps == 0 and engine.load.num_open == 0
        with pytest.raises(RequestTooLarge, match="7 samples, and the queue holds 6; .* raise max_waiting"):
            engine.read(submits(7))
        with engine.read(submits(2)) as reading:
            assert all(track.finished for track in await reading.wait())

    run(folder, scenario, max_waiting=6)


def test_a_refusal_reaches_the_reader_of_many_though_one_was_aborted(folder):
    async def scenario(engine):
        def submits(num):
            return [engine.inputs.prepare(engine.new_id(), [1, 2], PARAMS) for _ in range(num)]

        asked = submits(3)
        with engine.read(submits(4)) as first, engine.read(asked) as second:
            await engine.abort(asked[0][0].request_id)
            with pytest.raises(QueueFull, match="^[0-9]+ requests are waiting"):  # no room was kept
                await second.wait()
            await first.wait()

    run(folder, scenario, max_waiting=4, max_num_seqs=1)


def test_an_internal_error_is_logged(folder, caplog):
    async def scenario(engine):
        first_core(engine)._requests = lambda message: 1 / 0
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await last(engine.generate([1, 2], PARAMS))

    run(folder, scenario)
    assert "Traceback" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("verb", ["generate", "increments", "chat"])
@pytest.mark.parametrize("everyone", [False, True])
def test_an_abort_while_a_text_is_encoded_is_not_lost(folder, verb, everyone, monkeypatch):
    encode, started, goes_on = Tokenizer.encodings, threading.Event(), threading.Event()

    def slow(self, texts, *how, **more):
        started.set()
        assert goes_on.wait(PATIENCE)
        return encode(self, texts, *how, **more)

    async def scenario(engine):
        monkeypatch.setattr(Tokenizer, "encodings", slow)
        text = "x" * 10_000
        prompt = [{"role": "user", "content": text}] if verb == "chat" else text
        stream = getattr(engine, verb)(prompt, PARAMS.with_changes(truncate_prompt_tokens=8), "long")
        reader = asyncio.create_task(last(stream))
        while not started.is_set():
            await asyncio.sleep(0.001)
        if everyone:
            assert await engine.abort_all() == 1
        else:
            await engine.abort("long")
        goes_on.set()
        result = await reader
        assert (result[0] if verb == "increments" else result.outputs[0]).finish_reason == "abort"
        assert await engine.abort_all() == 0 and engine.load.num_open == 0

    run(folder, scenario)


@pytest.mark.parametrize("verb", ["generate", "increments", "chat", "embed"])
def test_long_texts_are_encoded_beside_the_loop(folder, verb, monkeypatch):
    threads, encode = [], Tokenizer.encodings

    def watched(self, texts, *how, **more):
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, texts, *how, **more)

    async def scenario(engine):
        monkeypatch.setattr(Tokenizer, "encodings", watched)
        for text in ("x", "x" * 10_000):
            params = PoolingParams if verb == "embed" else PARAMS.with_changes
            prompt = [{"role": "user", "content": text}] if verb == "chat" else text
            result = getattr(engine, verb)(prompt, params(truncate_prompt_tokens=8))
            await (result if verb == "embed" else last(result))
        assert threads[0] and not threads[-1]
        if verb == "embed":
            await engine.embed(["x"] * 8)
            assert threads[-1]
            await engine.embed([f"x{number}" for number in range(100)])
            assert not threads[-1]

    run(folder, scenario)


def test_closing_a_stream_aborts_it_and_others_continue(folder):
    async def scenario(engine):
        async for result in engine.generate([1, 2], PARAMS.with_changes(max_tokens=50), "left"):
            assert not result.finished
            break
        assert (await last(engine.generate([3, 4], PARAMS))).finished
        return engine

    engine = run(folder, scenario)
    assert first_core(engine).scheduler.num_running == 0


def test_abort_ends_a_stream_with_what_there_is(folder):
    async def scenario(engine):
        result = None
        async for newest in engine.generate([1, 2], PARAMS.with_changes(max_tokens=60), "mine"):
            await engine.abort("mine")
            result = newest
        return result

    result = run(folder, scenario)
    assert result.finished and result.outputs[0].finish_reason == "abort"


def test_bad_requests_do_not_affect_others(folder):
    async def scenario(engine):
        good = asyncio.create_task(last(engine.generate([1, 2], PARAMS, "taken")))
        await asyncio.sleep(0)
        with pytest.raises(PromptTooLong):
            await last(engine.generate([1] * 64, PARAMS))
        with pytest.raises(UserError, match="in use"):
            await last(engine.generate([1], PARAMS, "taken"))
        return await good

    assert run(folder, scenario).finished


def test_every_stream_raises_when_the_core_dies(folder):
    async def scenario(engine):
        first_core(engine).executor.model.logits = None
        tasks = [asyncio.create_task(last(engine.generate([i], PARAMS))) for i in (1, 2)]
        for task in tasks:
            with pytest.raises((EngineDead, EngineClosed)):
                await task
        with pytest.raises((EngineDead, EngineClosed)):
            await last(engine.generate([1], PARAMS))

    run(folder, scenario)


def test_a_closed_engine_raises(folder):
    async def scenario(engine):
        await engine.close()
        with pytest.raises(EngineClosed):
            await last(engine.generate([1], PARAMS))

    run(folder, scenario)


def test_stop_strings_in_a_stream_are_never_shown(folder):
    async def scenario(engine):
        full = (await last(engine.generate([1, 2], PARAMS))).outputs[0].text
        stop = full[3:6]
        seen = []
        async for result in engine.generate([1, 2], PARAMS.with_changes(stop=stop)):
            seen.append(result.outputs[0].text)
        return full, stop, seen

    full, stop, seen = run(folder, scenario)
    assert seen[-1] == full[: full.index(stop)]
    assert all(seen[-1].startswith(text) for text in seen)


def test_cancelling_tasks_at_any_moment_does_not_affect_others(folder):
    async def scenario(engine):
        neighbour = asyncio.create_task(last(engine.generate([1, 2], PARAMS.with_changes(max_tokens=40))))
        for turns in range(12):
            tasks = [asyncio.create_task(last(engine.generate([3, i], PARAMS))) for i in range(4)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert (await neighbour).finished
        return await last(engine.generate([5, 6], PARAMS))

    assert run(folder, scenario).finished
