"""Describes a request for its OpenTelemetry span (the conventions for generative AI) and for the debug log."""

from __future__ import annotations

from typing import Any

from slipstream.front.request_state import GenerationRequestState
from slipstream.metrics.traces import Traces
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.request import Request

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


def record_call(traces: Traces, request: Request, method: str, route: str, status: int, seconds: float) -> None:
    """Records the span of a request that has ended."""
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "gen_ai.request.id": request.id,
    }
    name = f"{method} {route}"
    if request.request_states:
        operation = _OPERATIONS.get(route, "pooling")
        attributes |= _engine_attributes(request)
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.latency.e2e": seconds}
        name = f"{operation} {attributes['gen_ai.response.model']}"
    carrier = {key: value for key in ("traceparent", "tracestate") if (value := request.header(key.encode()))}
    traces.record(name, seconds, attributes, carrier, failed=status >= 500)


def describe_engine_requests(request: Request) -> str:
    """One line for the log: the model, prompts, samples, tokens and times of a request."""
    states = request.request_states
    model = states[0].message.model or next(iter(request.state.engine.models))
    num_prompt = sum(len(one.message.prompt_token_ids) for one in states)
    line = f"{model}, {len(states)} prompts of {num_prompt} tokens"
    samples = [sample for one in states for sample in one.samples]
    if not samples:
        return line  # pooling
    reasons = ", ".join(sorted({str(sample.finish_reason or "abort") for sample in samples}))
    line += f", {sum(one.num_cached for one in states)} of them cached"
    line += f", {len(samples)} samples of {sum(one.num_tokens for one in states)} tokens, ended by {reasons}"
    first = states[0]
    if isinstance(first, GenerationRequestState) and first.metrics.first_token_ts:
        line += f", first token after {first.metrics.first_token_latency:.3f} s"
    return line


def _engine_attributes(request: Request) -> dict[str, Any]:
    states = request.request_states
    first = states[0]
    model = request.state.engine.model(first.message.model).description.name
    num_prompt = sum(len(one.message.prompt_token_ids) for one in states)
    attributes: dict[str, Any] = {
        "gen_ai.system": "slipstream",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.prompt_tokens": num_prompt,
    }
    params = first.message.params
    if not isinstance(params, SamplingParams):
        return attributes
    num_output = sum(one.num_tokens for one in states)
    attributes |= {
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.finish_reasons": [
            str(sample.finish_reason or "abort") for one in states for sample in one.samples
        ],
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if isinstance(first, GenerationRequestState) and first.metrics.first_token_ts:
        attributes["gen_ai.latency.time_to_first_token"] = first.metrics.first_token_latency
    return attributes
