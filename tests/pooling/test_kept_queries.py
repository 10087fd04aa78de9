"""Stored queries of late interaction are dropped when their requests end, in whatever way they end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pool_bench import PoolBench
from scripted_core import ScriptedCore, facts
from slipstream.base.errors import EngineClosed, InvalidPrompt, QueueFull, UserError
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import Abort, Output, Pooled, Submit
from slipstream.contracts.request import FinishReason
from slipstream.engine.lanes import Lanes
from slipstream.front import pooling_calls
from slipstream.params.pooling import PoolingParams
from slipstream.transport.core_process import CoreProcess
from slipstream.transport.frames import Refused
from tiny_encoder import write_tiny_encoder

LATE = PoolingInfo(
    tasks=("token_embed",), methods=("all",), late_interaction=True, embed_size=4, token_size=4, is_causal=False
)
QUERY = PoolingParams(task="token_embed", query_key="q", query_uses=2)
DOCUMENT = PoolingParams(task="token_embed", query_key="q")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_encoder(tmp_path_factory.mktemp("encoder"), "bert", "Model")


def done(submit: Submit, *numbers: float) -> Output:
    pooled = Pooled.of(np.array(numbers, np.float32))
    return Output(submit.request_id, 0, [], finish_reason=FinishReason.STOP, pooled=pooled)


def with_scripted(folder, scenario):
    async def main():
        engine, core = await ScriptedCore.open(facts(folder, pooling=LATE), answers=False)
        try:
            return await scenario(engine, core)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_a_front_end_gives_up_the_query_when_a_document_is_refused(folder):
    async def scenario(engine, core):
        call = asyncio.create_task(engine.score("a b", ["c", "d"]))
        await core.until(lambda: len(core.submits) == 3)
        query, first, second = core.submits
        core.say(done(query))
        core.say(Refused.of(second.request_id, QueueFull("full")))
        with pytest.raises(QueueFull):
            await call
        await core.until(lambda: len(core.aborts) == 3)
        assert {abort.request_id for abort in core.aborts} == {one.request_id for one in core.submits}

    with_scripted(folder, scenario)


def test_no_more_prompts_of_a_call_are_sent_than_the_core_lets_wait(folder):
    async def scenario():
        engine, core = await ScriptedCore.open(facts(folder, pooling=LATE, max_waiting=2), answers=False)
        try:
            call = asyncio.create_task(engine.encode([[1], [2], [3], [4]]))
            for num_sent in (2, 3, 4):
                await core.until(lambda count=num_sent: len(core.submits) == count)
                for _ in range(3):
                    await asyncio.sleep(0)
                assert len(core.submits) == num_sent
                core.say(done(core.submits[num_sent - 2], float(num_sent)))
            core.say(done(core.submits[3], 5.0))
            assert [one.outputs.data.tolist() for one in await call] == [[2.0], [3.0], [4.0], [5.0]]
            # other callers fill the queue: a new one waits until there is room
            first = asyncio.create_task(engine.encode([[1], [2], [3]]))
            await core.until(lambda: len(core.submits) == 6)
            second, third = (asyncio.create_task(engine.encode([ids])) for ids in ([5], [6]))
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(core.submits) == 6
            second.cancel()  # a cancelled waiter does not take the turn of another one
            core.say(done(core.submits[4], 1.0), done(core.submits[5], 2.0))
            await core.until(lambda: len(core.submits) == 8)
            for submit in core.submits[6:]:
                core.say(done(submit, float(submit.prompt_token_ids[0])))
            assert [one.outputs.data.tolist() for one in await first] == [[1.0], [2.0], [3.0]]
            assert [one.outputs.data.tolist() for one in await third] == [[6.0]]
            # waiters get the error that the engine is closed
            first, second = (asyncio.create_task(engine.encode([[1], [2]])) for _ in range(2))
            await core.until(lambda: len(core.submits) == 10)
            await engine.close()
            for call in (first, second):
                with pytest.raises(EngineClosed):
                    await call
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_of_many_pairs_some_are_sent_and_then_others(folder):
    """No more queries are kept at once than there is room for, whichever caller sends them."""

    async def scenario():
        engine, core = await ScriptedCore.open(facts(folder, pooling=LATE, max_kept=100), answers=False)
        try:
            call = asyncio.create_task(engine.score(["a b"] * 5, ["c"] * 5))
            num_sent, scores = 0, iter(range(5))
            while num_sent < 10:
                await core.until(lambda: len(core.submits) > num_sent)  # noqa: B023
                for _ in range(5):
                    await asyncio.sleep(0)
                group, num_sent = core.submits[num_sent:], len(core.submits)
                queries = [one for one in group if one.params.is_query]
                assert 0 < len(queries) < 5 and len(group) == 2 * len(queries)
                assert sum(len(one.prompt_token_ids) for one in queries) <= 25  # so that others find room too
                core.say(*(done(one) if one.params.is_query else done(one, float(next(scores))) for one in group))
            assert [one.outputs.score for one in await call] == [0.0, 1.0, 2.0, 3.0, 4.0]
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_a_bad_pair_is_named_by_its_place_among_all(folder, monkeypatch):
    monkeypatch.setattr(pooling_calls, "PAIRS_TOGETHER", 2)

    async def scenario(engine, core):
        call = asyncio.create_task(engine.score(["a", "b", "c", "\ud800"], ["d"] * 4))
        await core.until(lambda: len(core.submits) == 4)
        core.say(*(done(one, 1.0) for one in core.submits))
        with pytest.raises(InvalidPrompt, match="prompt 4 of 4: a prompt has an unpaired surrogate"):
            await call

    with_scripted(folder, scenario)


def test_a_front_end_gives_up_the_query_when_its_reader_is_cancelled(folder):
    async def scenario(engine, core):
        call = asyncio.create_task(engine.score("a b", ["c", "d"]))
        await core.until(lambda: len(core.submits) == 3)
        core.say(done(core.submits[0]), done(core.submits[1], 0.5))
        while engine.load.num_open > 1:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await core.until(lambda: len(core.aborts) == 2)
        assert core.aborts[0].request_id == core.submits[0].request_id

    with_scripted(folder, scenario)


def test_a_query_of_one_call_serves_the_documents_of_the_next(folder):
    async def scenario(engine, core):
        call = asyncio.create_task(engine.encode([[1, 2]], QUERY))
        await core.until(lambda: core.submits)
        core.say(done(core.submits[0]))
        await call
        call = asyncio.create_task(engine.encode([[3]], DOCUMENT))
        await core.until(lambda: len(core.submits) == 2)
        core.say(done(core.submits[1], 0.5))
        await call
        assert not core.aborts

    with_scripted(folder, scenario)


class FakeHub:
    def __init__(self) -> None:
        self.connections: list[object] = []

    def send(self, connection, messages) -> None:
        pass

    def broadcast(self, message) -> None:
        pass


def test_a_core_forgets_the_queries_of_a_front_end_that_has_gone(folder):
    with PoolBench(folder) as bench:
        process = CoreProcess(Lanes({"m": bench.core}), FakeHub())
        one, other = object(), object()
        process._handle(one, Submit("a", [1, 2], QUERY, 0.0))
        process._handle(other, Submit("b", [1, 2], QUERY.with_changes(query_key="p"), 0.0))
        while process.lanes.has_requests():
            process._deliver(process.lanes.step())
        queries = bench.core.scheduler._queries
        assert len(queries) == 2
        process._abort_all_of(one)
        assert len(queries) == 1
        process._handle(other, Submit("c", [3], DOCUMENT.with_changes(query_key="p"), 0.0))
        process._handle(other, Submit("d", [3], DOCUMENT.with_changes(query_key="p"), 0.0))
        while process.lanes.has_requests():
            process._deliver(process.lanes.step())
        assert not queries
        process._pulse(False)
        assert not process._kept_queries, "all documents have arrived, so no release is needed"


def test_an_id_that_keeps_a_query_names_no_second_one(folder):
    with PoolBench(folder) as bench:
        bench.submit([1, 2], QUERY, "a")
        bench.run()
        with pytest.raises(UserError, match="request 'a' keeps a query"):
            bench.submit([1, 2], QUERY.with_changes(query_key="p"), "a")
        bench.core.abort(Abort("a"))
        assert not bench.core.scheduler._queries
        bench.submit([1, 2], QUERY.with_changes(query_key="p"), "a")  # free again
