"""Ollama's routes about models: /api/tags, /api/ps, /api/show, /api/version, and those that would change models."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from slipstream.base.typed import Fields, InnerFields, doc, unsupported, wanted
from slipstream.front.pooling_calls import encode
from slipstream.front.served import POOLING_TASKS, ServedModel
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import PARAMS, SamplingParams
from slipstream.params.values import Integer
from slipstream.serve.http.generation.dialect import chat_params, json_shape
from slipstream.serve.http.generation.fields import params_base
from slipstream.serve.http.generation.tools import ChatFormats
from slipstream.serve.http.pooling.run import Chosen, arrays_of, run, size_of, usage_of
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, get, post, refused
from slipstream.serve.http.server.response import (
    JSON,
    JSON_LINES,
    JsonList,
    Response,
    json_array,
    json_line,
    json_response,
    large_response,
)

API_VERSION = "0.12.6"  # of Ollama's API: clients compare it with the version that they need
_TASKS = ("generate", *POOLING_TASKS)
_NEVER = "2318-01-01T00:00:00Z"  # models do not expire


class OllamaDetails(msgspec.Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, omit_defaults=True):
    name: str
    model: str
    modified_at: str
    size: int = msgspec.field(default_factory=int)  # bytes of its files
    digest: str = msgspec.field(default_factory=str)
    details: OllamaDetails | None = None
    expires_at: str | None = None  # of /api/ps
    size_vram: int | None = None  # bytes of the files that are in the memory of a GPU
    context_length: int | None = None


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaVersion(msgspec.Struct):
    version: str


async def list_tags(request: Request, body: None) -> Response:
    models = request.state.engine.models
    return json_response(OllamaModels([_card(request, name, served) for name, served in models.items()]))


async def list_running(request: Request, body: None) -> Response:
    """All models, which stay loaded."""
    asleep, found = request.state.engine.pulse.is_asleep, []
    for name, served in request.state.engine.models.items():
        card = _card(request, name, served)
        card.expires_at, card.size_vram = _NEVER, 0 if asleep else served.description.gpu_bytes
        card.context_length = served.max_num_tokens
        found.append(card)
    return json_response(OllamaModels(found))


async def show_version(request: Request, body: None) -> Response:
    return json_response(OllamaVersion(API_VERSION))


def _card(request: Request, name: str, served: ServedModel) -> OllamaModel:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return OllamaModel(name, name, _started(request), served.description.weights.num_bytes, digest, _details(served))


def _details(served: ServedModel) -> OllamaDetails:
    description = served.description
    weights, family = description.weights, description.architecture
    level = weights.quantization or description.dtype
    return OllamaDetails("", weights.format, family, [family], _short(weights.num_params), level)


def _short(count: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 8B."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2)):
        if count >= unit:
            return f"{count / unit:.{0 if count % unit == 0 else digits}f}{letter}"
    return f"{count / 1000:.0f}K" if count >= 1000 else str(count or "")


def _started(request: Request) -> str:
    return datetime.fromtimestamp(request.state.started, UTC).isoformat().replace("+00:00", "Z")


class ShowRequest(Fields, kw_only=True):
    model: str | None = None
    name: Annotated[str | None, doc("older name of model")] = None
    verbose: Annotated[bool | None, doc("with the limits of the model")] = None


class ShowResponse(msgspec.Struct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


async def show_model(request: Request, body: ShowRequest) -> Response:
    served = find_model(request, _name(body.model, body.name), *_TASKS)
    description = served.description
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    info: dict[str, Any] = {"general.architecture": "slipstream"}
    info["slipstream.context_length"] = served.max_num_tokens
    if description.pooling is not None:
        info["slipstream.embedding_length"] = description.pooling.embed_size
    if description.weights.num_params:
        info["general.parameter_count"] = description.weights.num_params
    if body.verbose:
        info["slipstream.vocab_size"] = description.vocab_size
    parameters = "\n".join(f"{name} {value}" for name, value in description.defaults.params.items())
    return json_response(
        ShowResponse(
            f"FROM {description.name}\n", parameters, template or "", _details(served), info,
            _capabilities(request, served), _started(request),
        )
    )  # fmt: skip


def _capabilities(request: Request, served: ServedModel) -> list[str]:
    found = []
    if served.can("generate"):
        formats = ChatFormats.of(served, request.state.settings)
        found.append("completion")
        found += ["tools"] if formats.tools is not None else []
        found += ["thinking"] if formats.reasoning is not None else []
    return [*found, "embedding"] if served.can("embed") else found


class PullRequest(Fields, kw_only=True):
    model: str | None = None
    name: Annotated[str | None, doc("older name of model")] = None
    stream: Annotated[bool | None, doc("default: true")] = None
    insecure: Annotated[Any, unsupported("nothing is downloaded; remove it", False)] = None


async def pull_model(request: Request, body: PullRequest) -> Response:
    """Succeeds for a model that is served; nothing is downloaded."""
    find_model(request, _name(body.model, body.name), *_TASKS)
    kind = JSON if body.stream is False else JSON_LINES.media_type
    return Response(json_line({"status": "success"}), media_type=kind)


def _name(model: str | None, name: str | None) -> str:
    if (model or None) is not None and (name or None) is not None and model != name:
        raise bad_request("model and name are two names of one field and differ; remove name", "name")
    if not (found := model or name):
        raise bad_request("model is missing; give a name from /api/tags", "model")
    return found


_OLLAMA: dict[str, Any] = dict(any_content_type=True)
_FIXED = "models are chosen when the server starts; see /api/tags"

ROUTES = [
    get("/api/tags", list_tags, "Ollama: the served models", response_model=OllamaModels, **_OLLAMA),
    get("/api/ps", list_running, "Ollama: the loaded models", response_model=OllamaModels, **_OLLAMA),
    get("/api/version", show_version, "Ollama: version of its API", response_model=OllamaVersion, **_OLLAMA),
    post("/api/show", show_model, "Ollama: one model", ShowRequest, response_model=ShowResponse, uses_queue=False,
         **_OLLAMA),
    post("/api/pull", pull_model, "Ollama: check that a model is served", PullRequest, uses_queue=False, **_OLLAMA),
    *(refused(f"/api/{name}", _FIXED, **_OLLAMA) for name in ("create", "copy", "push")),
    refused("/api/delete", _FIXED, method="DELETE", **_OLLAMA),
]  # fmt: skip


# Ollama's POST /api/embed, and its older form /api/embeddings.


Context = Annotated[int, wanted("a number of tokens", ge=1)]
KeepAlive = Annotated[int | float | str | None, doc("models stay loaded; 0 is refused")]


class EmbedOptions(InnerFields):
    num_ctx: Annotated[Context | None, doc("truncate to this many tokens")] = None


class OllamaEmbedRequest(Fields, kw_only=True):
    model: str
    input: Annotated[str | list[str], doc("a text, or a list of texts")]
    truncate: Annotated[bool | None, doc("truncate long texts; default: true")] = None
    dimensions: Annotated[int | None, doc("truncate vectors to this size (Matryoshka)")] = None
    options: EmbedOptions | None = None
    keep_alive: KeepAlive = None


class OllamaEmbedResponse(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OldEmbedRequest(Fields, kw_only=True):
    model: str
    prompt: str
    options: EmbedOptions | None = None
    keep_alive: KeepAlive = None


class OldEmbedResponse(msgspec.Struct):
    embedding: list[float]


async def create_embed(request: Request, body: OllamaEmbedRequest) -> Response:
    began = time.perf_counter_ns()
    request.set_input_field("input")
    texts = [body.input] if isinstance(body.input, str) else body.input
    request.check_count(len(texts), "input")
    own = {} if body.dimensions is None else {"dimensions": body.dimensions}
    found = await _embed(request, body, texts, body.truncate is not False, own) if texts else []
    vectors: Any = JsonList(map(json_array, arrays_of(found)))
    total = time.perf_counter_ns() - began
    answer = OllamaEmbedResponse(body.model, vectors, total, 0, usage_of(found).prompt_tokens)
    return await large_response(request.state.pieces, answer)


async def create_old_embedding(request: Request, body: OldEmbedRequest) -> Response:
    request.set_input_field("prompt")
    if not body.prompt:
        return json_response(OldEmbedResponse([]))
    (found,) = await _embed(request, body, [body.prompt], True, {"normalize": False})
    return json_response(OldEmbedResponse(found.outputs.array.tolist()))


async def _embed(
    request: Request, body: OllamaEmbedRequest | OldEmbedRequest, texts: list[str], truncates: bool, own: dict[str, Any]
) -> list[Any]:
    check_keep_alive(body.keep_alive)
    served = find_model(request, body.model, "embed")
    assert served.pooling_inputs is not None, "a model that embeds"
    chosen = Chosen(served, served.pooling_inputs)
    limit = num_ctx(body.options, served.max_num_tokens)
    side = {"truncation_side": "right", "truncate_prompt_tokens": limit or served.max_num_tokens}
    own |= side if truncates else {"truncation_side": "never"}
    pooling_call = encode(chosen.inputs, list(texts), PoolingParams(task="embed", **own), "embed")
    found, _ = await run(request, chosen, pooling_call, size_of(texts))
    for index, one in enumerate(found):
        if limit is not None and one.num_prompt_tokens > limit:
            fact = f"text {index} has {one.num_prompt_tokens} tokens, options.num_ctx is {limit}"
            raise bad_request(f"{fact}; raise it, or set truncate", "options", "context_length_exceeded")
    return found


EMBED_ROUTES = [
    post("/api/embed", create_embed, "Ollama: embed texts", OllamaEmbedRequest, response_model=OllamaEmbedResponse,
         **_OLLAMA),
    post("/api/embeddings", create_old_embedding, "Ollama: embed one text (older form)", OldEmbedRequest,
         response_model=OldEmbedResponse, **_OLLAMA),
]  # fmt: skip


# Ollama's `options`, `format`, `think` and `keep_alive`, as parameters of the engine. No option is ignored.


_AT_START = "it is set when the server starts"


_NAMES = {row.ollama: name for name, row in PARAMS.items() if row.ollama}  # of parameters, by those in `options`
_Params: Any = params_base(_NAMES, InnerFields, Annotated[int | float, wanted("a number")])


class OllamaOptions(_Params, kw_only=True):  # type: ignore[misc, call-arg]
    num_predict: Annotated[int | None, wanted("a number of tokens")] = None
    num_ctx: Context | None = None
    typical_p: Annotated[Any, unsupported("use top_p or min_p", 1)] = None
    tfs_z: Annotated[Any, unsupported("use top_p or min_p", 1)] = None
    mirostat: Annotated[Any, unsupported("use temperature and top_p", 0)] = None
    mirostat_tau: Annotated[Any, unsupported("use temperature and top_p")] = None
    mirostat_eta: Annotated[Any, unsupported("use temperature and top_p")] = None
    repeat_last_n: Annotated[Any, unsupported("repeat_penalty counts the whole text", -1)] = None
    penalize_newline: Annotated[Any, unsupported("repeat_penalty counts all tokens", True)] = None
    num_keep: Annotated[Any, unsupported("the context is not shifted", 0)] = None
    num_batch: Annotated[Any, unsupported(_AT_START)] = None
    num_gpu: Annotated[Any, unsupported(_AT_START)] = None
    main_gpu: Annotated[Any, unsupported(_AT_START)] = None
    num_thread: Annotated[Any, unsupported(_AT_START)] = None
    numa: Annotated[Any, unsupported(_AT_START, False)] = None
    use_mmap: Annotated[Any, unsupported(_AT_START)] = None
    use_mlock: Annotated[Any, unsupported(_AT_START, False)] = None
    low_vram: Annotated[Any, unsupported(_AT_START, False)] = None
    f16_kv: Annotated[Any, unsupported(_AT_START, True)] = None
    vocab_only: Annotated[Any, unsupported(_AT_START, False)] = None
    logits_all: Annotated[Any, unsupported(_AT_START, False)] = None
    embedding_only: Annotated[Any, unsupported(_AT_START, False)] = None


class OllamaFields(Fields, kw_only=True):
    """Fields of /api/chat and /api/generate."""

    model: Annotated[str, doc("a name from /api/tags, with or without :latest")]
    stream: Annotated[bool | None, doc("default: true")] = None
    format: Annotated[Literal["json", ""] | dict[str, Any] | None, wanted("json or a JSON schema")] = None
    options: OllamaOptions | None = None
    think: Annotated[bool | str | None, doc("switches reasoning, or sets its effort: low, medium, high")] = None
    keep_alive: KeepAlive = None
    logprobs: Annotated[Any, unsupported("use /v1/chat/completions", False)] = None
    top_logprobs: Annotated[Any, unsupported("use /v1/chat/completions", 0)] = None
    truncate: Annotated[bool | None, doc("leave out the oldest messages of a long prompt; default: true")] = None
    shift: Annotated[Any, unsupported("the context is not shifted; shorten the messages", False)] = None


def num_ctx(options: OllamaOptions | EmbedOptions | None, most: int) -> int | None:
    """The limit of tokens that `num_ctx` sets; None if it is no less than `most`, the limit of the model."""
    wanted = None if options is None else options.num_ctx
    return None if wanted is None or wanted >= most else wanted


def ollama_params(request: Request, served: ServedModel, body: OllamaFields) -> tuple[SamplingParams, int | None]:
    """Returns the parameters, and num_predict where it is a limit."""
    check_keep_alive(body.keep_alive)
    options = body.options or OllamaOptions()
    values = {ours: getattr(options, name) for name, ours in _NAMES.items()}
    for name, value in values.items():
        if isinstance(value, float) and value.is_integer() and isinstance(PARAMS[name].check, Integer):
            values[name] = int(value)
    if isinstance(values["stop"], str):
        values["stop"] = [values["stop"]]
    if body.format not in (None, ""):
        values["response_format"] = json_shape(body.format if isinstance(body.format, dict) else None)
    limit = options.num_predict
    limit = None if limit is None or limit < 0 else limit  # -1 and -2: no limit but the context
    names = {ours: f"options.{name}" for name, ours in _NAMES.items()}
    names |= {"max_tokens": "options.num_predict", "response_format": "format"}
    return chat_params(request, served, values, limit, names), limit


def check_keep_alive(given: float | str | None) -> None:
    """Raises for 0, which would unload the model. Other durations are kept: models stay loaded."""
    if given == 0 or (isinstance(given, str) and given.strip().rstrip("smh") == "0"):
        raise bad_request("keep_alive would unload the model, and models stay loaded; remove it", "keep_alive")


def find_model(request: Request, name: str, *tasks: str) -> ServedModel:
    """The model of that name, which clients extend by :latest."""
    models = request.state.engine.models
    plain = name.removesuffix(":latest")
    return request.choose_model(plain if name not in models and plain in models else name, *tasks)
