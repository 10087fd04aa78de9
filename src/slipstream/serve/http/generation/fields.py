"""The request fields that completions and chat share: OpenAI's, vLLM's, and those that are not supported.

No field is ignored without notice. A field is used; or it is a label of the client without effect (`Label`); or it is
refused unless its value asks for nothing (`unsupported`). Any other field is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from slipstream.base.typed import Fields, InnerFields, doc, unsupported, unsupported_fields, wanted
from slipstream.engine.model_description import ModelDescription
from slipstream.front.inputs import InputProcessor
from slipstream.params.sampling import FIELD, PARAMS, SamplingParams, names_for
from slipstream.params.structured import StructuredOutputsParams, as_params
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.settings import ServerSettings

Label = Annotated[Any, doc("a label of the client: accepted, without effect")]


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, unsupported("events are not padded", False)] = None


NoFields = Literal[""] | Annotated[list[Any], msgspec.Meta(max_length=0)]
"""An empty object, as some clients write it: in PHP it is an empty list."""
NumTokens = Annotated[int, wanted("a number of tokens", ge=0)]


class TextFormat(InnerFields, tag="text"):
    pass


class ObjectFormat(InnerFields, tag="json_object"):
    pass


class NamedSchema(InnerFields):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: Annotated[bool | None, doc("false: keywords that are not supported have no effect")] = None


class SchemaFormat(InnerFields, tag="json_schema"):
    json_schema: NamedSchema


class StructuralTag(InnerFields, tag="structural_tag"):
    format: Any = msgspec.UNSET
    structures: Any = msgspec.UNSET
    triggers: Any = msgspec.UNSET


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat | StructuralTag


def params_base(names: Mapping[str, str], base: type[Fields], whole: Any = int) -> Any:
    """A type with fields for these parameters, by their names in an API. `whole`: the type of whole numbers."""
    hints, fields = get_type_hints(SamplingParams), []
    for field, name in names.items():
        kinds: list[Any] = []
        for kind in get_args(hints[name]) or (hints[name],):
            inner = get_args(kind)
            if get_origin(kind) is Sequence:
                kind = list[inner[0]]  # type: ignore[valid-type]
            elif get_origin(kind) is Mapping:  # the names of an object are strings
                kind = dict[str, inner[1]]  # type: ignore[valid-type]
            kinds.append(whole if kind is int else kind)
        fields.append((field, Annotated[Union[*kinds, None], doc(PARAMS[name].help)], None))
    return msgspec.defstruct("Params", fields, bases=(base,), kw_only=True)


if TYPE_CHECKING:

    class _Params(Fields, kw_only=True):  # those that routes read
        n: int | None = None
        temperature: float | None = None
        max_tokens: int | None = None
        ignore_eos: bool | None = None
        include_stop_str_in_output: bool | None = None
        priority: int | None = None
        cache_salt: str | None = None
        prompt_logprobs: int | None = None
        stop_token_ids: list[int] | None = None
        truncate_prompt_tokens: int | None = None
        skip_special_tokens: bool | None = None
        spaces_between_special_tokens: bool | None = None
else:
    _Params = params_base({name: name for name in names_for(FIELD)}, Fields)


class GenerationFields(_Params, kw_only=True):
    """Fields that are null or absent have the defaults of the model's generation_config.json. Those of `_Params` are
    the parameters of the same names."""

    model: Annotated[str | None, doc("a name from /v1/models; default: the first model that generates")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: Annotated[bool | None, doc("in logprobs, write tokens as token_id:N")] = None
    return_token_ids: Annotated[bool | None, doc("return the ids of prompt and output too")] = None
    vllm_xargs: Annotated[
        dict[str, Any] | None, doc("arguments for the logits processors that the server was started with")
    ] = None

    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[
        dict[str, Any] | None, doc("vLLM's: json, regex, choice, grammar, json_object or structural_tag")
    ] = None
    guided_json: Annotated[str | dict[str, Any] | None, doc("older name of structured_outputs.json")] = None
    guided_regex: Annotated[str | None, doc("older name of structured_outputs.regex")] = None
    guided_choice: Annotated[list[str] | None, doc("older name of structured_outputs.choice")] = None
    guided_grammar: Annotated[str | None, doc("older name of structured_outputs.grammar")] = None
    guided_whitespace_pattern: Annotated[str | None, doc("whitespace in JSON, with guided_json")] = None

    use_beam_search: Annotated[
        bool | None, doc("search for the n likeliest outputs instead of sampling; the choices are the best first")
    ] = None
    length_penalty: Annotated[float | None, doc("exponent of the length in scores of beam search; default 1")] = None

    user: Label = None
    metadata: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    prompt_cache_retention: Annotated[
        Any, unsupported("cached prompts stay until their memory is needed", "in_memory", "in-memory")
    ] = None
    service_tier: Annotated[Any, unsupported("there is one tier; use priority", "auto", "default")] = None
    request_id: Annotated[Any, unsupported("send the header X-Request-Id instead")] = None
    guided_decoding_backend: Annotated[Any, unsupported("llguidance compiles grammars", "auto", "guidance")] = None
    best_of: Annotated[Any, unsupported("use n and choose among the samples", 1)] = None
    early_stopping: Annotated[Any, unsupported("beam search always lasts max_tokens steps", False)] = None
    truncation_side: Annotated[Any, unsupported("prompts are truncated on the left", "left")] = None
    logits_processors: Annotated[
        Any, unsupported("a request cannot have code; start the server with --logits-processors", [])
    ] = None
    kv_transfer_params: Annotated[Any, unsupported("KV caches are not transferred between engines", {})] = None


def given_fields(body: Fields) -> dict[str, Any]:
    """Returns the fields that are not null, without those that ask for nothing."""
    pairs = zip(body.__struct_fields__, msgspec.structs.astuple(body), strict=True)
    return {name: value for name, value in pairs if value is not None and name not in unsupported_fields(type(body))}


_SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)  # a request field of the same name sets the parameter


def sampling_params(
    given: dict[str, Any],
    inputs: InputProcessor,
    settings: ServerSettings,
    own: dict[str, Any],
    names: dict[str, str],
) -> SamplingParams:
    """Builds SamplingParams from request fields of the same names.

    `own`: parameters whose request fields differ by route, with precedence. `names`: the names of those fields.
    """
    _check_limits(given | own, settings, names)
    _check_together(given, own)
    requested = {name: given[name] for name in given.keys() & _SAMPLING_FIELDS}
    values = {**inputs.description.defaults.params, **requested, **own}
    if "thinking_token_budget" in given:
        inputs.reasoning_parser = settings.reasoning_parser
    names["extra_args"] = "vllm_xargs"
    if given.get("vllm_xargs"):
        values["extra_args"] = given["vllm_xargs"]
    if (structured := structured_outputs(given, names)) is not None:
        values["structured_outputs"] = structured
    if (limit := values.get("truncate_prompt_tokens")) is not None:
        values["truncate_prompt_tokens"] = prompt_limit(limit, values.get("max_tokens"), inputs.description)
    return SamplingParams(**values)


def prompt_limit(given: int, max_tokens: int | None, model: ModelDescription) -> int:
    """The value of truncate_prompt_tokens; with -1 as much of the prompt as fits with max_tokens."""
    return max(1, model.max_model_len - max_tokens) if given == -1 and max_tokens else given


def _check_together(given: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises for fields that have no effect without another one."""
    if (options := given.get("stream_options")) is not None:
        if not given.get("stream"):
            raise bad_request("stream_options needs stream=true; set it, or remove this", param="stream_options")
        if options.continuous_usage_stats and not options.include_usage:
            name = "stream_options.continuous_usage_stats"
            raise bad_request(f"{name} needs include_usage=true; set it, or remove this", param=name)
    if given.get("length_penalty") not in (None, 1):
        fact = "length_penalty is for beam search"
        raise bad_request(f"{fact}; set use_beam_search, or remove this", "length_penalty", "unsupported_parameter")
    if own.get("logprobs") is None:
        for name in ("logprob_token_ids", "return_tokens_as_token_ids"):
            if given.get(name):
                raise bad_request(f"{name} needs logprobs; set it, or remove this", param=name)


def _check_limits(given: dict[str, Any], settings: ServerSettings, names: Mapping[str, str]) -> None:
    def at_most(name: str, value: int, limit: int, what: str) -> None:
        if value > limit:
            name = names.get(name, name)
            raise bad_request(f"{name} has {value} {what}, this server takes {limit}; send fewer", param=name)

    at_most("n", given.get("n", 1), settings.max_n, "samples")
    for name in ("logprobs", "prompt_logprobs"):
        if (logprobs := given.get(name)) is not None:
            if logprobs < 0:
                name = names.get(name, name)
                raise bad_request(f"{name} is {logprobs}; give 0 to {settings.max_logprobs}", param=name)
            at_most(name, logprobs, settings.max_logprobs, "top tokens")
    for name in ("stop", "bad_words", "stop_token_ids", "logprob_token_ids"):
        if values := given.get(name):
            values = [values] if isinstance(values, str) else values
            at_most(name, len(values), settings.max_stop, "entries")
            if isinstance(values[0], str):
                at_most(name, max(map(len, values)), settings.max_stop_chars, "characters each")
    at_most("logit_bias", len(given.get("logit_bias", ())), settings.max_bias, "entries")
    at_most("cache_salt", len(given.get("cache_salt", "")), settings.max_salt_chars, "characters")


# The request fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and older names.

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
OUTPUT_FIELDS = ("structured_outputs", *_GUIDED)
"""Fields with the shape of the whole output; that of `response_format` is for the content."""
FIELDS = ("response_format", *OUTPUT_FIELDS)


def structured_outputs(given: dict[str, Any], names: dict[str, str]) -> StructuredOutputsParams | None:
    """The required shape of the output. `names` gets the name of the field, for later errors."""
    pattern = given.get("guided_whitespace_pattern")
    asked = [name for name in FIELDS if name in given and not isinstance(given[name], TextFormat)]
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} both ask for a structured output; remove one", param=asked[1])
    if not asked:
        if pattern is not None:
            name = "guided_whitespace_pattern"
            raise bad_request(f"{name} needs guided_json; set it, or remove this", param=name)
        return None
    name = asked[0]
    names["structured_outputs"] = names.get(name, name)
    if name == "response_format":
        return _of_format(given[name])
    fields = given[name] if name == "structured_outputs" else {_GUIDED[name]: given[name]}
    return as_params(fields if pattern is None else {**fields, "whitespace_pattern": pattern})


def _of_format(given: ResponseFormat) -> StructuredOutputsParams:
    match given:
        case SchemaFormat(NamedSchema(schema=schema, strict=strict)):
            return StructuredOutputsParams(json=schema, lenient=strict is False)
        case StructuralTag():
            return StructuredOutputsParams(structural_tag=msgspec.to_builtins(given))
    return StructuredOutputsParams(json_object=True)
