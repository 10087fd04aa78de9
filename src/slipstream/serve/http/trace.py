"""What a request's span says, in the words of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import Any

from slipstream.metrics.traces import Traces
from slipstream.params import SamplingParams
from slipstream.serve.http.call import Call

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


def record_call(traces: Traces, call: Call, method: str, route: str, status: int, seconds: float) -> None:
    said: dict[str, Any] = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "gen_ai.request.id": call.id,
    }
    name = f"{method} {route}"
    if call.tracks:
        operation = _OPERATIONS.get(route, "pooling")
        said |= _of_tracks(call) | {"gen_ai.operation.name": operation, "gen_ai.latency.e2e": seconds}
        name = f"{operation} {said['gen_ai.response.model']}"
    carrier = {key: value for key in ("traceparent", "tracestate") if (value := call.header(key.encode()))}
    traces.record(name, seconds, said, carrier, failed=status >= 500)


def told_of(call: Call) -> str:
    """What a request asked of the engine and got, in a line."""
    tracks = call.tracks
    num_prompt = sum(len(track.message.prompt_token_ids) for track in tracks)
    model = tracks[0].message.model or next(iter(call.state.engine.models))
    said = f"{model}, {len(tracks)} prompts of {num_prompt} tokens"
    samples = [sample for track in tracks for sample in track.samples]
    if not samples:
        return said  # vectors or scores
    said += f", {sum(track.num_cached for track in tracks)} of them cached"
    reasons = ", ".join(sorted({str(sample.finish_reason or "abort") for sample in samples}))
    said += f", {len(samples)} samples of {sum(track.num_tokens for track in tracks)} tokens, ended by {reasons}"
    if tracks[0].metrics.first_token_ts:
        said += f", first token after {tracks[0].metrics.first_token_latency:.3f} s"
    return said


def _of_tracks(call: Call) -> dict[str, Any]:
    first = call.tracks[0]
    model = call.state.engine.model(first.message.model).facts.name
    num_prompt = sum(len(track.message.prompt_token_ids) for track in call.tracks)
    said: dict[str, Any] = {
        "gen_ai.system": "slipstream",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.prompt_tokens": num_prompt,
    }
    params = first.message.params
    if not isinstance(params, SamplingParams):
        return said
    num_output = sum(track.num_tokens for track in call.tracks)
    reasons = [str(sample.finish_reason or "abort") for track in call.tracks for sample in track.samples]
    said |= {
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.finish_reasons": reasons,
    }
    if params.max_tokens is not None:
        said["gen_ai.request.max_tokens"] = params.max_tokens
    if first.metrics.first_token_ts:
        said["gen_ai.latency.time_to_first_token"] = first.metrics.first_token_latency
    return said
