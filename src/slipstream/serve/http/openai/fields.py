"""Fields that completions and chat share: OpenAI's, vLLM's beside them, and those we must refuse.

Nothing is dropped in silence. A field is used; or it is a label that asks for nothing and says so (`Label`); or it is
refused unless it has a value that asks for nothing (`REFUSED`). Fields in none of these lists are refused as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from slipstream.frontend.inputs import InputProcessor
from slipstream.params import SamplingParams
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.settings import ServerSettings


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


Label = Annotated[Any, _doc("a label of the caller's: accepted, and it changes nothing here")]
Refused = Annotated[Any, _doc("not supported: refused unless it asks for nothing")]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Refused = None


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is null or left out follows the model's generation config."""

    model: Annotated[str | None, _doc("a name from /v1/models; the first if left out")] = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    priority: Annotated[int | None, _doc("lower goes first")] = None
    cache_salt: Annotated[str | None, _doc("prompts share cached pages only within one salt")] = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: Annotated[bool | None, _doc("in logprobs, write tokens as token_id:N")] = None
    return_token_ids: Annotated[bool | None, _doc("return the ids of prompt and output too")] = None

    user: Label = None
    metadata: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    prompt_cache_retention: Refused = None
    service_tier: Refused = None
    request_id: Refused = None
    response_format: Refused = None
    structured_outputs: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    guided_decoding_backend: Refused = None
    guided_whitespace_pattern: Refused = None
    best_of: Refused = None
    use_beam_search: Refused = None
    length_penalty: Refused = None
    early_stopping: Refused = None
    truncation_side: Refused = None
    logits_processors: Refused = None
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None


_UNSUPPORTED = "unsupported_parameter"
_STRUCTURED = "structured output is not there yet"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "prompt_cache_retention": (("in_memory", "in-memory"), "cached prompts stay while there is room for them"),
    "service_tier": (("auto", "default"), "all requests are served alike; use priority"),
    "request_id": ((), "send the header X-Request-Id instead"),
    "response_format": (({"type": "text"},), _STRUCTURED),
    "structured_outputs": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "guided_decoding_backend": ((), _STRUCTURED),
    "guided_whitespace_pattern": ((), _STRUCTURED),
    "best_of": ((1,), "ask for n samples and choose among them"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1, 1.0), "beam search is not supported"),
    "early_stopping": ((False,), "beam search is not supported"),
    "truncation_side": (("left",), "prompts are cut on the left"),
    "logits_processors": (([],), "a request brings no code; use logit_bias, bad_words or allowed_token_ids"),
    "kv_transfer_params": (({},), "caches are not moved between engines"),
    "vllm_xargs": (({},), "there are no extra arguments"),
}


def given_fields(body: msgspec.Struct) -> dict[str, Any]:
    """What was said: the fields that are not null."""
    pairs = zip(body.__struct_fields__, msgspec.structs.astuple(body), strict=True)
    return {name: value for name, value in pairs if value is not None}


def refuse(given: dict[str, Any], table: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raises for a field that asks for what we do not do."""
    for name in given.keys() & table.keys():
        nothing, way_out = table[name]
        if given[name] not in nothing:
            raise bad_request(f"{name} is not supported: {way_out}", param=name, code=_UNSUPPORTED)


_PLAIN = {
    "n", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
    "prompt_logprobs", "logprob_token_ids", "priority", "cache_salt",
}  # fmt: skip


def sampling_params(
    given: dict[str, Any],
    inputs: InputProcessor,
    settings: ServerSettings,
    own: dict[str, Any],
    names: Mapping[str, str],
) -> SamplingParams:
    """`own`: what the two routes say differently; `names`: and what they call it."""
    refuse(given, REFUSED)
    _check_limits(given | own, settings, names)
    _check_together(given, own)
    plain = {name: given[name] for name in given.keys() & _PLAIN}
    values = {**inputs.facts.defaults.params, **plain, **own}
    if values.get("truncate_prompt_tokens") == -1 and values.get("max_tokens"):
        # what fits beside the answer
        values["truncate_prompt_tokens"] = max(1, inputs.facts.max_model_len - values["max_tokens"])
    return SamplingParams(**values)


def _check_together(given: dict[str, Any], own: dict[str, Any]) -> None:
    """Fields that do nothing without another one."""
    if (options := given.get("stream_options")) is not None:
        if not given.get("stream"):
            raise bad_request("stream_options is only for stream=true; leave it out", param="stream_options")
        if options.continuous_usage_stats and not options.include_usage:
            name = "stream_options.continuous_usage_stats"
            raise bad_request(f"{name} needs include_usage=true; set it, or leave this out", param=name)
        if options.include_obfuscation not in (None, False):
            name = "stream_options.include_obfuscation"
            raise bad_request(f"{name} is not supported: events are not padded", param=name, code=_UNSUPPORTED)
    if own.get("logprobs") is None:
        for name in ("logprob_token_ids", "return_tokens_as_token_ids"):
            if given.get(name):
                raise bad_request(f"{name} needs logprobs; ask for them, or leave it out", param=name)


def _check_limits(given: dict[str, Any], settings: ServerSettings, names: Mapping[str, str]) -> None:
    _at_most("n", given.get("n", 1), settings.max_n, "samples")
    for name in ("logprobs", "prompt_logprobs"):
        if (logprobs := given.get(name)) is not None:
            name = names.get(name, name)
            if logprobs < 0:
                raise bad_request(f"{name} is {logprobs}; give 0 to {settings.max_logprobs}", param=name)
            _at_most(name, logprobs, settings.max_logprobs, "likeliest tokens")
    for name in ("stop", "bad_words", "stop_token_ids", "logprob_token_ids"):
        if values := given.get(name):
            values = [values] if isinstance(values, str) else values
            _at_most(name, len(values), settings.max_stop, "entries")
            if isinstance(values[0], str):
                _at_most(name, max(map(len, values)), settings.max_stop_chars, "characters each")
    _at_most("logit_bias", len(given.get("logit_bias", ())), settings.max_bias, "entries")
    _at_most("cache_salt", len(given.get("cache_salt", "")), settings.max_salt_chars, "characters")


def _at_most(name: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise bad_request(f"{name} has {value} {what}, this server takes {limit}; ask for less", param=name)
