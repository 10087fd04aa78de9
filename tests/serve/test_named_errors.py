"""Errors name the field of the request, in words of HTTP, and blame the right model."""

from __future__ import annotations

import asyncio

import pytest

from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door, at_door
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.errors import in_http
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
EMBED = PoolingInfo(tasks=("embed",), embed_size=8, token_size=8, max_seq_length=16)


def asked(folder, path, body, *models, **settings):
    async def scenario(door):
        engine, core = await ScriptedCore.open(*models)
        other = Door(App(State(ServerSettings(**settings), engine), all_routes()), core)
        try:
            answer = await other.post(path, body)
            answer.sent = core.submits
            return answer
        finally:
            await engine.close()

    return at_door(folder, scenario)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature", "temperature is -1"),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, "top_p", "top_p is 0"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias", "999"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [999]}, "stop_token_ids", "999"),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, "stop", "empty string"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "min_tokens is 9"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "is empty"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ("/v1/completions", {"prompt": "x", "n": 101}, "n", "raise --max-waiting"),
        ("/v1/completions", {"prompt": "x", "guided_regex": ""}, "guided_regex", "give text"),
        ("/v1/completions", {"prompt": "x", "guided_choice": []}, "guided_choice", "at least one"),
        ("/v1/completions", {"prompt": "x", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"jason": {}}}, "structured_outputs", "no jason"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, "structured_outputs", "none is given"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs",
         "json and regex are given"),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}, "guided_regex": "a"},
         "guided_regex", "remove one"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "missing"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "missing"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object", "schema": {}}},
         "response_format.schema", "no field"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}},
         "text.format.x", "no field text.format.x"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "a", "strict": 1.5}]},
         "tools[0].strict", "is 1.5"),
        ("/v1/completions", {}, "prompt", "prompt is missing"),
        ("/v1/completions", {"prompt": [2**40]}, "prompt", "out of vocabulary"),
        ("/v1/completions", {"prompt": "x" * 64}, "prompt", "raise --max-model-len"),
        ("/v1/completions", {"prompt": ["x", ""]}, "prompt", "prompt 2 of 2"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias.1", "is 'a'; give a number"),
        ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "no f"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 0}, "max_completion_tokens", "completion_tokens is"),
        ("/v1/chat/completions", CHAT | {"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ("/v1/chat/completions", CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "remove one"),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs has 21"),
        ("/v1/chat/completions", CHAT | {"continue_final_message": True, "add_generation_prompt": True},
         "messages", '"add_generation_prompt": false'),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "tools"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"think": 1}}, "chat_template_kwargs.think", "read"),
        ("/v1/embeddings", {"input": [2**40], "model": "pool"}, "input", "input has a number"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions", "dimensions is 0"),
        ("/v1/embeddings", {"input": "x", "dimensions": 99, "model": "pool"}, "dimensions", "have 8"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "none"}, "prompt_name", "no prompt 'none'"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0"),
        ("/rerank", {"query": "x", "documents": ["a"], "top_n": 0}, "top_n", "remove it"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "2 first texts"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction", "takes no instruction"),
        ("/pooling", {"input": "a", "task": "classify", "activation": True, "softmax": False}, "softmax", "differ"),
        ("/pooling", {"input": "a", "task": "embed", "activation": True}, "activation", "the task is embed"),
        ("/pooling", {"input": "a", "task": "sparse", "encoding_format": "base64"}, "encoding_format", "sparse"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "'int8'; give one of"),
        ("/v1/embeddings", {"input": "x", "truncation_side": "up"}, "truncation_side", "'up'; give one of"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1 is unknown"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
    ],
)  # fmt: skip
def test_an_error_names_its_field(folder, path, body, param, words):
    models = facts(folder, max_waiting=100), facts(folder, "pool", pooling=EVERY_TASK)
    answer = asked(folder, path, body, *models)
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "guided_regex": "a"}, "guided_regex"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", CHAT | {"allowed_token_ids": [1]}, "allowed_token_ids"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text"),
    ],
)
def test_an_error_while_tokens_are_drawn_names_its_field(folder, path, body, param, stream):
    async def scenario(door):
        engine, core = await ScriptedCore.open(facts(folder), answers=False)
        other = Door(App(State(ServerSettings(), engine), all_routes()), core)
        asked = asyncio.create_task(other.post(path, body | {"stream": stream}))
        await core.until(lambda: core.submits)
        core.say(Output(core.submits[0].request_id, 0, [], finish_reason=FinishReason.ERROR, error="forbidden"))
        answer = await asked
        await engine.close()
        return answer

    assert f'"param":"{param}"' in at_door(folder, scenario).body.decode()


def test_what_the_engine_says_in_python_is_said_in_json():
    text = "set max_model_len or chat_template='x'; give True or None, not 'None'; seed=False"
    assert in_http(text, {"seed": "Seed"}) == (
        "set --max-model-len or --chat-template x; give true or null, not 'None'; \"Seed\": false"
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_generating_route_finds_the_generating_model_at_any_index(folder, path):
    models = facts(folder, "vectors", pooling=EMBED), facts(folder, "writer")
    body = {"prompt": "x"} if path == "/v1/completions" else CHAT
    answer = asked(folder, path, body, *models)
    assert answer.status == 200, answer.body
    assert {each.model for each in answer.sent} <= {"writer"}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/classify", {"input": "x"}, "no model here does classify; here writer does generate; vectors does embed"),
        ("/classify", {"input": "x", "model": "vectors"}, "vectors does embed, and this route needs classify"),
        ("/pooling", {"input": "x", "task": "sparse"}, "no model here does sparse"),
        ("/v1/embeddings", {"input": "x", "model": "writer"}, "writer does generate, and this route needs embed"),
        ("/v1/completions", {"prompt": "x", "model": "vectors"}, "does embed, and this route needs generate"),
        ("/v1/chat/completions", CHAT | {"model": "vectors"}, "choose writer"),
    ],
)  # fmt: skip
def test_the_model_that_cannot_is_the_one_that_is_blamed(folder, path, body, words):
    answer = asked(folder, path, body, facts(folder, "writer"), facts(folder, "vectors", pooling=EMBED))
    assert answer.status == 400 and answer.json()["error"]["param"] == "model", answer.body
    assert words in answer.error


# Texts that are longer than the model reads


def test_a_text_that_the_model_would_cut_is_refused_unless_the_request_says_how(folder):
    models = [facts(folder, "vectors", pooling=EMBED)]
    long = {"input": "x" * 20}
    answer = asked(folder, "/v1/embeddings", long, *models)
    assert answer.status == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "20 tokens" in answer.error and "reads 16" in answer.error and "truncate_prompt_tokens" in answer.error
    assert answer.json()["error"]["param"] == "input"
    cuts = [({"truncate_prompt_tokens": -1}, 16), ({"truncate_prompt_tokens": 4}, 4), ({"truncation_side": "left"}, 16)]
    for said, length in cuts:
        answer = asked(folder, "/v1/embeddings", long | said, *models)
        assert answer.status == 200 and len(answer.sent[0].prompt_token_ids) == length, (said, answer.body)
    assert asked(folder, "/v1/score", {"text_1": "x" * 20, "text_2": "y"}, *models).status == 400
    assert asked(folder, "/rerank", {"query": "q", "documents": ["x" * 20]}, *models).status == 400
    assert len(asked(folder, "/embed", {"inputs": "x" * 20}, *models).sent[0].prompt_token_ids) == 16  # as /info says


def test_every_list_of_models_says_what_they_read(folder):
    async def scenario(door):
        engine, core = await ScriptedCore.open(facts(folder), facts(folder, "vectors", pooling=EMBED))
        other = Door(App(State(ServerSettings(), engine), all_routes()), core)
        found = [{each["id"]: each["max_model_len"] for each in (await other.get("/v1/models")).json()["data"]}]
        found += [{each["name"]: each["context_length"] for each in (await other.get("/api/ps")).json()["models"]}]
        for path, body, name in (("/tokenize", {"prompt": "x"}, "max_model_len"), ("/api/show", {}, "model_info")):
            answers = {each: await other.post(path, body | {"model": each}) for each in engine.models}
            found.append({each: answer.json()[name] for each, answer in answers.items()})
        await engine.close()
        return [*found[:3], {name: info["slipstream.context_length"] for name, info in found[3].items()}]

    assert at_door(folder, scenario) == [{"tiny": 64, "vectors": 16}] * 4


# Answers that are longer than the context


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_that_cannot_fit_is_refused_by_its_field(folder, path):
    body = {"prompt": "x" * 10} if path == "/v1/completions" else CHAT
    for name in ("max_tokens", *(("max_completion_tokens", "min_tokens") if "messages" in body else ())):
        answer = asked(folder, path, body | {name: 63}, facts(folder))
        assert answer.status == 400 and not answer.sent, (name, answer.body)
        error = answer.json()["error"]
        assert error["param"] == name and error["code"] == "context_length_exceeded" and "takes 64" in error["message"]
    assert asked(folder, path, body | {"max_tokens": 30}, facts(folder)).status == 200


def test_a_prompt_cut_to_what_fits_leaves_room_for_the_answer(folder):
    body = {"prompt": "x" * 99, "max_tokens": 10, "truncate_prompt_tokens": -1}
    answer = asked(folder, "/v1/completions", body, facts(folder))
    assert answer.status == 200 and len(answer.sent[0].prompt_token_ids) == 54


# Logprobs and token ids


def events_of(folder, path, body):
    answer = asked(folder, path, body | {"stream": True, "max_tokens": 2}, facts(folder))
    assert answer.status == 200, answer.body
    return answer.events()


def test_chat_gives_the_logprobs_of_given_tokens(folder):
    body = CHAT | {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": [7, 9], "max_tokens": 2}
    (choice,) = asked(folder, "/v1/chat/completions", body, facts(folder)).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        assert [each["logprob"] for each in entry["top_logprobs"]] == [-0.5, -9.0, -9.0]
        assert [each["bytes"] for each in entry["top_logprobs"][1:]] == [[7], [9]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["logprob_token_ids", "return_tokens_as_token_ids"])
def test_fields_about_logprobs_need_logprobs(folder, path, name):
    body = {"prompt": "x"} if path == "/v1/completions" else CHAT
    answer = asked(folder, path, body | {name: [1] if name == "logprob_token_ids" else True}, facts(folder))
    assert answer.status == 400 and answer.json()["error"]["param"] == name


def test_a_stream_has_the_requested_data_about_the_prompt(folder):
    more = {"return_token_ids": True, "prompt_logprobs": 1}
    first, *others = events_of(folder, "/v1/chat/completions", CHAT | more)
    whole = asked(folder, "/v1/chat/completions", CHAT | more | {"max_tokens": 2}, facts(folder)).json()
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert first[name] == whole[name]
    assert not any("prompt_token_ids" in other for other in others)
    ids = [token for other in others for choice in other["choices"] for token in choice.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    chunks = events_of(folder, "/v1/completions", {"prompt": ["ab", "cde"]} | more)
    told = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in reversed(chunks)}
    assert told[0]["prompt_token_ids"] == [97, 98] and told[1]["prompt_token_ids"] == [99, 100, 101]
    assert len(told[0]["prompt_logprobs"]) == 2 and told[1]["prompt_logprobs"][0] is None
    assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in chunks) == 2


def test_a_body_where_none_is_read_is_refused(folder):
    async def scenario(door):
        answer = await door.post("/abort_requests", {"request_id": "one"}, authorization="Bearer root")
        assert answer.status == 400 and "takes no body" in answer.error
        assert (await door.begin("POST", "/abort_requests", authorization="Bearer root").end()).status == 200
        assert (await door.post("/abort_requests", {}, authorization="Bearer root")).status == 200

    at_door(folder, scenario, admin_key="root")
