"""How pooling requests end when they do not end well: with an error in their dialect, and nothing left under way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door
from slipstream.engine.link.wire import Refused
from slipstream.errors import QueueFull
from slipstream.messages import Output, Pooled
from slipstream.request import FinishReason
from slipstream.serve.http.app import App
from slipstream.serve.http.settings import Settings
from slipstream.serve.http.state import State
from slipstream.serve.http.table import all_routes

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


def at_door(folder, scenario, **settings):
    async def main():
        engine, core = await ScriptedCore.open(facts(folder, pooling=EVERY_TASK), answers=False)
        door = Door(App(State(Settings(**settings), engine), all_routes()), core)
        await asyncio.wait_for(scenario(door), 30)
        assert (engine.load.num_open, engine.load.num_queued, engine.load.queued_tokens) == (0, 0, 0)
        await engine.close()
        return engine

    return asyncio.run(main())


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
            exchange = await door.post(path, {name: ["a", "b", "c"]})  # not now
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
