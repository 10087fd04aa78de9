"""Ollama's routes about models: /api/tags, /api/ps, /api/show, /api/version, and those that would change models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from slipstream.front.served import POOLING_TASKS, ServedModel
from slipstream.serve.http.chat.formats import ChatFormats
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.ollama.errors import OllamaErrorBody, as_ollama_error
from slipstream.serve.http.ollama.options import find_model
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import JSON, JSON_LINES, Response, json_line, json_response
from slipstream.serve.http.routes import get, post, refused

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


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    name: Annotated[str | None, msgspec.Meta(description="older name of model")] = None
    verbose: Annotated[bool | None, msgspec.Meta(description="with the limits of the model")] = None


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


class PullRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    name: Annotated[str | None, msgspec.Meta(description="older name of model")] = None
    stream: Annotated[bool | None, msgspec.Meta(description="default: true")] = None
    insecure: Annotated[bool | None, msgspec.Meta(description="not supported: nothing is downloaded")] = None


async def pull_model(request: Request, body: PullRequest) -> Response:
    """Succeeds for a model that is served; nothing is downloaded."""
    if body.insecure:
        raise bad_request("insecure is not supported: nothing is downloaded; remove it", "insecure")
    find_model(request, _name(body.model, body.name), *_TASKS)
    kind = JSON if body.stream is False else JSON_LINES.media_type
    return Response(json_line({"status": "success"}), media_type=kind)


def _name(model: str | None, name: str | None) -> str:
    if (model or None) is not None and (name or None) is not None and model != name:
        raise bad_request("model and name are two names of one field and differ; remove name", "name")
    if not (found := model or name):
        raise bad_request("model is missing; give a name from /api/tags", "model")
    return found


_OLLAMA: dict[str, Any] = dict(convert_error=as_ollama_error, error_model=OllamaErrorBody, any_content_type=True)
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
