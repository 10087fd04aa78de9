"""The openai package, unmodified, against a server process with a tiny model; the script API is the oracle."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

from patience import PATIENCE
from slipstream import LLM, BeamSearchParams, SamplingParams

openai = pytest.importorskip("openai", reason="the openai client is not installed")

GREEDY = dict(temperature=0, max_tokens=12)
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(tiny_folder, use_tqdm_on_load=False, max_model_len=256, dtype="float64", num_threads=1) as llm:
        yield llm


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_completions_say_what_the_script_api_says(client, llm):
    prompts = ["Once upon", "a time"]
    wanted = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    answer = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == [result.outputs[0].text for result in wanted]
    assert [choice.index for choice in answer.choices] == [0, 1]
    num_prompt = sum(len(result.prompt_token_ids) for result in wanted)
    num_out = sum(len(result.outputs[0].token_ids) for result in wanted)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_out)
    ids = [result.prompt_token_ids for result in wanted]
    for given in (ids, ids[0]):
        by_ids = client.completions.create(model="tiny", prompt=given, **GREEDY)
        assert by_ids.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize("stop", [None, "e"])
def test_streams_add_up_to_the_whole(client, stop):
    args = dict(model="tiny", prompt=["one", "two"], n=2, seed=7, temperature=1, max_tokens=20, stop=stop)
    whole = client.completions.create(**args)
    texts, reasons = {}, {}
    usage = None
    for chunk in client.completions.create(**args, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    # a sample that a stop string ended may have run a step further in one of the two
    assert usage.prompt_tokens == whole.usage.prompt_tokens and usage.completion_tokens == whole.usage.completion_tokens


def test_a_batch_says_what_a_request_says(client):
    wanted = [client.completions.create(model="tiny", prompt=text, **GREEDY).choices[0].text for text in ("one", "two")]
    lines = [
        {"custom_id": text, "url": "/v1/completions", "body": {"prompt": text, **GREEDY}} for text in ("one", "two")
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + PATIENCE
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < deadline and batch.status in ("validating", "in_progress"), batch
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [each["response"]["body"]["choices"][0]["text"] for each in results] == wanted


def test_responses_continue_a_conversation(client, llm):
    """The real template and engine: a response that continues another one is the chat of all messages."""
    first = client.responses.create(model="tiny", input="Hello", temperature=0, max_output_tokens=12)
    again = client.responses.create(
        model="tiny", input="More", previous_response_id=first.id, temperature=0, max_output_tokens=12
    )
    texts = [("user", "Hello"), ("assistant", first.output_text), ("user", "More")]
    messages = [{"role": role, "content": text} for role, text in texts]
    (wanted,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert again.output_text == wanted.outputs[0].text


def test_chat_and_its_stream(client, llm):
    (wanted,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == wanted.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == wanted.outputs[0].finish_reason
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.outputs[0].text
    assert chunks[-1].choices[0].finish_reason == wanted.outputs[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks) and len({chunk.id for chunk in chunks}) == 1


def test_seeds_repeat_and_samples_differ(client):
    args = dict(model="tiny", messages=MESSAGES, temperature=1, max_tokens=16, n=3)
    one = client.chat.completions.create(**args, seed=5)
    two = client.chat.completions.create(**args, seed=5)
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and len(set(texts)) == 3


def test_chat_logprobs(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob  # greedy
        assert bytes(token.bytes).decode(errors="backslashreplace") == token.token
    whole = b"".join(bytes(token.bytes) for token in tokens)
    assert whole.decode(errors="replace").removesuffix("<|im_end|>") == answer.choices[0].message.content
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    streamed = [token for chunk in chunks if (p := chunk.choices[0].logprobs) for token in p.content]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in tokens], abs=1e-9)


def test_echo_with_logprobs_scores_the_prompt_as_lm_eval_asks(client, llm):
    """Token ids in, one token out, logprobs of the whole: and max_tokens 0, which scores the prompt alone."""
    ids = llm.get_tokenizer().encode("The quick brown fox")
    (wanted,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    scores = [entry[token].logprob for token, entry in zip(ids[1:], wanted.prompt_logprobs[1:], strict=True)]
    for max_tokens in (1, 0):
        args = dict(model="tiny", prompt=[ids], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1)
        for streamed in (False, True):
            answer = client.completions.create(**args, stream=streamed)
            if streamed:
                parts = [chunk.choices[0].logprobs for chunk in answer]
                found = [p for part in parts for p in part.token_logprobs]
                tokens = [t for part in parts for t in part.tokens]
                offsets = [o for part in parts for o in part.text_offset]
            else:
                logprobs = answer.choices[0].logprobs
                found, tokens, offsets = logprobs.token_logprobs, logprobs.tokens, logprobs.text_offset
                assert len(logprobs.top_logprobs) == len(found) and answer.choices[0].text.startswith("The quick")
            assert len(found) == len(ids) + max_tokens
            assert found[0] is None and found[1 : len(ids)] == pytest.approx(scores, abs=1e-9)
            assert "".join(tokens[: len(ids)]) == "The quick brown fox" and offsets[: len(ids)] == list(range(len(ids)))


def test_extra_body_fields_of_vllm(client, llm):
    extra = dict(
        top_k=3, min_p=0.01, repetition_penalty=1.2, min_tokens=2, stop_token_ids=[10], ignore_eos=True,
        skip_special_tokens=False, allowed_token_ids=list(range(32, 120)), bad_words=["zz"], truncate_prompt_tokens=4,
        priority=1, cache_salt="me", prompt_logprobs=1, return_token_ids=True, logprob_token_ids=[65],
        include_stop_str_in_output=True, spaces_between_special_tokens=False, add_special_tokens=False,
    )  # fmt: skip
    answer = client.completions.create(
        model="tiny", prompt="abcdefgh", seed=3, temperature=1, max_tokens=8, logit_bias={"65": 2.0},
        logprobs=0, extra_body=extra,
    )  # fmt: skip
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=8, logit_bias={65: 2.0}, logprobs=0,
        **{name: value for name, value in extra.items() if name not in ("return_token_ids", "add_special_tokens")},
    )  # fmt: skip
    (wanted,) = llm.generate(["abcdefgh"], params, use_tqdm=False)
    choice = answer.choices[0].model_dump()
    assert choice["token_ids"] == wanted.outputs[0].token_ids and choice["prompt_token_ids"] == [101, 102, 103, 104]
    assert len(choice["prompt_logprobs"]) == 4
    assert all("A" in top for top in choice["logprobs"]["top_logprobs"])


def test_template_arguments_and_final_messages_to_continue(client, llm):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, **GREEDY,
        extra_body={"continue_final_message": True},
    )  # fmt: skip
    (wanted,) = llm.chat(
        messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False, add_generation_prompt=False,
        continue_final_message=True,
    )  # fmt: skip
    assert answer.choices[0].message.content == wanted.outputs[0].text


def test_demanded_calls_are_valid_whatever_the_model_wants(client):
    schema = {"enum": [{"n": 1}, {"n": 2}]}  # short: the model reads 256 bytes
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice,
            parallel_tool_calls=False, temperature=1, seed=3,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["n"] in (1, 2)
        assert call.function.name in (("f", "g") if choice == "required" else ("g",))


def test_beam_search_is_that_of_the_script_api(client, llm):
    prompts = ["Once upon", "a time"]
    wanted = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5))
    extra = dict(use_beam_search=True, length_penalty=0.5, return_token_ids=True)
    answer = client.completions.create(model="tiny", prompt=prompts, n=3, max_tokens=5, extra_body=extra)
    found = [choice.prompt_token_ids + choice.token_ids for choice in answer.choices]
    assert found == [sequence.tokens for result in wanted for sequence in result.sequences] and len(found) == 6
    assert answer.usage.completion_tokens == sum(s.num_generated for result in wanted for s in result.sequences)
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="tiny", prompt="x", max_tokens=300, extra_body={"use_beam_search": True})
    assert told.value.code == "context_length_exceeded"


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "guided_json"])
def test_beams_follow_a_grammar_as_in_the_script_api(client, llm, field):
    schema = {"enum": ["one", "two", "seven"]}
    given = {"structured_outputs": {"json": schema}, "guided_json": schema}.get(field)
    if field == "response_format":
        given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    prompts = ["Once upon", "a time"]
    params = BeamSearchParams(beam_width=3, max_tokens=16, structured_outputs={"json": schema})
    wanted = llm.beam_search(prompts, params)
    extra = dict(use_beam_search=True, return_token_ids=True, **{field: given})
    answer = client.completions.create(model="tiny", prompt=prompts, n=3, max_tokens=16, extra_body=extra)
    found = [choice.prompt_token_ids + choice.token_ids for choice in answer.choices]
    assert found == [sequence.tokens for result in wanted for sequence in result.sequences] and len(found) == 6
    assert sorted(choice.text for choice in answer.choices) == sorted(2 * ['"one"', '"two"', '"seven"'])
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_wrong_grammar_of_beams_names_its_field(client):
    for field, given in (("guided_regex", "(" * 9), ("response_format", {"type": "json_object"})):
        extra = dict(use_beam_search=True, ignore_eos=True, **{field: given})
        with pytest.raises(openai.BadRequestError) as told:
            client.completions.create(model="tiny", prompt="x", n=2, extra_body=extra)
        assert told.value.param == field


def test_errors_are_the_clients_own_exceptions(client, server):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[{"type": "function"}])
    assert told.value.param == "tools[0].function" and "is missing; give an object" in told.value.message
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="tiny", prompt="x" * 300)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="x")


def test_many_async_streams_some_left_early(server):
    async def one(client, i):
        stream = await client.completions.create(
            model="tiny",
            prompt=f"{i} ",
            max_tokens=60,
            seed=i,
            temperature=1,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        reasons = []
        async for chunk in stream:
            reasons.append(chunk.choices[0].finish_reason)
            if i % 3 == 0 and len(reasons) == 2:
                await stream.close()
                return None
        return reasons[-1]

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(24)))

    assert asyncio.run(main()) == [None if i % 3 == 0 else "length" for i in range(24)]
    for _ in range(200):
        load = server.call("GET", "/load", authorization="Bearer key")[1]
        if load["server_load"] == 0 and load["running"] == load["waiting"] == 0:
            break
    assert load["free_pages"] == load["pages"] and load["server_load"] == 0, load


def test_tokenize_and_back(server):
    key = {"authorization": "Bearer key"}
    status, found = server.call("POST", "/tokenize", {"prompt": "héllo", "return_token_strs": True}, **key)
    assert status == 200 and found["count"] == 6 and found["max_model_len"] == 256
    assert server.call("POST", "/detokenize", {"tokens": found["tokens"]}, **key)[1] == {"prompt": "héllo"}
    _, chat = server.call("POST", "/tokenize", {"messages": MESSAGES}, **key)
    assert chat["tokens"][0] == 257  # as the template begins


def test_hostile_bytes_leave_the_server_standing(server):
    import socket

    attacks = [
        b"\x00" * 1000,
        b"GET /health HTTP/1.1\r\n" + b"a: " + b"b" * 200_000,  # a header without end
        b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer key\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ]
    for attack in attacks:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
            try:
                sock.sendall(attack)
                answer = sock.recv(65536)
            except (ConnectionResetError, BrokenPipeError):
                answer = b""  # it hung up on us, which is fine
            assert not answer.startswith(b"HTTP/1.1 2") and not answer.startswith(b"HTTP/1.1 5"), (attack[:60], answer)
    assert server.call("GET", "/health")[0] == 200


def test_the_openapi_page_is_served(server):
    status, page = server.call("GET", "/openapi.json", authorization="Bearer key")
    assert status == 200 and "/v1/chat/completions" in page["paths"]
    assert json.dumps(page)  # plain JSON all through


ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_response_format_gives_json_of_the_schema(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL, "strict": True}}
    args = dict(model="tiny", messages=MESSAGES, temperature=1, max_tokens=200, response_format=form)
    # random weights like whitespace; the end of the schema goes before min_tokens
    args |= {"logit_bias": {"9": -100, "10": -100, "13": -100, "32": -100}, "extra_body": {"min_tokens": 100}}
    if stream:
        text = "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**args, stream=True)
        )
    else:
        choice = client.chat.completions.create(**args).choices[0]
        assert choice.finish_reason == "stop"
        text = choice.message.content
    found = json.loads(text)
    assert found["animal"] in ("cat", "dog") and 0 <= found["legs"] <= 8


def test_response_format_takes_structural_tags(client):
    tags = [{"begin": f"<{name}>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</f>"} for name in "ab"]
    form = {"type": "tags_with_separator", "tags": tags, "separator": ",", "at_least_one": True}
    form = {"type": "structural_tag", "format": form}
    args = dict(model="tiny", messages=MESSAGES, temperature=1, max_tokens=60)
    text = client.chat.completions.create(**args, response_format=form).choices[0].message.content
    assert re.match("<[ab]>[0-9]{2}</f>", text)
    old = {"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}
    client.chat.completions.create(**args, response_format=old)
    for wrong, words, param in (
        ({**form, "strict": True}, "no field response_format.strict", "response_format.strict"),
        ({**form, "format": {"type": "x"}}, "'x'", "response_format"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(**args, response_format=wrong)
        assert caught.value.param == param


def test_shapes_of_vllm_and_of_older_clients(client):
    def complete(**extra):
        return client.completions.create(model="tiny", prompt="x", max_tokens=50, extra_body=extra).choices[0].text

    assert complete(structured_outputs={"choice": ["up", "down"]}) in ("up", "down")
    assert complete(guided_regex="[0-9]{3}").isdigit()
    assert complete(guided_choice=["yes"]) == "yes"
    assert complete(guided_grammar='start: "(" /[a-z]/ ")"')[::2] == "()"
    assert complete(structured_outputs={"choice": ["up"], "prefix": 'start: ("<" /[a-z]{2}/ ">")?'})[-2:] == "up"
    assert complete(structured_outputs={"regex": "[0-9]", "prefix": 'start: "a" | "b"'})[0] in "ab"
    assert complete(guided_json={"const": "a"}, guided_whitespace_pattern=" ?") == '"a"'


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}])
def test_a_schema_that_leads_only_to_itself_is_refused_by_name(client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="no text matches it, as with a rule or .ref that leads only to"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form)


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_schema_is_a_400_that_names_its_field(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin") as caught:
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form, stream=stream))
    assert caught.value.param == "response_format" and "response_format cannot be used" in str(caught.value)
    assert client.completions.create(model="tiny", prompt="x", **GREEDY).choices[0].text
