"""instructor and pydantic-ai, unmodified: typed answers by tools and by a JSON schema."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys

import pytest

from child import child_env
from serve.dialects import with_server

_INSTRUCTOR = """
import json, sys
import instructor, openai, pydantic
class Weather(pydantic.BaseModel):
    city: str
    days: int
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
found = []
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    made = instructor.from_openai(client, mode=mode)
    messages = [{"role": "user", "content": "Weather in Oslo?"}]
    weather = made.chat.completions.create(model="tiny", response_model=Weather, messages=messages, max_retries=0)
    found.append(weather.model_dump())
print(json.dumps(found))
"""

_PYDANTIC_AI = """
import json, sys
import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
class Weather(pydantic.BaseModel):
    city: str
    days: int
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="none"))
found = []
for output_type in (Weather, NativeOutput(Weather)):
    agent = Agent(model, output_type=output_type)
    found.append(agent.run_sync("Weather in Oslo?").output.model_dump())
print(json.dumps(found))
"""

WEATHER = {"city": "Oslo", "days": 2}


@pytest.mark.parametrize(
    ("package", "code", "call"),
    [  # a tool that is named in the request is written as its arguments alone
        ("instructor", _INSTRUCTOR, WEATHER),
        ("pydantic_ai", _PYDANTIC_AI, [{"name": "final_result", "arguments": WEATHER}]),
    ],
    ids=["instructor", "pydantic-ai"],
)
def test_typed_answers(folder, package, code, call):
    """In a process of its own: they need another openai than we test with, so they may live elsewhere."""
    python = os.environ.get("AGENTS_PYTHON")
    if importlib.util.find_spec(package) is not None:
        python = sys.executable
    if python is None:
        pytest.skip(f"needs {package}, here or in AGENTS_PYTHON")

    async def scenario(door, url):
        door.core.texts = [json.dumps(call), json.dumps(WEATHER)]
        child = await asyncio.create_subprocess_exec(
            python, "-c", code, url, env=child_env(PYTHONPATH=""), stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await child.communicate()
        assert child.returncode == 0, err.decode()[-4000:]
        assert json.loads(out.splitlines()[-1]) == [WEATHER, WEATHER]
        assert all(submit.params.structured_outputs is not None for submit in door.core.submits)

    with_server(folder, scenario)
