"""Ollama's routes: its own client unmodified, and what the client does not show."""

from __future__ import annotations

import asyncio
import json
import warnings

import pytest

from serve.asgi import at_door
from serve.dialects import CALL, THOUGHT, with_server
from serve.samples import MESSAGES
from slipstream.contracts.request import FinishReason
from slipstream.engine.model_description import StoredWeights
from slipstream.transport.frames import Pulse

FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_the_ollama_client(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ollama = pytest.importorskip("ollama", reason="needs the ollama client")

    async def scenario(door, url):
        client = ollama.AsyncClient(host=url)
        assert {each.model for each in (await client.list()).models} == {"tiny", "pool"}
        assert {each.name for each in (await client.ps()).models} == {"tiny", "pool"}
        shown = await client.show("tiny:latest")
        assert "tools" in shown.capabilities and shown.modelinfo["slipstream.context_length"] == 4096
        assert (await client.pull("tiny")).status == "success"

        answer = await client.chat("tiny", MESSAGES)
        assert answer.message.content == "All is well." and answer.done_reason == "stop" and answer.eval_count == 12
        # clients divide by the time of the answer, which is not that of the prompt
        assert answer.eval_duration > 0 and answer.prompt_eval_duration > 0
        assert answer.prompt_eval_duration + answer.eval_duration == answer.total_duration
        parts = [part async for part in await client.chat("tiny", MESSAGES, stream=True)]
        assert "".join(part.message.content for part in parts) == "All is well."
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]

        door.core.texts = [THOUGHT + CALL] * 2
        answer = await client.chat("tiny", MESSAGES, tools=[FUNCTION])
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
        assert answer.message.thinking == "It is late." and answer.message.content == ""
        parts = [part async for part in await client.chat("tiny", MESSAGES, tools=[FUNCTION], stream=True)]
        assert [call for part in parts for call in part.message.tool_calls or []] == [call]
        assert "".join(part.message.thinking or "" for part in parts) == "It is late."

        history = [*MESSAGES, answer.message, {"role": "tool", "content": "Rain", "tool_name": "weather"}]
        assert (await client.chat("tiny", history)).message.content == "All is well."
        assert "Rain" in door.core.prompts[-1] and "Oslo" in door.core.prompts[-1]

        answer = await client.generate("tiny", "Hello", system="Be short.", options={"num_predict": 3})
        assert answer.response == "All" and answer.done_reason == "length" and "Be short." in door.core.prompts[-1]
        await client.generate("tiny", "Hello", raw=True)
        assert door.core.prompts[-1] == "Hello"
        parts = [part async for part in await client.generate("tiny", "Hello", stream=True)]
        assert "".join(part.response for part in parts) == "All is well."

        await client.chat("tiny", MESSAGES, format={"type": "object"}, options={"temperature": 0.5, "stop": ["x"]})
        params = door.core.submits[-1].params
        assert params.structured_outputs.json is not None and params.temperature == 0.5 and list(params.stop) == ["x"]

        vectors = (await client.embed("pool", ["a", "b"])).embeddings
        assert len(vectors) == 2 and len(vectors[0]) == 8
        assert len((await client.embeddings("pool", "a")).embedding) == 8
        with pytest.raises(ollama.ResponseError, match="there is no model 'other'") as error:
            await client.chat("other", MESSAGES)
        assert error.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="options.mirostat is not supported"):
            await client.chat("tiny", MESSAGES, options={"mirostat": 2})

    with_server(folder, scenario, reasoning_parser="qwen3")


def test_ps_tells_how_much_of_a_model_a_gpu_has(folder):
    async def scenario(door):
        async def size():
            (model,) = (await door.get("/api/ps")).json()["models"]
            return model["size"], model["size_vram"]

        assert await size() == (500, 400)
        door.core.say(Pulse(is_asleep=True))
        while not door.state.engine.pulse.is_asleep:
            await asyncio.sleep(0)
        assert await size() == (500, 0)

    at_door(folder, scenario, model={"weights": StoredWeights("gguf", 500), "gpu_bytes": 400})


@pytest.mark.parametrize(("count", "size"), [(134_515_008, "134.52M"), (8 * 10**9, "8B"), (0, ""), (5_210, "5K")])
def test_details_are_those_of_the_files(folder, count, size):
    weights = StoredWeights("gguf", 91_736_000, count, "Q4_1")

    async def scenario(door):
        (model,) = (await door.get("/api/tags")).json()["models"]
        shown = (await door.post("/api/show", {"model": "tiny"})).json()
        assert model["size"] == 91_736_000 and shown["model_info"].get("general.parameter_count", 0) == count
        assert model["details"] == shown["details"] == {
            "parent_model": "", "format": "gguf", "family": "Llama", "families": ["Llama"], "parameter_size": size,
            "quantization_level": "Q4_1",
        }  # fmt: skip

    at_door(folder, scenario, model={"architecture": "Llama", "weights": weights})


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"options": {"num_gpu": 1}}, "options.num_gpu"),
        ("/api/chat", {"options": {"tempreature": 1}}, "no field options.tempreature; did you mean temperature?"),
        ("/api/chat", {"options": {"num_ctx": "many"}}, "options.num_ctx is 'many'"),
        ("/api/chat", {"options": {"num_ctx": 0}}, "options.num_ctx is 0"),
        ("/api/chat", {"options": {"num_ctx": 3}, "truncate": False}, "options.num_ctx is 3"),
        (
            "/api/generate",
            {"options": {"num_ctx": 3}, "raw": True, "prompt": "abcd", "truncate": False},
            "num_ctx is 3",
        ),
        ("/api/generate", {"prompt": "a" * 99, "truncate": False}, "maximum context length is"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "thinking": "b"}]}, "messages[0].thinking"),
        ("/api/chat", {"options": {"top_k": "many"}}, "options.top_k"),
        ("/api/chat", {"options": {"stop": 5}}, "options.stop"),
        ("/api/chat", {"options": {"penalize_newline": False}}, "options.penalize_newline"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature is -1"),
        ("/api/chat", {"options": {"top_k": 1.5}}, "options.top_k is 1.5"),
        ("/api/chat", {"options": {"num_predict": 99}}, "lower options.num_predict to 40"),
        ("/api/chat", {"options": {"seed": 2**64}}, "options.seed is 18446744073709551616"),
        ("/api/chat", {"format": "xml"}, "format"),
        ("/api/chat", {"keep_alive": "0s"}, "keep_alive"),
        ("/api/chat", {"think": True}, "think"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "tool_calls": [], "x": 1}]}, "messages[0].x"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ("/api/generate", {"raw": True, "system": "a"}, "system needs the chat template"),
        ("/api/embed", {"options": {"seed": 1}}, "options.seed is for generation"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, path, body, words):
    async def scenario(door):
        sample = {"/api/embed": {"input": "a"}, "/api/generate": {"prompt": "a"}}.get(path, {"messages": MESSAGES})
        refused = await door.post(path, {"model": "tiny", **sample, **body})
        if path == "/api/embed":  # the only model here generates
            assert refused.status == 400
            return
        assert refused.status == 400 and words in refused.said, refused.body

    at_door(folder, scenario)


@pytest.mark.parametrize(
    "options", [{"mirostat": 0}, {"repeat_last_n": -1, "repeat_penalty": 1.2}, {"num_ctx": 64}, {"num_ctx": 99}]
)
def test_options_that_ask_for_nothing_are_accepted(folder, options):
    async def scenario(door):
        body = {"model": "tiny", "messages": MESSAGES, "options": options | {"num_predict": 2}, "stream": False}
        answer = await door.post("/api/chat", body | {"keep_alive": "5m", "think": False})
        assert answer.status == 200 and answer.json()["done_reason"] == "length"

    at_door(folder, scenario)


@pytest.mark.parametrize(("seed", "used"), [(-1, None), (-2, -2), (7.0, 7), (2**64 - 1, 2**64 - 1)])
def test_the_seed_is_that_of_the_request_and_minus_one_is_none(folder, seed, used):
    async def scenario(door):
        await door.post("/api/generate", {"model": "tiny", "prompt": "a", "options": {"seed": seed}, "stream": False})
        assert door.core.submits[-1].params.seed == used

    at_door(folder, scenario)


def test_num_ctx_limits_the_prompt_and_the_answer_together(folder):
    async def scenario(door, url):
        door.core.texts = ["x" * 50] * 3
        body = {"model": "tiny", "prompt": "abcd", "raw": True, "stream": False, "options": {"num_ctx": 10}}
        answer = (await door.post("/api/generate", body)).json()
        assert (answer["prompt_eval_count"], answer["eval_count"], answer["done_reason"]) == (4, 6, "length")
        body["options"]["num_predict"] = 3
        assert (await door.post("/api/generate", body)).json()["eval_count"] == 3
        body["options"]["num_predict"] = 30
        assert (await door.post("/api/generate", body)).json()["eval_count"] == 6

    with_server(folder, scenario)


@pytest.mark.parametrize("options", [{"num_ctx": 60}, {"num_ctx": 60, "num_predict": 7}, {}])
def test_a_long_conversation_loses_its_oldest_messages(folder, options):
    """Tool results stay with their calls; what the system said stays. Room for an answer is left."""

    def said(role, text):
        return {"role": role, "content": text}

    async def scenario(door):
        old = [each for index in range(9) for each in (said("user", f"u{index}"), said("assistant", f"a{index}"))]
        messages = [said("system", "S"), *old, said("user", "last")]
        body = {"model": "tiny", "messages": messages, "options": options, "stream": False}
        assert (await door.post("/api/chat", body)).status == 200
        ids = door.core.submits[-1].prompt_token_ids
        text = bytes(each for each in ids if each < 256).decode()
        kept = [each["content"] for each in messages if each["content"] in text]
        context = options.get("num_ctx", door.state.engine.model(None).description.max_model_len)
        room = options.get("num_predict", context // 2)
        assert (
            kept[0] == "S"
            and kept[-1] == "last"
            and kept[1:] == [each["content"] for each in messages[-len(kept) + 1 :]]
        )
        assert kept[1][0] in "ul" and len(kept) < len(messages) and len(ids) <= context - room
        more = [said("system", "S"), *messages[-len(kept) - 1 :]]  # one exchange more would not fit
        longer = door.state.engine.model(None).inputs.render_chat(more)
        assert len(door.state.engine.model(None).tokenizer.encode(longer)) > context - room

    at_door(folder, scenario, model={"max_model_len": 80})


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_that_is_too_long_alone_keeps_its_end(folder, raw):
    async def scenario(door):
        body = {"model": "tiny", "prompt": "a" * 99 + "z", "raw": raw, "stream": False, "options": {"num_predict": 9}}
        assert (await door.post("/api/generate", body)).status == 200
        ids = door.core.submits[-1].prompt_token_ids
        assert len(ids) == 80 - 9 and ord("z") in ids
        assert (await door.post("/api/chat", body_of_chat("a" * 99 + "z"))).status == 200
        assert len(door.core.submits[-1].prompt_token_ids) == 40 and ord("z") in door.core.submits[-1].prompt_token_ids

    at_door(folder, scenario, model={"max_model_len": 80})


def test_responses_leave_out_messages_on_request_alone(folder):
    async def scenario(door):
        talk = [{"role": role, "content": "x" * 20} for role in ("user", "assistant", "user")]
        body = {"model": "tiny", "input": talk, "instructions": "S", "max_output_tokens": 4}
        refused = await door.post("/v1/responses", body)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        answer = (await door.post("/v1/responses", body | {"truncation": "auto"})).json()
        assert answer["truncation"] == "auto" and len(door.core.submits[-1].prompt_token_ids) <= 76

    at_door(folder, scenario, model={"max_model_len": 80})


def body_of_chat(text):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": False}


def test_num_ctx_truncates_texts_to_embed(folder):
    async def scenario(door, url):
        for path, name in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
            await door.post(path, {"model": "pool", name: "abcdef", "options": {"num_ctx": 4}})
            assert len(door.core.submits[-1].prompt_token_ids) == 4
        body = {"model": "pool", "input": ["a", "abcdef"], "options": {"num_ctx": 4}, "truncate": False}
        refused = await door.post("/api/embed", body)
        assert refused.status == 400 and "options.num_ctx is 4" in refused.said
        assert (await door.post("/api/embed", body | {"input": "abcd"})).status == 200

    with_server(folder, scenario)


def test_an_unknown_route_answers_in_the_format_of_its_api(folder):
    async def scenario(door):
        assert "there is no such route" in (await door.post("/api/nothing", {})).json()["error"]
        assert (await door.get("/api/blobs/sha256:1")).json().keys() == {"error"}
        assert (await door.post("/v1/messages/batches", {})).json()["error"]["type"] == "not_found_error"
        assert (await door.post("/v2/classify", {})).json()["message"].startswith("there is no such route")
        assert (await door.post("/v1/nothing", {})).json()["error"]["param"] is None

    at_door(folder, scenario)


def test_a_request_without_a_prompt_loads_the_model(folder):
    async def scenario(door):
        for path in ("/api/chat", "/api/generate"):
            assert (await door.post(path, {"model": "tiny", "keep_alive": -1})).parsed()[0]["done_reason"] == "load"
        for path, method in (("/api/create", "POST"), ("/api/delete", "DELETE")):
            refused = await door.begin(method, path, {"model": "x"}).end()
            assert refused.status == 400 and path in refused.said
        assert (await door.get("/api/version")).json()["version"]
        assert not door.core.submits

    at_door(folder, scenario)


def test_bodies_need_no_content_type_unless_a_web_page_sends_them(folder):
    """curl -d, as in Ollama's documentation, and litellm send another one. So can a web page, without a preflight."""

    async def scenario(door):
        body = json.dumps({"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 2}}).encode()
        for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
            assert (await door.post("/api/chat", body, content_type=kind)).status == 200
            page = {"content_type": kind, "origin": "http://evil"}
            assert (await door.post("/api/chat", body, **page)).status == 403
            assert (await door.post("/api/chat", body, **page, authorization="Bearer x")).status == 200
        assert (await door.post("/v1/chat/completions", body, content_type="text/plain")).status == 415

    at_door(folder, scenario)


def test_arguments_that_are_no_object_are_not_lost(folder):
    async def scenario(door, url):
        door.core.texts = ['<tool_call>{"name": "weather", "arguments": [1, 2]}</tool_call>']
        body = {"model": "tiny", "messages": MESSAGES, "tools": [FUNCTION], "stream": False}
        message = (await door.post("/api/chat", body)).json()["message"]
        assert "tool_calls" not in message and "[1, 2]" in message["content"]

    with_server(folder, scenario)


def test_a_line_has_the_text_of_a_broken_call_before_what_follows_it(folder):
    async def scenario(door):
        body = {"model": "tiny", "messages": MESSAGES, "tools": [FUNCTION]}
        stream = door.begin("POST", "/api/chat", body)
        await door.core.until(lambda: door.core.submits)
        text = 'A<tool_call>{"name": "weather", "arguments": [1]}</tool_call>B'
        door.core.token(door.core.submits[0], *text.encode(), end=FinishReason.STOP)
        lines = (await stream.end()).parsed()
        assert "".join(line["message"]["content"] for line in lines) == "A[1]B"

    at_door(folder, scenario, answers=False, model={"max_model_len": 4096})


def test_ids_of_earlier_calls_are_those_that_every_template_takes(folder):
    """Mistral's templates raise for ids of other than 9 letters and digits."""

    async def scenario(door, url):
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
        messages = [*MESSAGES, call, {"role": "tool", "content": "Rain"}]
        assert (await door.post("/api/chat", {"model": "tiny", "messages": messages})).status == 200
        assert '"id": "000000001"' in door.core.prompts[-1]

    with_server(folder, scenario)


def test_a_disconnect_ends_a_stream(folder):
    async def scenario(door):
        stream = door.begin("POST", "/api/chat", {"model": "tiny", "messages": MESSAGES})
        await door.core.until(lambda: door.core.submits)
        door.core.token(door.core.submits[0], 65)
        await stream.until(b'"A"')
        assert stream.headers["content-type"] == "application/x-ndjson"
        stream.hang_up()
        await stream.end()
        await door.core.until(lambda: len(door.core.aborts) == 1)
        await asyncio.sleep(0)

    at_door(folder, scenario, answers=False)
