"""The attributes of a request's span."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door
from slipstream.metrics.stats import Traces
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes
from tiny_tokenizer import write_byte_tokenizer

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")


def test_spans_name_the_model_the_parameters_and_the_tokens(tmp_path):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    write_byte_tokenizer(tmp_path)
    seen, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))

    async def main():
        engine, core = await ScriptedCore.open(facts(tmp_path), facts(tmp_path, "pool", pooling=EVERY_TASK))
        door = Door(App(State(ServerSettings(), engine), all_routes()), core)
        door.state.traces = Traces(provider)
        body = {"prompt": "abc", "max_tokens": 4, "n": 2, "temperature": 0.7, "top_p": 0.9}
        for stream in (False, True):
            await door.post("/v1/completions", body | {"stream": stream}, x_request_id="mine")
        await door.post("/v1/embeddings", {"input": ["ab", "abcd"], "model": "pool"})
        await door.get("/health")
        await door.post("/v1/embeddings", {"input": 5})
        await engine.close()

    asyncio.run(main())
    whole, streamed, pooled, health, refused = seen.get_finished_spans()
    assert whole.name == "text_completion tiny" and pooled.name == "embeddings pool" and health.name == "GET /health"
    wanted = {
        "gen_ai.request.id": "mine", "gen_ai.response.model": "tiny", "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8, "gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9, "gen_ai.request.choice.count": 2, "gen_ai.operation.name": "text_completion",
        "gen_ai.response.finish_reasons": ("length", "length"), "http.response.status_code": 200,
    }  # fmt: skip
    for span in (whole, streamed):
        assert wanted.items() <= dict(span.attributes).items()
        assert span.attributes["gen_ai.latency.time_to_first_token"] <= span.attributes["gen_ai.latency.e2e"]
    assert pooled.attributes["gen_ai.usage.input_tokens"] == 6
    assert refused.attributes["http.response.status_code"] == 400 and refused.status.is_ok  # not our fault


HELLO = {"messages": [{"role": "user", "content": "a"}], "model": "tiny"}


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", HELLO, "chat"),
        ("/v1/messages", HELLO | {"max_tokens": 2}, "chat"),
        ("/v1/responses", {"input": "a", "model": "tiny"}, "chat"),
        ("/api/chat", HELLO, "chat"),
        ("/v2/chat", HELLO, "chat"),
        ("/api/generate", {"prompt": "a", "model": "tiny"}, "text_completion"),
        ("/api/embed", {"input": "a", "model": "pool"}, "embeddings"),
        ("/embed", {"inputs": "a", "model": "pool"}, "embeddings"),
        ("/classify", {"input": "a", "model": "pool"}, "pooling"),
    ],
)
def test_a_span_has_the_operation_of_its_route(path, body, operation, tmp_path):
    write_byte_tokenizer(tmp_path)
    names = []

    async def main():
        engine, core = await ScriptedCore.open(
            facts(tmp_path, max_model_len=512), facts(tmp_path, "pool", pooling=EVERY_TASK)
        )
        door = Door(App(State(ServerSettings(), engine), all_routes()), core)
        door.state.traces = SimpleNamespace(record=lambda name, *_, **__: names.append(name))
        exchange = await door.post(path, body)
        assert exchange.status == 200, exchange.body
        await engine.close()

    asyncio.run(main())
    assert names == [f"{operation} {body['model']}"]
