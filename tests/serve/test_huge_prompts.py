"""Huge prompts: they neither pass the bound of the queue nor fill the memory of a front end."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import shutil
import threading
import types
from pathlib import Path

import msgspec
import pytest
from tokenizers import AddedToken

from patience import PATIENCE
from scripted_core import EVERY_TASK
from serve.asgi import at_door
from serve.samples import MESSAGES
from serve.server_process import ServerProcess
from slipstream.front import prompts
from slipstream.text.excerpt import max_chars
from slipstream.text.tokenizer import Tokenizer
from text.chat_templates import THINKING
from tiny_tokenizer import byte_tokenizer

LONG_TEXT = "x " * 5_000  # tokenised beside the event loop


@pytest.fixture
def held(monkeypatch):
    """Tokenising long texts waits until it is let go."""
    go_on = threading.Event()
    encode = Tokenizer.encodings

    def waiting(self, texts, *args, **how):
        assert max(map(len, texts)) < 100 or go_on.wait(PATIENCE)
        return encode(self, texts, *args, **how)

    monkeypatch.setattr(Tokenizer, "encodings", waiting)
    yield go_on
    go_on.set()


def test_prompts_that_are_tokenised_count_as_waiting(folder, held):
    async def scenario(door):
        ask = {"prompt": LONG_TEXT, "truncate_prompt_tokens": 8, "max_tokens": 1}
        first = [door.begin("POST", "/v1/completions", ask) for _ in range(5)]  # four, and one for a new caller
        while door.state.engine.load.num_encoding < 5:
            await asyncio.sleep(0)
        assert door.state.engine.load.num_queued == 0
        refused = await door.post("/v1/completions", ask | {"prompt": "short"})
        assert refused.status == 429 and "5 requests are waiting" in refused.error
        assert (await door.get("/load")).json()["queued_requests"] == 5
        held.set()
        assert [(await each.end()).status for each in first] == [200] * 5
        assert (await door.post("/v1/completions", ask)).status == 200

    at_door(folder, scenario, max_queued_requests=4)


def test_characters_that_wait_to_be_tokenised_are_bounded(folder, held, monkeypatch):
    monkeypatch.setattr("slipstream.serve.http.server.state._MAX_CHARS", 25_000)
    monkeypatch.setattr("slipstream.serve.http.server.state.TOKENIZER_THREADS", prompts.TokenizerThreads(threads=1))

    async def scenario(door):
        ask = {"prompt": LONG_TEXT, "truncate_prompt_tokens": 8, "max_tokens": 1}
        first = [door.begin("POST", "/v1/completions", ask) for _ in range(2)]
        while door.state.engine.load.num_encoding < 2:
            await asyncio.sleep(0)
        for path, body in (("/v1/completions", ask), ("/tokenize", {"prompt": LONG_TEXT})):
            refused = await door.post(path, body)
            assert refused.status == 429 and refused.headers["retry-after"] == "1" and "characters" in refused.error
        assert (await door.post("/v1/completions", ask | {"prompt": "short"})).status == 200  # needs no thread
        held.set()
        assert [(await each.end()).status for each in first] == [200] * 2

    at_door(folder, scenario)


def test_a_client_that_leaves_while_its_prompt_waits_for_a_thread_leaves_nothing(folder, held, monkeypatch):
    monkeypatch.setattr(
        "slipstream.serve.http.server.state.TOKENIZER_THREADS", pool := prompts.TokenizerThreads(threads=1)
    )

    async def scenario(door):
        ask = {"prompt": LONG_TEXT, "truncate_prompt_tokens": 8, "max_tokens": 1}
        first, second = (door.begin("POST", "/v1/completions", ask) for _ in range(2))
        while door.state.engine.load.num_encoding < 2:
            await asyncio.sleep(0)
        second.hang_up()
        await second.end()
        assert door.state.engine.load.num_encoding == 1 and pool.size == len(LONG_TEXT)
        held.set()
        assert (await first.end()).status == 200
        assert len(door.core.submits) == 1

    at_door(folder, scenario)


COUNT = "/v1/messages/count_tokens"
HUGE = "x" * (2**21 + 1)
THOUGHT = [*MESSAGES, {"role": "assistant", "content": "a", "reasoning_content": HUGE}, *MESSAGES]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": HUGE}),
        ("/tokenize", {"inputs": ["x" * 2**20] * 3}),
        ("/tokenize", {"messages": THOUGHT}),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": HUGE}}),
        (COUNT, {"model": "tiny", "messages": [{"role": "user", "content": HUGE}]}),
        (COUNT, {"model": "tiny", "messages": MESSAGES, "tools": [{"name": "a", "description": HUGE}]}),
    ],
    ids=["prompt", "inputs", "reasoning", "variables", "count", "count tools"],
)
def test_what_is_tokenised_for_its_own_sake_is_bounded(folder, path, body):
    async def scenario(door):
        refused = await door.post(path, body)
        assert refused.status in (400, 422) and b"in parts" in refused.body and b"2097152" in refused.body

    at_door(folder, scenario, model={"chat_template": THINKING})


@pytest.fixture(scope="module")
def nothing_before():
    """Later collections leave out what is there now, which would take 0.6 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def garbage(nothing_before):
    """Frames that only the collector can free, since the test began: they hold bodies and prompts."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def found() -> list[str]:
        gc.collect()
        frames = [each for each in gc.garbage if isinstance(each, types.FrameType)]
        return [frame.f_code.co_qualname for frame in frames if "slipstream" in frame.f_code.co_filename]

    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


HUGE = "some words " * 20_000
REFUSED = {
    "too long": ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}, 400),
    "too long for a vector": ("/v1/embeddings", {"input": [HUGE]}, 400),
    "too large": ("/v1/completions", {"prompt": HUGE * 80}, 413),
    "a wrong field": ("/v1/completions", {"prompt": HUGE, "temperature": "hot"}, 400),
    "a wrong value": ("/v1/completions", {"prompt": HUGE, "temperature": -1}, 400),
    "no such model": ("/v1/completions", {"prompt": HUGE, "model": "none"}, 404),
    "too late": ("/v1/completions", {"prompt": "a"}, 408),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_refused_request_is_gone_without_the_collectors_help(folder, case, garbage):
    """It holds megabytes in a few objects, so the collector might not come for long."""
    path, body, wanted = case

    async def scenario(door):
        assert (await door.post(path, body, x_request_timeout="0.05" if wanted == 408 else "60")).status == wanted
        await asyncio.sleep(0)
        assert not garbage()

    model = {"pooling": msgspec.structs.replace(EVERY_TASK, generates=True)}
    at_door(folder, scenario, model=model, answers=wanted != 408)


def test_a_request_whose_client_left_is_gone_without_the_collectors_help(folder, garbage):
    async def scenario(door):
        left = door.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 5})
        await door.core.until(lambda: door.core.submits)
        left.hang_up()
        await left.end()
        del left
        await asyncio.sleep(0)
        assert not garbage()

    at_door(folder, scenario, answers=False)


def resident(server: ServerProcess, process: str) -> float:
    _, page = server.call("GET", "/metrics")
    (line,) = (
        line
        for line in page.decode().splitlines()
        if line.startswith(f'process_resident_memory_bytes{{process="{process}"}}')
    )
    return float(line.rsplit(" ", 1)[1])


def test_a_front_end_that_was_sent_huge_chats_is_no_larger_than_before(tmp_path, tiny_folder):
    """8 chats of 4 MB at once. Tokenised whole they took 100 bytes a character, and kept them."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<strip>", lstrip=True)])  # so that characters alone tell nothing
    tokenizer.save(str(folder / "tokenizer.json"))
    server = ServerProcess(str(folder), "--max-model-len", "256", scripted=True)
    body = json.dumps({"messages": [{"role": "user", "content": "some words " * 400_000}], "max_tokens": 1})
    before, statuses = resident(server, "front_end_0"), []

    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        statuses.append((response.status, json.loads(response.read())["error"]["code"]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [(400, "context_length_exceeded")] * 8
    assert resident(server, "front_end_0") - before < 2**26
    assert resident(server, "core") > 0
    assert server.stop() == 0, server.lines[-5:]


def test_the_bound_of_what_is_read_fits_a_long_context():
    assert max_chars(131_072) == 64 * 131_072
