"""litellm, unmodified, by its clients of OpenAI's, Ollama's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from child import child_env
from serve.dialects import CALL, with_server

PACKAGES = Path(sys.prefix) / "litellm"

_CHILD = """
import json, sys
import litellm
url, found = sys.argv[1], {}
messages = [{"role": "user", "content": "Hello"}]
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
for name, base in (("openai/tiny", url + "/v1"), ("ollama_chat/tiny", url), ("anthropic/tiny", url)):
    how = dict(model=name, api_base=base, api_key="none", messages=messages, max_tokens=200)
    whole = litellm.completion(**how).choices[0].message.content
    parts = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**how, stream=True))
    call = litellm.completion(**how, tools=[tool]).choices[0].message.tool_calls[0].function
    found[name] = [whole, parts, call.name, json.loads(call.arguments)]
for name, base in (("openai/pool", url + "/v1"), ("ollama/pool", url)):
    vectors = litellm.embedding(model=name, api_base=base, api_key="none", input=["a", "b"])
    found[name] = [len(each["embedding"]) for each in vectors.data]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_litellm(folder):
    """In a process of its own: it needs another openai than we test with."""
    if not PACKAGES.exists():
        pytest.skip("scripts/setup --dev has not run: it installs litellm into .venv/litellm")

    async def scenario(door, url):
        door.core.texts = ["Well.", "Well.", CALL] * 3
        env = child_env(LITELLM_LOCAL_MODEL_COST_MAP="True", PYTHONPATH=str(PACKAGES))  # it would fetch prices
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, url, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await child.communicate()
        assert child.returncode == 0, err.decode()[-4000:]
        found = json.loads(out.splitlines()[-1])
        chat = ["Well.", "Well.", "weather", {"city": "Oslo"}]
        assert found == {
            "openai/tiny": chat, "ollama_chat/tiny": chat, "anthropic/tiny": chat,
            "openai/pool": [8, 8], "ollama/pool": [8, 8],
        }  # fmt: skip

    with_server(folder, scenario)
