"""ReplicaClient over scripted cores: routing, deaths and restarts, without a model."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from patience import PATIENCE
from scripted_core import EVERY_TASK, ScriptedCore, facts
from slipstream.base.errors import EngineDead, ReplicaLost
from slipstream.base.processes import Backoff
from slipstream.contracts.messages import Submit
from slipstream.contracts.request import FinishReason
from slipstream.front.async_engine import AsyncEngine
from slipstream.metrics.stats import LaneStats
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.transport.frames import ModelDescriptions, Pulse, Ready
from slipstream.transport.replica_routing import ReplicaLoad, choose_replica
from slipstream.transport.replicas import ReplicaClient
from slipstream.transport.sockets import SocketClient
from tiny_tokenizer import write_byte_tokenizer

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


class ScriptedReplicas:
    """A ReplicaSource of scripted cores. `started` has every core in the order of its start."""

    def __init__(self, folder, *, answers=True, pages=64, max_loras=0, **more):
        self.models = [facts(folder, **more)]
        self.answers = answers
        self.pages = pages
        self.max_loras = max_loras
        self.started: list[tuple[int, ScriptedCore]] = []
        self.changed = asyncio.Event()

    async def start(self, index):
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, core = await loop.create_unix_connection(lambda: ScriptedCore(answers=self.answers), sock=theirs)
        client = await SocketClient.connect(ours)
        core.say(Pulse([LaneStats("tiny", num_pages=self.pages, page_size=4, max_loras=self.max_loras)]))
        core.say(ModelDescriptions(self.models, os.getpid()), Ready())
        self.started.append((index, core))
        self.changed.set()
        return client

    async def ended(self, index):
        return None

    async def close(self):
        for _, core in self.started:
            core.transport.abort()

    def core(self, index):
        """The last core of a replica."""
        return [core for each, core in self.started if each == index][-1]

    async def until_started(self, count):
        while len(self.started) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


def with_replicas(folder, scenario, count=2, backoff=lambda: Backoff(first=0.0), **script):
    async def main():
        source = ScriptedReplicas(folder, **script)
        client = ReplicaClient(source, count, backoff)
        engine = AsyncEngine(client=client)
        try:
            await asyncio.wait_for(engine.until_ready(), PATIENCE)
            return await asyncio.wait_for(scenario(engine, source), PATIENCE)
        finally:
            await engine.close()

    return asyncio.run(main())


async def last(stream):
    async for result in stream:
        final = result
    return final


def begin(engine, prompt, **params):
    return asyncio.ensure_future(last(engine.generate(prompt, PARAMS.with_changes(**params))))


async def until_submitted(core, count):
    await core.until(lambda: len(core.submits) >= count)
    return core.submits[count - 1]


def test_requests_go_to_the_replica_with_less_work(folder):
    async def scenario(engine, source):
        tasks = [begin(engine, [9] * 40)]
        await until_submitted(source.core(0), 1)
        for number in (5, 6):  # together shorter than the first prompt
            tasks.append(begin(engine, [number] * 3))
            await asyncio.sleep(0)
        await until_submitted(source.core(1), 2)
        first = source.core(0).submits[0]
        source.core(0).token(first, 1, 2, 3, end=FinishReason.LENGTH)
        await tasks[0]
        tasks.append(begin(engine, [7] * 3))
        await until_submitted(source.core(0), 2)
        for task in tasks:
            task.cancel()
        return len(source.core(0).submits), len(source.core(1).submits)

    assert with_replicas(folder, scenario, answers=False) == (2, 2)


def test_a_prompt_goes_where_its_prefix_is_cached(folder):
    shared = [*range(60)]

    async def scenario(engine, source):
        first = begin(engine, shared)
        source.core(0).token(await until_submitted(source.core(0), 1), 1, 2, 3, end=FinishReason.LENGTH)
        await first
        tasks = [begin(engine, [7] * 8)]  # replica 0 is busy now, with less work than the prefix
        await until_submitted(source.core(0), 2)
        tasks.append(begin(engine, [*shared[:56], 99]))
        with_prefix = await until_submitted(source.core(0), 3)
        tasks.append(begin(engine, [98, *shared[:56]]))
        without_prefix = await until_submitted(source.core(1), 1)
        for task in tasks:
            task.cancel()
        return with_prefix.prompt_token_ids[-1], without_prefix.prompt_token_ids[0]

    assert with_replicas(folder, scenario, answers=False) == (99, 98)


def test_a_long_queue_outweighs_a_cached_prefix(folder):
    shared = list(range(20, 52))

    async def scenario(engine, source):
        tasks = [begin(engine, [*shared, number]) for number in range(1, 5)]
        await until_submitted(source.core(1), 1)
        for task in tasks:
            task.cancel()

    with_replicas(folder, scenario, answers=False)


SQL, CHAT = LoRARequest("sql", 1, "/sql"), LoRARequest("chat", 2, "/chat")


def test_requests_go_where_their_adapter_is_loaded(folder):
    async def finish(engine, source, index, count, adapter):
        task = asyncio.ensure_future(last(engine.generate([count] * 3, PARAMS, lora_request=adapter)))
        source.core(index).token(await until_submitted(source.core(index), count), 1, end=FinishReason.LENGTH)
        await task

    async def scenario(engine, source):
        await finish(engine, source, 0, 1, SQL)
        await finish(engine, source, 1, 1, CHAT)  # replica 0 would drop the adapter that it has
        await finish(engine, source, 1, 2, CHAT)
        busy = begin(engine, [9] * 40)
        await until_submitted(source.core(0), 2)
        await finish(engine, source, 0, 3, SQL)  # a few tokens of other requests are soon computed
        busy.cancel()
        source.core(0).transport.abort()
        await source.until_started(3)
        while not engine.client.replicas[0].is_ready:
            await asyncio.sleep(0)
        busy = begin(engine, [9] * 40)
        await until_submitted(source.core(0), 1)
        await finish(engine, source, 1, 3, SQL)  # a replica that was started again has no adapter

    with_replicas(folder, scenario, answers=False, max_loras=1, max_lora_rank=16)


def test_an_adapter_is_loaded_again_where_it_was_dropped_or_the_queue_is_long():
    loads = [ReplicaLoad(), ReplicaLoad()]

    def route(adapter, *, num_tokens=8, ends=True):
        chosen, (cost,) = choose_replica(loads, [Submit("a", [1] * num_tokens, PARAMS, 0.0, lora=adapter)], 0, 0, 1)
        if ends:
            cost.end()
        return chosen

    assert [route(adapter) for adapter in (SQL, CHAT, SQL, CHAT)] == [0, 1, 0, 1]
    assert route(None, num_tokens=400, ends=False) == 0
    assert route(None, num_tokens=300, ends=False) == 1
    assert route(SQL) == 0
    assert route(None, num_tokens=700, ends=False) == 1
    assert route(CHAT) == 0  # instead of SQL, which has been dropped now
    assert route(CHAT) == 0
    assert loads[0].has_adapter(CHAT) and not loads[0].has_adapter(SQL)


def test_documents_follow_their_query(folder):
    async def scenario(engine, source):
        for number in range(4):
            engine.client.send(query(f"q{number}", 3))
        for number in range(4):
            for document in range(3):
                engine.client.send(doc(f"d{number}{document}", f"q{number}"))
        cores = [source.core(index) for index in (0, 1)]
        while sum(len(core.submits) for core in cores) < 16:
            await asyncio.sleep(0)
        for core in cores:
            queries = {each.params.query_key for each in core.submits if each.params.is_query}
            assert queries and all(each.params.query_key in queries for each in core.submits)
        while len(engine.client._queries):
            await asyncio.sleep(0)  # until the answers have arrived

    with_replicas(folder, scenario, pooling=EVERY_TASK)


def query(key, uses):
    return Submit(f"of-{key}", [1, 2], PoolingParams(task="token_embed", query_key=key, query_uses=uses), 0.0)


def doc(name, key):
    return Submit(name, [3, 4, 5], PoolingParams(task="token_embed", query_key=key), 0.0)


def test_requests_without_output_run_again_and_others_end(folder):
    async def scenario(engine, source):
        dead = source.core(0)
        sent, fresh = begin(engine, [1] * 8), begin(engine, [2] * 8)
        other = begin(engine, [3] * 4)
        await source.core(1).until(lambda: source.core(1).submits)
        await dead.until(lambda: dead.submits)
        by_prompt = {core: [each.prompt_token_ids[0] for each in core.submits] for core in (dead, source.core(1))}
        started = dead.submits[0]
        dead.token(started, 5)
        victims = {1: sent, 2: fresh, 3: other}
        with_output = victims.pop(started.prompt_token_ids[0])
        while not engine._requests[started.request_id].num_tokens:
            await asyncio.sleep(0)
        dead.transport.abort()
        with pytest.raises(ReplicaLost, match="replica 0 died"):
            await with_output
        survivor = source.core(1)
        await survivor.until(lambda: len(survivor.submits) == 2)
        for each in survivor.submits:
            survivor.token(each, 1, 2, 3, end=FinishReason.LENGTH)
        results = [await task for task in victims.values()]
        assert sum(map(len, by_prompt.values())) == 3
        await source.until_started(3)
        while not all(each.is_ready for each in engine.client.replicas):
            await asyncio.sleep(0)
        assert engine.pulse.replicas[0].num_rerouted == len(by_prompt[dead]) - 1
        assert engine.client.replicas[0].num_restarts == 1
        assert [each.load.num_tokens for each in engine.client.replicas] == [0, 0]
        return [result.outputs[0].token_ids for result in results]

    assert with_replicas(folder, scenario, answers=False) == [[1, 2, 3]] * 2


def test_a_request_that_was_running_when_two_replicas_died_ends(folder):
    async def scenario(engine, source):
        task = begin(engine, [1, 2, 3])
        await until_submitted(source.core(0), 1)
        source.core(0).transport.abort()
        await until_submitted(source.core(1), 1)
        source.core(1).transport.abort()
        with pytest.raises(ReplicaLost, match="2 replicas died"):
            await task
        await source.until_started(4)

    with_replicas(folder, scenario, answers=False)


def test_a_stored_query_is_computed_again_for_the_documents_that_are_left(folder):
    async def scenario(engine, source):
        core = source.core(0)
        engine.client.send(query("q", 3))
        await until_submitted(core, 1)
        for index in range(2):
            engine.client.send(doc(f"d{index}", "q"))
        await until_submitted(core, 3)
        core.token(core.submits[0], end=FinishReason.STOP)
        core.token(core.submits[1], end=FinishReason.STOP)
        while len(engine.client.replicas[0].requests) > 1:
            await asyncio.sleep(0)
        core.transport.abort()
        survivor = source.core(1)
        await until_submitted(survivor, 2)
        engine.client.send(doc("d2", "q"))
        await until_submitted(survivor, 3)
        assert [each.request_id for each in survivor.submits] == ["of-q", "d1", "d2"]
        return survivor.submits[0].params.query_uses

    assert with_replicas(folder, scenario, answers=False, pooling=EVERY_TASK) == 2


def test_requests_wait_while_no_replica_is_ready(folder):
    async def scenario(engine, source):
        for index in (0, 1):
            source.core(index).transport.abort()
        while any(each.is_ready for each in engine.client.replicas):
            await asyncio.sleep(0)
        result = await last(engine.generate([1, 2, 3], PARAMS))
        return len(result.outputs[0].token_ids)

    assert with_replicas(folder, scenario) == 3


def test_the_engine_ends_when_no_replica_may_start_again(folder):
    async def scenario(engine, source):
        task = begin(engine, [1, 2, 3])
        for index in (0, 1):
            source.core(index).transport.abort()
        with pytest.raises(EngineDead, match="all replicas"):
            await task
        return engine.client.is_lost

    assert with_replicas(folder, scenario, backoff=lambda: Backoff(limit=1), answers=False)


def test_resets_and_aborts_reach_the_replicas(folder):
    async def scenario(engine, source):
        await engine.reset_prefix_cache()
        assert [source.core(index).num_resets for index in (0, 1)] == [1, 1]
        assert await engine.abort_others() == 0
        task = begin(engine, [1, 2, 3])
        submit = await until_submitted(source.core(0), 1)
        await engine.abort(submit.request_id)
        assert (await task).outputs[0].finish_reason == "abort"
        await source.core(0).until(lambda: source.core(0).aborts)
        return len(source.core(1).aborts), engine.client.replicas[0].load.num_open

    assert with_replicas(folder, scenario, answers=False) == (0, 0)
