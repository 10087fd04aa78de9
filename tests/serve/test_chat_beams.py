"""`use_beam_search` of /v1/chat/completions. The oracle is /v1/completions with the token ids of the same prompt."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import numpy as np
import pytest

from serve.asgi import at_door
from slipstream.contracts.messages import LOGPROB, Output
from slipstream.contracts.request import FinishReason
from text.chat_templates import THINKING

USER = [{"role": "user", "content": "Oslo?"}]
BEAMS = {"use_beam_search": True, "n": 3, "return_token_ids": True}
SCHEMA = {"enum": [{"n": 1}, {"n": 2}, {"n": 3}]}
END = 300


def posted(server, path, **body):
    status, answer = server.call("POST", path, body, authorization="Bearer key")
    assert status == 200, answer
    return answer


@pytest.mark.parametrize(
    "more",
    [
        {"length_penalty": 0.5, "include_stop_str_in_output": True, "max_tokens": 5},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "max_tokens": 20},
        {"structured_outputs": {"choice": ["one", "two", "seven"]}, "max_tokens": 20},
    ],
    ids=["free", "response_format", "structured_outputs"],
)
def test_beams_of_chat_are_those_of_completions(tiny_server, more):
    post = partial(posted, tiny_server)
    plain = post("/v1/chat/completions", messages=USER, max_tokens=1, return_token_ids=True)
    found = post("/v1/chat/completions", messages=USER, **BEAMS, **more)
    wanted = post("/v1/completions", prompt=plain["prompt_token_ids"], **BEAMS, **more)
    assert found["prompt_token_ids"] == plain["prompt_token_ids"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    for name in ("token_ids", "finish_reason"):
        assert [each[name] for each in found["choices"]] == [each[name] for each in wanted["choices"]]
    assert [each["message"]["content"] for each in found["choices"]] == [each["text"] for each in wanted["choices"]]
    assert found["usage"] == wanted["usage"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_is_cut_so_that_the_beams_fit(tiny_server, path):
    given = (
        {"prompt": "x" * 300} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x" * 300}]}
    )
    answer = posted(tiny_server, path, **given, truncate_prompt_tokens=-1, max_tokens=3, use_beam_search=True)
    assert answer["usage"]["prompt_tokens"] == 253  # of 256


def test_beams_of_a_demanded_call_are_calls(tiny_server):
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
    choice = {"type": "function", "function": {"name": "g"}}
    body = {"messages": USER, "tools": tools, "tool_choice": choice, "max_tokens": 20} | BEAMS
    answer = posted(tiny_server, "/v1/chat/completions", **body)
    calls = [call["function"] for each in answer["choices"] for call in each["message"]["tool_calls"]]
    assert [call["name"] for call in calls] == ["g"] * 3
    assert all(json.loads(call["arguments"]) in SCHEMA["enum"] for call in calls)
    assert len({call["arguments"] for call in calls}) == 3


def searched(folder, texts, model=None, **body):
    """The answer where the model writes these texts, the first with the highest probability, a byte per token."""

    async def scenario(door):
        exchange = door.begin("POST", "/v1/chat/completions", {"messages": USER, "use_beam_search": True, **body})
        num_prompt, num_answered = 0, 0
        while not exchange.task.done():
            for submit in door.core.submits[num_answered:]:
                num_prompt = num_prompt or len(submit.prompt_token_ids)
                entries = likeliest(texts, submit.prompt_token_ids[num_prompt:], submit.params.num_logprobs)
                logprobs = np.array([entries[0], *entries], LOGPROB).tobytes()
                door.core.say(Output(submit.request_id, 0, [entries[0][1]], logprobs, FinishReason.LENGTH))
                num_answered += 1
            await asyncio.sleep(0)
        exchange.num_steps = num_answered
        return await exchange.end()

    known = {"chat_template": THINKING, "max_model_len": 4096, "eos_token_ids": (END,)} | (model or {})
    return at_door(folder, scenario, answers=False, model=known)


def likeliest(texts, before, count):
    """Entries of logprobs: the next tokens of the texts that begin so, then unlikely ones."""
    written = [(place, [*text.encode(), END]) for place, text in enumerate(texts)]
    follow = {ids[len(before)]: -0.1 - place for place, ids in reversed(written) if ids[: len(before)] == before}
    for token in range(count):
        follow.setdefault(token, -5000.0)
    ranked = sorted(follow.items(), key=lambda each: -each[1])[:count]
    return [(logprob, token, rank + 1) for rank, (token, logprob) in enumerate(ranked)]


@pytest.mark.parametrize(("parallel", "num_calls"), [(True, 2), (False, 1)])
def test_each_beam_is_parsed(folder, parallel, num_calls):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    texts = [f"<think>\na\n</think>\n\n{call}\n{call}", "<think>\nb\n</think>\n\nNo."]
    tools = {"tools": [{"type": "function", "function": {"name": "now"}}], "parallel_tool_calls": parallel}
    answer = searched(folder, texts, n=2, max_tokens=len(texts[0]) + 1, **tools).json()
    first, second = answer["choices"]
    assert first["message"]["reasoning"] == "a" and first["finish_reason"] == "tool_calls"
    assert [each["function"]["name"] for each in first["message"]["tool_calls"]] == ["now"] * num_calls
    assert (second["message"]["reasoning"], second["message"]["content"]) == ("b", "No.")
    assert second["finish_reason"] == "stop" and "tool_calls" not in second["message"]
    assert answer["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)


def test_reasoning_that_the_prompt_began_needs_no_marker(folder):
    model = {"chat_template": THINKING + "{{ '<think>\n' }}"}
    answer = searched(folder, ["hm\n</think>\n\nYes."], model, max_completion_tokens=30)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Yes.")


def test_without_max_tokens_a_search_lasts_to_the_end_of_the_context(folder):
    answer = searched(folder, ["x" * 99], {"max_model_len": 64}, return_token_ids=True)
    assert answer.num_steps == 64 - len(answer.json()["prompt_token_ids"])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"stream": True}, "stream", "not supported with use_beam_search; remove one"),
        ({"logprobs": True}, "logprobs", "not supported with use_beam_search"),
        ({"temperature": 0.5}, "temperature", "remove it"),
        ({"n": 200}, "n", "200"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens", "lower max_completion_tokens"),
        ({"ignore_eos": True, "guided_regex": "a+"}, "guided_regex", "end token"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_beams_of_chat_lack_is_refused_by_name(folder, body, param, words):
    answer = searched(folder, ["x"], **body)
    assert answer.status == 400 and not answer.num_steps
    assert answer.json()["error"]["param"] == param and words in answer.error
