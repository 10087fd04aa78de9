"""How pooling requests end when they do not end well: with an error in their dialect, and nothing left under way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from patience import PATIENCE
from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door
from slipstream.base.errors import QueueFull
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import Output, Pooled
from slipstream.contracts.request import FinishReason
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes
from slipstream.transport.frames import Refused

ASKED = {
    "/v1/embeddings": {"input": "ab"},
    "/pooling": {"input": ["ab", "cd"], "task": "embed"},
    "/rerank": {"query": "q", "documents": ["ab", "cd"]},
    "/embed": {"inputs": ["ab", "cd"]},
}
STATUS = {  # as OpenAI's, and as TEI's
    "error": (500, 424),
    "abort": (503, 503),
    "refused": (429, 429),
}


def at_door(folder, scenario, pooling=EVERY_TASK, **settings):
    async def main():
        engine, core = await ScriptedCore.open(facts(folder, pooling=pooling, max_kept=100), answers=False)
        door = Door(App(State(ServerSettings(**settings), engine), all_routes()), core)
        await asyncio.wait_for(scenario(door), PATIENCE)
        assert (engine.load.num_open, engine.load.num_queued, engine.load.queued_tokens) == (0, 0, 0)
        await engine.close()
        return engine

    return asyncio.run(main())


def test_many_pairs_of_late_interaction_go_some_at_a_time(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/score", {"text_1": ["a b"] * 5, "text_2": ["c"] * 5})
        num_sent = 0
        while num_sent < 10:
            await door.core.until(lambda: len(door.core.submits) > num_sent)  # noqa: B023
            group, num_sent = door.core.submits[num_sent:], len(door.core.submits)
            queries = [one for one in group if one.params.is_query]
            assert 0 < len(queries) < 5 and len(group) == 2 * len(queries)
            for one in group:
                pooled = Pooled.of(np.array([num_sent], np.float32))
                door.core.say(Output(one.request_id, 0, [], None, FinishReason.STOP, pooled=pooled))
        await exchange.end()
        assert exchange.status == 200 and [one["score"] for one in exchange.json()["data"]] == [6, 6, 6, 10, 10]

    late = PoolingInfo(
        tasks=("token_embed",), methods=("all",), late_interaction=True, embed_size=4, token_size=4, is_causal=False
    )
    at_door(folder, scenario, late, max_queued_requests=6)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("how", STATUS)
def test_one_prompt_without_a_result_ends_the_request(folder, path, how):
    async def scenario(door):
        exchange = door.begin("POST", path, ASKED[path])
        await door.core.until(lambda: door.core.submits)
        *others, last = door.core.submits
        numbers = Pooled.of(np.ones(1 if last.params.task == "classify" else 8, np.float32))
        for submit in others:
            door.core.say(Output(submit.request_id, 0, [], None, FinishReason.STOP, pooled=numbers))
        if how == "error":
            door.core.say(Output(last.request_id, 0, [], None, FinishReason.ERROR, error="no numbers"))
        elif how == "refused":
            door.core.say(Refused.of(last.request_id, QueueFull("full")))
        else:
            await door.state.engine.abort_all()
        await exchange.end()
        assert exchange.status == STATUS[how][path == "/embed"]
        body = exchange.json()
        text = body["error"] if path == "/embed" else body["error"]["message"]
        assert {"error": "no numbers", "refused": "full", "abort": "aborted"}[how] in text

    engine = at_door(folder, scenario)
    assert engine.stats["tiny"].finished.get({"error": "error"}.get(how, "abort"), 0) >= 1


@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_leaves_is_aborted_in_the_core(folder, path):
    async def scenario(door):
        exchange = door.begin("POST", path, ASKED[path])
        await door.core.until(lambda: door.core.submits)
        exchange.hang_up()
        await exchange.end()
        names = {submit.request_id for submit in door.core.submits}
        await door.core.until(lambda: {abort.request_id for abort in door.core.aborts} == names)
        assert door.state.counters.aborted == {"disconnect": 1}

    at_door(folder, scenario)


def test_more_than_may_wait_is_refused_in_the_dialect_of_the_route(folder):
    async def scenario(door):
        waiting = door.begin("POST", "/v1/embeddings", {"input": ["a", "b"]})
        await door.core.until(lambda: len(door.core.submits) == 2)
        for path, name, kind in (("/v1/embeddings", "input", None), ("/embed", "inputs", "Overloaded")):
            exchange = await door.post(path, {name: ["a", "b", "c", "d"]})  # not now
            assert exchange.status == 429 and int(exchange.headers["retry-after"]) >= 1
            assert kind is None or exchange.json()["error_type"] == kind
            exchange = await door.post(path, {name: ["a"] * 5})  # never
            assert exchange.status == (400 if kind is None else 413) and b"--max-queued-requests" in exchange.body
        assert len(door.core.submits) == 2 and door.state.counters.refused == {"queue_full": 2}
        waiting.hang_up()
        await waiting.end()

    at_door(folder, scenario, max_queued_requests=4)


def test_equal_texts_of_one_request_are_sent_once(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/v1/embeddings", {"input": ["ab", "cd", "ab"]})
        await door.core.until(lambda: door.core.submits)
        assert len(door.core.submits) == 2
        for place, submit in enumerate(door.core.submits):
            numbers = Pooled.of(np.full(8, place, np.float32))
            door.core.say(Output(submit.request_id, 0, [], None, FinishReason.STOP, pooled=numbers))
        answer = (await exchange.end()).json()
        assert [one["embedding"][0] for one in answer["data"]] == [0, 1, 0]
        assert answer["usage"]["prompt_tokens"] == 6  # as often as they came

    at_door(folder, scenario)
