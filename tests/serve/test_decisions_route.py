"""/v1/decisions: the openai package against a server process with a tiny model; `LLM.decide` is the oracle."""

from __future__ import annotations

import json

import msgspec
import pytest

from slipstream import LLM

openai = pytest.importorskip("openai", reason="the openai client is not installed")

QUESTIONS = [
    {"type": "predicate", "name": "late", "instructions": "Is it late?"},
    {"type": "choice", "instructions": [{"type": "input_text", "text": "Which?"}],
     "choices": [{"value": "a"}, {"value": True, "description": "b"}]},
    {"type": "score", "name": "how", "instructions": [{"type": "input_json", "data": {"a": 1}}],
     "levels": [{"label": "low"}, {"label": "high"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def client(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(tiny_folder, use_tqdm_on_load=False, max_model_len=256, dtype="float64", num_threads=1) as llm:
        yield llm


def rounded(answers):
    return json.loads(json.dumps(answers), parse_float=lambda text: round(float(text), 9))


ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]}
DATA = {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None]}}]}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("A note.", "A note."),
        (
            [{"role": "user", "content": "Hi"}, ANSWER, DATA],
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": '{"a":[1,null]}'},
            ],
        ),
    ],
)
def test_answers_are_those_of_the_script_api(client, llm, given, messages):
    decision = client.decisions.create(model="tiny", input=given, questions=QUESTIONS)
    wanted = msgspec.to_builtins(llm.decide(messages, QUESTIONS))
    found = [answer.model_dump() for answer in decision.answers]
    assert [each.pop("type") for each in found] == ["predicate", "choice", "score"]
    assert rounded(found) == rounded([{name: each[name] for name in each if name != "type"} for each in wanted])
    usage = decision.usage
    assert decision.model == "tiny" and usage.output_tokens == 3 and usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + 3
    details = usage.input_tokens_details
    assert details.cached_tokens > usage.input_tokens // 3
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS * 400}, "questions"),
        ({"questions": [{"type": "box", "instructions": "Where?"}]}, "questions[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
         "input[0].content[0].type"),
        ({"input": "long " * 200}, "input"),
        ({"questions": [{"type": "predicate", "instructions": "long " * 200}]}, "input"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_named(client, changed, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.decisions.create(**{"model": "tiny", "input": "A note.", "questions": QUESTIONS} | changed)
    assert caught.value.param == param
