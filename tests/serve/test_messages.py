"""Messages of a chat over HTTP: histories with calls of tools, roles, and fields that nothing reads."""

from __future__ import annotations

import pytest

from serve.asgi import at_door

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
HISTORY = [
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None, "annotations": []},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
ROUTES = ["/v1/chat/completions", "/tokenize"]


def post(folder, path, messages, **more):
    async def scenario(door):
        answer = await door.post(path, {"messages": messages, **more})
        ids = door.core.submits[0].prompt_token_ids if door.core.submits else None
        answer.prompt = None if ids is None else bytes(token for token in ids if token < 256).decode()
        return answer

    return at_door(folder, scenario, ready=True)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_the_roles_of_openai_are_known(folder, role):
    assert post(folder, "/tokenize", [{"role": role, "content": "x"}]).status == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("role", ["usre", "", None, 5, "function", ["user"]])
def test_roles_that_do_not_exist_are_refused(folder, path, role):
    answer = post(folder, path, [{"role": "user", "content": "x"}, {"role": role, "content": "y"}])
    assert answer.status == 400 and answer.json()["error"]["param"] == "messages[1].role", answer.body
    assert "system, developer, user, assistant, tool" in answer.error


def test_null_content_beside_calls_works(folder):
    small = [{**HISTORY[1], "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    answer = post(folder, "/v1/chat/completions", small, max_tokens=1, add_generation_prompt=False)
    assert answer.status == 200, answer.body
    assert answer.prompt == 'assistant\n{"tool_calls": [{"name": "f", "arguments": {}}]}\n'
    assert post(folder, "/tokenize", HISTORY).status == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None}, "messages"),
        ({"role": "user", "content": "x", "cotnent": "y"}, "messages[1].cotnent"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[1].name"),
        ({"role": "assistant", "content": None, "tool_calls": [5]}, "messages[1].tool_calls[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, "messages[1].content[0].y"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(folder, path, message, param):
    answer = post(folder, path, [{"role": "user", "content": "x"}, message])
    assert answer.status == 400 and answer.json()["error"]["param"] == param, answer.body
