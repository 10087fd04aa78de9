"""RequestRouter: an error of one request does not affect the others."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from patience import PATIENCE
from scripted_core import EVERY_TASK, ScriptedCore, facts
from slipstream.base.errors import EngineDead, InvalidParams, RequestTooLarge
from slipstream.contracts.messages import Output, Pooled
from slipstream.contracts.request import FinishReason
from slipstream.front.pooling_results import num_result_values
from slipstream.front.request_state import GenerationRequestState
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.transport.frames import AbortAll, AbortedAll, Begun
from tiny_tokenizer import write_byte_tokenizer

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


def at_desk(folder, scenario, **more):
    async def main():
        engine, core = await ScriptedCore.open(facts(folder, max_waiting=100, **more), answers=False)
        try:
            result = await asyncio.wait_for(scenario(engine, core), PATIENCE)
            assert (engine.load.num_open, engine.load.num_queued, engine.load.queued_tokens) == (0, 0, 0)
            assert not engine._requests
            return result
        finally:
            await engine.close()

    return asyncio.run(main())


async def last(stream):
    async for result in stream:
        final = result
    return final


def test_the_end_of_a_stream_leaves_a_newer_request_with_the_same_id_alone(folder):
    async def scenario(engine, core):
        with engine.read([engine.inputs.prepare("x", "a", PARAMS)]) as older:
            await core.until(lambda: core.submits)
            core.token(core.submits[0], 65, end=FinishReason.STOP)
            await older.wait()
            newer = engine.read([engine.inputs.prepare("x", "b", PARAMS)])
        with newer:
            core.token(core.submits[0], 66, end=FinishReason.STOP)
            (state,) = await newer.wait()
            assert state.result().outputs[0].token_ids == [66]

    at_desk(folder, scenario)


@pytest.mark.parametrize("how", ["abort", "leave"])
def test_late_outputs_of_a_request_do_not_reach_a_newer_one_of_the_same_name(folder, how):
    """The core had sent them before it read the abort."""

    async def scenario(engine, core):
        older = engine.generate("a", PARAMS, "x")
        first = asyncio.create_task(anext(older))
        await core.until(lambda: core.submits)
        core.token(core.submits[0], 65)
        await first
        if how == "abort":
            await engine.abort("x")
        await older.aclose()
        newer = asyncio.create_task(last(engine.generate("b", PARAMS, "x")))
        await core.until(lambda: len(core.submits) == 2)
        core.token(core.submits[0], 66, end=FinishReason.STOP)
        core.token(core.submits[1], 67, end=FinishReason.STOP)
        result = await newer
        assert (result.request_id, result.outputs[0].token_ids) == ("x", [67])
        assert not engine._named

    at_desk(folder, scenario)


UNSENDABLE = {
    "a surrogate in the parameters": dict(sampling_params=PARAMS.with_changes(extra_args={"a": "\ud800"})),
    "a surrogate in a cache salt": dict(sampling_params=PARAMS, cache_salt="\udfff"),
    "a surrogate in a request id": dict(sampling_params=PARAMS, request_id="\ud800"),
    "a priority of 70 bits": dict(sampling_params=PARAMS, priority=2**70),
}


@pytest.mark.parametrize("given", UNSENDABLE.values(), ids=UNSENDABLE)
def test_a_request_that_cannot_be_encoded_is_its_callers_and_the_next_one_is_served(folder, given):
    async def scenario(engine, core):
        with pytest.raises(InvalidParams):
            await last(engine.generate("a", **given))
        served = asyncio.create_task(last(engine.generate("b", PARAMS)))
        await core.until(lambda: core.submits)
        core.token(core.submits[0], 65, end=FinishReason.STOP)
        assert (await served).outputs[0].token_ids == [65]

    at_desk(folder, scenario)


def test_one_of_several_prompts_that_cannot_be_encoded_leaves_nothing_behind(folder):
    async def scenario(engine, core):
        good, bad = (engine.inputs.prepare(engine.new_id(), "a", p) for p in (PARAMS, UNSENDABLE_PARAMS))
        with pytest.raises(InvalidParams):
            engine.read([good, bad])
        with engine.read([]) as reading:
            engine.send(reading, *good)
            with pytest.raises(InvalidParams):
                engine.send(reading, *bad)
            assert [track.id for track in reading.states] == [good[0].request_id]
            await core.until(lambda: core.submits)
        assert [submit.request_id for submit in core.submits] == [good[0].request_id]

    UNSENDABLE_PARAMS = PARAMS.with_changes(extra_args={"a": "\ud800"})
    at_desk(folder, scenario)


def test_a_request_larger_than_a_frame_is_refused(folder, monkeypatch):
    monkeypatch.setattr("slipstream.transport.frames.MAX_FRAME", 1000)

    async def scenario(engine, core):
        with pytest.raises(RequestTooLarge, match="bytes"):
            await last(engine.generate([300] * 600, PARAMS))

    at_desk(folder, scenario, max_model_len=1000)


def test_an_exception_in_one_answer_fails_that_request_and_no_other_of_the_step(folder, monkeypatch, caplog):
    async def scenario(engine, core):
        tasks = [asyncio.create_task(last(engine.generate(text, PARAMS))) for text in "abc"]
        await core.until(lambda: len(core.submits) == 3)
        broken = core.submits[1].request_id
        take = GenerationRequestState.take

        def taken(self, output, now):
            if self.id == broken:
                raise IndexError("a token that has no text")
            return take(self, output, now)

        monkeypatch.setattr(GenerationRequestState, "take", taken)
        core.say(*(Output(each.request_id, 0, [65], finish_reason=FinishReason.STOP) for each in core.submits))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end).__name__ for end in ends] == ["RequestOutput", "IndexError", "RequestOutput"]
        await core.until(lambda: broken in [abort.request_id for abort in core.aborts])
        assert f"request {broken} could not be processed" in caplog.text

    at_desk(folder, scenario)


def test_an_exception_as_a_request_is_closed_reaches_its_reader(folder, monkeypatch):
    async def scenario(engine, core):
        tasks = [asyncio.create_task(last(engine.generate(text, PARAMS))) for text in "ab"]
        await core.until(lambda: len(core.submits) == 2)
        first = core.submits[0].request_id
        monkeypatch.setattr(GenerationRequestState, "count_end", lambda self: 1 // 0 if self.id == first else None)
        core.say(*(Output(each.request_id, 0, [65], finish_reason=FinishReason.STOP) for each in core.submits))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end).__name__ for end in ends] == ["ZeroDivisionError", "RequestOutput"]

    at_desk(folder, scenario)


def test_a_message_that_raises_does_not_lose_the_outputs_beside_it(folder, monkeypatch, caplog):
    async def scenario(engine, core):
        task = asyncio.create_task(last(engine.generate("a", PARAMS)))
        await core.until(lambda: core.submits)
        monkeypatch.setattr(engine, "_handle", lambda message: 1 // 0)
        name = core.submits[0].request_id
        core.say(Begun([name]), Output(name, 0, [65], finish_reason=FinishReason.STOP))
        assert (await task).outputs[0].token_ids == [65]
        assert "ZeroDivisionError" in caplog.text

    at_desk(folder, scenario)


def test_requests_are_aborted_by_another_front_end(folder):
    async def scenario(engine, core):
        tasks = [asyncio.create_task(last(engine.generate(text, PARAMS))) for text in "ab"]
        await core.until(lambda: len(core.submits) == 2)
        core.say(AbortAll("call"))
        ends = await asyncio.gather(*tasks)
        assert [end.outputs[0].finish_reason for end in ends] == ["abort", "abort"]
        await core.until(lambda: AbortedAll("call", 2) in core.others)

    at_desk(folder, scenario)


def test_abort_others_waits_for_the_count_or_the_loss_of_the_core(folder):
    async def scenario(engine, core):
        asking = asyncio.create_task(engine.abort_others())
        await core.until(lambda: core.others)
        core.say(AbortedAll("an older call", 5), AbortedAll(core.others[0].call, 3))
        assert await asking == 3
        asking = asyncio.create_task(engine.abort_others())
        await core.until(lambda: len(core.others) == 2)
        core.transport.close()
        with pytest.raises(EngineDead):
            await asking

    at_desk(folder, scenario)


def test_a_result_larger_than_the_core_can_send_is_refused_before_it_is_computed(folder):
    """One matrix of 32,768 x 4,096 numbers ended a front end."""
    info = msgspec.structs.replace(EVERY_TASK, token_size=4096)

    async def scenario(engine, core):
        params = PoolingParams(task="token_embed")
        with pytest.raises(RequestTooLarge, match="536870912 bytes.*fewer dimensions"):
            await engine.encode([[1] * 32_768], params)
        with pytest.raises(RequestTooLarge):
            await engine.encode([[1, 2], [1] * 32_768], params)
        served = asyncio.create_task(engine.encode([[1] * 32_768], params.with_changes(dimensions=2048)))
        await core.until(lambda: core.submits and len(core.submits[-1].prompt_token_ids) == 32_768)
        pooled = Pooled.of(np.zeros((1, 2048), np.float32))
        core.say(Output(core.submits[-1].request_id, 0, [], finish_reason=FinishReason.STOP, pooled=pooled))
        assert (await served)[0].outputs.data.shape == (1, 2048)

    at_desk(folder, scenario, pooling=info, max_model_len=40_000)


SIZES = [
    (dict(task="embed"), 8),
    (dict(task="embed", dimensions=4), 4),
    (dict(task="classify"), 3),
    (dict(task="token_embed"), 10 * 16),
    (dict(task="token_embed", dimensions=2), 10 * 2),
    (dict(task="token_embed", query_key="q"), 1),
    (dict(task="token_classify"), 10 * 3),
    (dict(task="token_classify", returned_token_ids=[0, 2]), 10 * 2),
    (dict(task="sparse"), 304),
]


@pytest.mark.parametrize(("given", "wanted"), SIZES)
def test_the_size_of_a_result_is_known_before_it_is_computed(given, wanted):
    info = msgspec.structs.replace(EVERY_TASK, embed_size=8, token_size=16, num_labels=3)
    assert num_result_values(info, 304, PoolingParams(**given), 10) == wanted
