"""Budgets of reasoning in the words of other APIs reach the engine."""

from __future__ import annotations

import json

import pytest

from serve.dialects import with_server
from serve.samples import MESSAGES
from tiny_tokenizer import write_byte_tokenizer


@pytest.fixture
def thinking_folder(tmp_path):
    """A model whose chat template has a switch for reasoning."""
    write_byte_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    given = json.loads(config.read_text())
    given["chat_template"] += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    config.write_text(json.dumps(given))
    return tmp_path


BODIES = {
    "/v1/messages": {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 7}},
    "/v2/chat": {"thinking": {"type": "enabled", "token_budget": 7}},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_budget_is_a_parameter_of_the_engine(thinking_folder, path):
    async def scenario(door, url):
        body = {"model": "tiny", "messages": MESSAGES, **BODIES[path]}
        answer = await door.post(path, body)
        assert answer.status == 200, answer.body
        assert door.core.submits[-1].params.thinking_token_budget == 7
        body["thinking"] = {"type": "disabled"}
        assert (await door.post(path, body)).status == 200
        assert door.core.prompts[-1].endswith("<think></think>")
        name = "budget_tokens" if path == "/v1/messages" else "token_budget"
        refused = await door.post(path, body | {"thinking": {"type": "enabled", name: -5}})
        assert refused.status == 400 and "thinking" in refused.said

    with_server(thinking_folder, scenario, reasoning_parser="qwen3")


@pytest.mark.parametrize(("think", "ends"), [(False, True), (True, False)])
def test_ollama_switches_reasoning(thinking_folder, think, ends):
    async def scenario(door, url):
        body = {"model": "tiny", "messages": MESSAGES, "think": think}
        assert (await door.post("/api/chat", body)).status == 200
        assert door.core.prompts[-1].endswith("<think></think>") == ends

    with_server(thinking_folder, scenario)
