"""/v1/responses: the openai client unmodified, stored conversations, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import threading
from types import SimpleNamespace

import pytest

from serve.asgi import at_door
from serve.dialects import CALL, THOUGHT, with_server
from serve.samples import MESSAGES
from slipstream.base.errors import InvalidOption
from slipstream.front import prompts
from slipstream.serve.http.server.batch_runner import call_route
from slipstream.serve.http.server.state import ResponseStore, StoredResponse

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


def test_the_openai_client(folder):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    import pydantic

    class Town(pydantic.BaseModel):
        name: str

    async def scenario(door, url):
        client = openai.AsyncOpenAI(api_key="mine", base_url=f"{url}/v1", max_retries=0)
        first = await client.responses.create(model="tiny", input="Hello", instructions="Be short.")
        assert first.output_text == "All is well." and first.status == "completed"
        assert first.usage.output_tokens == 12 and "Be short." in door.core.prompts[-1]
        second = await client.responses.create(model="tiny", input="And now?", previous_response_id=first.id)
        assert all(text in door.core.prompts[-1] for text in ("Hello", "All is well.", "And now?"))
        assert "Be short." not in door.core.prompts[-1] and second.previous_response_id == first.id
        assert (await client.responses.retrieve(first.id)).output_text == "All is well."
        assert [item.role async for item in client.responses.input_items.list(first.id)] == ["user"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await client.responses.retrieve(first.id)
        short = await client.responses.create(model="tiny", input="Hello", max_output_tokens=3)
        assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert short.output[0].status == "incomplete"

        async with client.responses.stream(model="tiny", input="Hello") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "All is well." and kinds[0] == "response.created"
        assert kinds[-1] == "response.completed" and "response.output_text.delta" in kinds

        door.core.texts = [THOUGHT + CALL] * 2
        answer = await client.responses.create(model="tiny", input="Rain?", tools=[TOOL])
        thought, call = answer.output
        assert thought.content[0].text == "It is late." and thought.type == "reasoning"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
        how = dict(model="tiny", tools=[TOOL])
        some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
        await client.responses.create(**how, tool_choice=some, input=[result], previous_response_id=answer.id)
        assert all(text in door.core.prompts[-1] for text in ("Rain?", "Oslo", "Rain"))
        stored = door.core.prompts[-1]
        door.core.texts = [THOUGHT + CALL]
        history = [{"role": "user", "content": "Rain?"}, *answer.output, result]
        async with client.responses.stream(**how, input="Rain?") as stream:
            events = [event async for event in stream]
        pieces = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == '{"city": "Oslo"}'
        assert "".join(each.delta for each in events if each.type == "response.reasoning_text.delta") == "It is late."
        given = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in history]
        await client.responses.create(**how, input=given, store=False)
        assert door.core.prompts[-1] == stored  # a conversation that is sent is the same as one that is stored

        door.core.texts = ['{"name": "Oslo"}']
        parsed = await client.responses.parse(model="tiny", input="A town?", text_format=Town)
        assert parsed.output_parsed == Town(name="Oslo")
        assert door.core.submits[-1].params.structured_outputs.json is not None
        await client.close()

    with_server(folder, scenario, reasoning_parser="qwen3", api_key=["mine"])


def test_the_events_of_a_stream_are_numbered_and_complete(folder):
    async def scenario(door, url):
        door.core.texts = [THOUGHT + "Well." + CALL]
        body = {"input": "Hello", "stream": True, "tools": [TOOL]}
        events = (await door.post("/v1/responses", body)).parsed()
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        kinds = [each["type"].removeprefix("response.") for each in events if not each["type"].endswith("delta")]
        added, done = "output_item.added", "output_item.done"
        assert kinds == [
            "created", "in_progress",
            added, "content_part.added", "reasoning_text.done", "content_part.done", done,
            added, "content_part.added", "output_text.done", "content_part.done", done,
            added, "function_call_arguments.done", done, "completed",
        ]  # fmt: skip
        parts = [each["part"]["type"] for each in events if each["type"] == "response.content_part.added"]
        assert parts == ["reasoning_text", "output_text"]
        items = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == items
        whole = (await door.get(f"/v1/responses/{events[-1]['response']['id']}")).json()
        assert whole == events[-1]["response"]

    with_server(folder, scenario, reasoning_parser="qwen3")


def test_only_the_last_item_of_an_answer_that_is_cut_is_incomplete(folder):
    """Also where the item before it ends in the same part of the stream."""

    async def scenario(door, url):
        body = {"input": "Hello", "max_output_tokens": 20}
        statuses = {}
        for stream in (False, True):
            door.core.texts = ["<think>ab</think>bcdefg"]  # in parts of 5 tokens: the last one is k>bcd
            answer = (await door.post("/v1/responses", body | {"stream": stream})).parsed()
            done = [each["item"] for each in answer if each["type"] == "response.output_item.done"] if stream else None
            statuses[stream] = [(item["type"], item["status"]) for item in done or answer["output"]]
        assert statuses[False] == statuses[True] == [("reasoning", "completed"), ("message", "incomplete")]

    with_server(folder, scenario, reasoning_parser="qwen3")


def test_an_error_within_a_stream_is_its_next_event(folder):
    async def scenario(door):
        stream = door.begin("POST", "/v1/responses", {"input": "hi", "stream": True}, x_request_timeout="60")
        await door.core.until(lambda: door.core.submits)
        door.core.token(door.core.submits[0], 65)
        await stream.until(b'"A"')
        door.pass_time(60)
        await stream.end()
        events = stream.parsed()
        assert (events[-1]["type"], events[-1]["code"]) == ("error", "deadline")
        assert [each["sequence_number"] for each in events] == list(range(len(events)))

    at_door(folder, scenario, answers=False)


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (["R1", "-A", "R2", "-B"], "[R1|A][R2|B]"),  # text, twice
        (["R1", "-A", "R2", "f"], "[R1R2|A+f]"),  # text and a call
        (["R1", "f", "R2", "-B"], "[R1|+f][R2|B]"),
        (["R1", "R2", "-A"], "[R1R2|A]"),
        (["R1"], ""),
    ],
)
def test_reasoning_is_that_of_the_item_behind_it(folder, answer, shown):
    template = (
        "{% for m in messages %}[{{ m.reasoning_content or '' }}|{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}+{{ call.function.name }}{% endfor %}]{% endfor %}"
    )

    def item(text):
        if text[0] == "-":
            return {"role": "assistant", "content": text[1:]}
        if text[0] == "f":
            return {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    async def scenario(door):
        body = {"input": [*map(item, answer), *MESSAGES], "max_output_tokens": 2}
        assert (await door.post("/v1/responses", body)).status == 200
        prompt = bytes(door.core.submits[-1].prompt_token_ids).decode()
        assert prompt == f"{shown}[|{MESSAGES[0]['content']}]"

    at_door(folder, scenario, model={"chat_template": template})


def test_responses_are_private_to_their_key(folder):
    async def scenario(door):
        mine, other = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
        id = (await door.post("/v1/responses", {"input": "hi", "max_output_tokens": 2}, **mine)).json()["id"]
        assert (await door.get(f"/v1/responses/{id}", **mine)).status == 200
        assert (await door.get(f"/v1/responses/{id}", **other)).status == 404
        body = {"input": "more", "previous_response_id": id, "max_output_tokens": 2}
        refused = await door.post("/v1/responses", body, **other)
        assert refused.status == 404 and refused.json()["error"]["param"] == "previous_response_id"
        assert (await door.begin("DELETE", f"/v1/responses/{id}", **other).end()).status == 404
        assert (await door.post("/v1/responses", body, **mine)).status == 200

    at_door(folder, scenario, api_key=["mine", "other"])


def test_ids_are_not_those_of_the_client_nor_guessable(folder):
    """Without API keys all callers are one owner, so a response is as private as its id."""

    async def scenario(door):
        body, own = {"input": "hi", "max_output_tokens": 2}, {"x-request-id": "own"}
        ids = [(await door.post("/v1/responses", body, **own)).json()["id"] for _ in range(3)]
        assert len(set(ids)) == len(door.state.responses) == 3 and not any("own" in id for id in ids)
        assert not any(door.state.new_id()[:12] in id for id in ids)  # the prefix of all requests of a front end
        stored = [door.state.responses.find("", id) for id in ids]
        assert door.state.responses.num_bytes == sum(each.size for each in stored)

    at_door(folder, scenario)


def test_lines_of_a_batch_do_not_use_the_store(folder):
    """A line has no API key, so that lines of all callers would be one owner."""

    async def scenario(door):
        async def line(**more):
            body = json.dumps({"input": "hi", "max_output_tokens": 2, **more}).encode()
            return await call_route(door.app, "/v1/responses", body, "one", "batch mine")

        reply = await line()
        assert reply.status == 200 and json.loads(reply.body)["store"] is False and len(door.state.responses) == 0
        for field in ({"store": True}, {"previous_response_id": "resp_1"}):
            reply = await line(**field)
            assert reply.status == 400 and json.loads(reply.body)["error"]["param"] == next(iter(field))

    at_door(folder, scenario, api_key=["mine", "other"])


def test_the_input_has_pages_and_no_parameter_is_ignored(folder):
    async def scenario(door):
        items = [{"role": "user", "content": f"{place}", "id": "same" if place > 2 else None} for place in range(5)]
        body = {"input": items, "max_output_tokens": 2}
        path = f"/v1/responses/{(await door.post('/v1/responses', body)).json()['id']}"

        async def page(query):
            found = (await door.begin_raw("GET", f"{path}/input_items", [], query, b"").end()).json()
            return [each["content"] for each in found["data"]], found["last_id"], found["has_more"]

        assert await page(b"limit=2") == (["4", "3"], "same", True)
        assert await page(b"limit=2&after=same") == (["2", "1"], "item_1", True)
        assert await page(b"order=asc&after=item_1") == (["2", "3", "4"], "same", False)
        for query, place in ((b"include=x", "/input_items"), (b"after=y", "/input_items"), (b"stream=true", "")):
            assert (await door.begin_raw("GET", path + place, [], query, b"").end()).status == 400

    at_door(folder, scenario)


def stored(size, owner="me"):
    return StoredResponse(owner, b"x" * size, b"", b"")


def test_the_store_is_bounded():
    store = ResponseStore(3, 1000)
    for place in range(4):
        store.add(f"{place}", stored(100))
    assert len(store) == 3 and store.find("me", "0") is None
    assert store.find("me", "1") is not None  # used last now
    store.add("large", stored(700))
    assert store.find("me", "1") is not None and store.find("me", "2") is None
    assert store.find("other", "1") is None and not store.delete("other", "1")
    store.add("too large", stored(2000))
    assert store.find("me", "too large") is None and store.num_bytes == 900
    assert store.delete("me", "1") and store.find("me", "1") is None
    none = ResponseStore(0, 1000)
    none.add("a", stored(1))
    assert len(none) == 0


@pytest.mark.parametrize(("max_count", "max_bytes"), [(4, 10**6), (100, 400)])
def test_one_caller_cannot_drop_the_responses_of_others(max_count, max_bytes):
    store = ResponseStore(max_count, max_bytes)
    store.add("theirs", stored(100, "other"))
    for place in range(20):
        store.add(f"{place}", stored(100))
    assert len(store) == 4 and store.find("other", "theirs") is not None
    assert [store.find("me", f"{place}") is not None for place in range(16, 20)] == [False, True, True, True]


def test_front_ends_share_a_store(tmp_path):
    one, other = (ResponseStore(10, 1000, tmp_path / "responses.sqlite") for _ in range(2))
    one.add("a", stored(100))
    assert other.find("me", "a") == one.find("me", "a") == stored(100)
    assert other.delete("me", "a") and one.find("me", "a") is None
    one.close()
    other.close()


def test_a_store_in_a_full_folder_keeps_what_it_has_and_goes_on(tmp_path, caplog):
    store = ResponseStore(10, 10**6, tmp_path / "responses.sqlite")
    store.add("a", stored(1000))
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages + 5}")  # others fill the rest
    for name in "bcd":
        store.add(name, stored(50_000))  # COMMIT or INSERT fails
    assert [record.message.partition(":")[0] for record in caplog.records] == ["response b is not stored"]
    assert store.find("me", "a") == stored(1000) and store.find("me", "b") is None
    store._db.execute("PRAGMA max_page_count = 100000")
    store.add("e", stored(50_000))
    assert store.find("me", "e") == stored(50_000) and store.delete("me", "a")
    store.close()


def test_a_store_fits_its_folder_or_is_refused_by_name(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=30_000))
    store, other = (ResponseStore(10, 10**6, tmp_path / "responses.sqlite") for _ in range(2))
    store.add("a", stored(9_000))
    store.add("b", stored(9_000))
    assert len(store) == 1 and other.find("me", "b") is not None
    assert len(caplog.records) == 1 and "10000 bytes in" in caplog.text and "--shm-size" in caplog.text
    store.close()
    other.close()
    missing = tmp_path / "missing" / "responses.sqlite"
    with pytest.raises(InvalidOption, match="have no room in .*missing: .*; give /dev/shm more room"):
        ResponseStore(10, 10**6, missing)
    ResponseStore(0, 10**6, missing).close()  # it stores nothing


def test_front_ends_that_start_at_once_open_the_store(tmp_path):
    """Without a lock, one of two got "database is locked" in 4 of 100 attempts, and died."""
    for attempt in range(100):
        path, barrier = tmp_path / f"{attempt}.sqlite", threading.Barrier(2)
        stores = []

        def open_store(path=path, barrier=barrier, stores=stores):
            barrier.wait()
            stores.append(ResponseStore(10, 1000, path))

        threads = [threading.Thread(target=open_store) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(stores) == 2, f"attempt {attempt}"
        for store in stores:
            store.close()


def test_long_reasoning_is_counted_outside_the_event_loop(folder, monkeypatch):
    threads = []
    monkeypatch.setattr(prompts, "LONG", 100)

    async def scenario(door, url):
        served = door.state.engine.models["tiny"]
        encode = type(served.tokenizer).encode

        def noting(self, text, **how):
            if "late" in text:
                threads.append((len(text), threading.current_thread() is threading.main_thread()))
            return encode(self, text, **how)

        monkeypatch.setattr(type(served.tokenizer), "encode", noting)
        for stream in (False, True):
            door.core.texts = ["<think>" + "late " * 40 + "</think>Yes."]
            answer = await door.post("/v1/responses", {"model": "tiny", "input": "Hello", "stream": stream})
            assert answer.status == 200 and b'"reasoning_tokens":199' in answer.body

    with_server(folder, scenario, reasoning_parser="qwen3")
    assert threads == [(199, False)] * 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'; give function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather", "mode": "auto"}}, "tool_choice.mode"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": []}, "input is empty"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": ["reasoning.encrypted_content"]}, "reasoning is returned as text"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, body, words):
    async def scenario(door):
        refused = await door.post("/v1/responses", {"input": "hi", **body})
        assert refused.status == 400 and words in refused.said, refused.body

    at_door(folder, scenario)


def test_a_response_that_is_not_stored_is_not_kept(folder):
    async def scenario(door):
        body = {"input": [*MESSAGES], "max_output_tokens": 2, "store": False}
        answer = (await door.post("/v1/responses", body)).json()
        assert answer["store"] is False and len(door.state.responses) == 0
        assert "background" in (await door.post(f"/v1/responses/{answer['id']}/cancel", b"")).said

    at_door(folder, scenario)
