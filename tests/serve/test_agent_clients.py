"""instructor, pydantic-ai and llama-index, unmodified: typed answers, tools, retries and streams."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from child import child_env
from serve.dialects import CALL, with_server

PACKAGES = Path(sys.prefix) / "agents"

_INSTRUCTOR = """
import json, sys
import instructor, openai, pydantic
from instructor import Mode
class Weather(pydantic.BaseModel):
    city: str
    days: int
    @pydantic.field_validator("days")
    def two(cls, days):
        if days != 2:
            raise ValueError("give two days")
        return days
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
ask = dict(model="tiny", response_model=Weather, messages=[{"role": "user", "content": "Weather in Oslo?"}])
found = []
for mode in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.JSON):
    made = instructor.from_openai(client, mode=mode).chat.completions
    found.append(made.create(**ask, max_retries=0))
    found.append(made.create(**ask, max_retries=1))  # the first answer is wrong, and part of the second question
    found.append(list(made.create_partial(**ask, max_retries=0))[-1])
made = instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS).responses
found.append(made.create(model="tiny", response_model=Weather, input="Weather in Oslo?", max_retries=0))
print(json.dumps([weather.model_dump() for weather in found]))
"""

_PYDANTIC_AI = """
import asyncio, json, sys
import pydantic
from pydantic_ai import Agent, ModelRetry, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
class Weather(pydantic.BaseModel):
    city: str
    days: int
calls = []
def weather(city: str) -> str:
    calls.append(city)
    if len(calls) % 2:
        raise ModelRetry("ask again")
    return "sun"
async def main():
    provider = OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="none")
    found = []
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("tiny", provider=provider)
        found.append((await Agent(model, output_type=Weather).run("Weather in Oslo?")).output.model_dump())
        agent = Agent(model, output_type=NativeOutput(Weather), tools=[weather])  # a call, another one, the answer
        found.append((await agent.run("Weather in Oslo?")).output.model_dump())
        async with agent.run_stream("Weather in Oslo?") as run:
            found.append([part async for part in run.stream_output(debounce_by=None)][-1].model_dump())
    assert calls == ["Oslo"] * 8, calls
    print(json.dumps(found))
asyncio.run(main())
"""

_LLAMA_INDEX = """
import asyncio, json, sys
import pydantic
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
class Weather(pydantic.BaseModel):
    city: str
    days: int
def weather(city: str) -> str:
    return "sun in " + city
tool, prompt, found = FunctionTool.from_defaults(weather), PromptTemplate("Weather in {city}?"), []
how = dict(api_base=sys.argv[1] + "/v1", api_key="none", model="tiny", max_retries=0, context_window=4096)
calls = OpenAILike(is_chat_model=True, is_function_calling_model=True, **how)
schema = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, **how)
responses = OpenAIResponses(**how)
for llm in (calls, schema, responses):
    found.append(llm.structured_predict(Weather, prompt, city="Oslo"))
for llm in (calls, schema):  # of the responses API it reads no call in a stream
    found.append(list(llm.stream_structured_predict(Weather, prompt, city="Oslo"))[-1])
async def agents():
    for llm in (calls, responses):
        answer = await FunctionAgent(tools=[tool], llm=llm, system_prompt="Be short.").run("Weather?")
        assert str(answer) == "Sun.", answer
asyncio.run(agents())
print(json.dumps([weather.model_dump() for weather in found]))
"""

WEATHER = {"city": "Oslo", "days": 2}
GOOD, BAD = json.dumps(WEATHER), json.dumps(WEATHER | {"days": 3})
FINAL = json.dumps([{"name": "final_result", "arguments": WEATHER}])


@pytest.mark.parametrize(
    ("code", "texts", "num_answers"),
    [  # a tool that is named in the request is written as its arguments alone
        (_INSTRUCTOR, [GOOD, BAD, GOOD, GOOD] * 3 + [GOOD], 10),
        (_PYDANTIC_AI, [FINAL, *[CALL, CALL, GOOD] * 2] * 2, 6),
    ],
    ids=["instructor", "pydantic-ai"],
)
@pytest.mark.slow
def test_typed_answers(folder, code, texts, num_answers):
    """In a process of its own, where its packages come before ours."""
    if not PACKAGES.exists():
        pytest.skip("scripts/setup --dev has not run: it installs them into .venv/agents")
    shapes = run_client(folder, sys.executable, str(PACKAGES), code, texts, num_answers)
    assert all(shape is not None for shape in shapes)
    if code is _PYDANTIC_AI:  # while the model may call, its grammar allows it
        allowed = [shape.alternative is not None and "weather" in shape.alternative for shape in shapes]
        assert allowed == [False, *[True] * 6] * 2


def test_llama_index(folder):
    python = os.environ.get("LLAMA_INDEX_PYTHON")
    if python is None:
        pytest.skip("needs LLAMA_INDEX_PYTHON, a Python with llama-index-llms-openai-like: docs/testing.md")
    call = json.dumps({"name": "Weather", "arguments": WEATHER})  # demanded, but left to the model in a stream
    texts = [f"[{call}]", GOOD, GOOD, f"<tool_call>{call}</tool_call>", GOOD, *[CALL, "Sun."] * 2]
    shapes = run_client(folder, python, "", _LLAMA_INDEX, texts, 5)
    assert [shape is not None for shape in shapes] == [True, True, True, False, True, *[False] * 4]


def run_client(folder, python, packages, code, texts, num_answers):
    """Runs the code of a client, which prints its answers, against a server with these texts. Returns the shapes of the
    requests."""

    async def scenario(door, url):
        door.core.texts = list(texts)
        child = await asyncio.create_subprocess_exec(
            python, "-c", code, url, env=child_env(PYTHONPATH=packages), stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await child.communicate()
        assert child.returncode == 0, err.decode()[-4000:]
        assert json.loads(out.splitlines()[-1]) == [WEATHER] * num_answers
        assert len(door.core.submits) == len(texts)
        return [submit.params.structured_outputs for submit in door.core.submits]

    return with_server(folder, scenario)
