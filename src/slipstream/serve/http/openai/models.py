"""GET /v1/models: the served models, the default first, then adapters."""

from __future__ import annotations

import msgspec

from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import get


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    tasks: list[str]  # generate, and pooling tasks
    root: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: its folder
    parent: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: its base model


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


async def list_models(request: Request, body: None) -> Response:
    return json_response(ModelList("list", [_card(request, name) for name in _names(request)]))


async def show_model(request: Request, body: None) -> Response:
    request.state.check_ready()
    return json_response(_card(request, request.path_params["model"]))


def _card(request: Request, name: str) -> ModelCard:
    served = request.state.engine.model(name)
    card = ModelCard(name, "model", request.state.started, "slipstream", served.max_num_tokens, served.tasks)
    if served.lora is not None:
        card.root, card.parent = served.lora.lora_path, served.base
    return card


def _names(request: Request) -> list[str]:
    engine = request.state.engine
    return [*engine.models, *engine.adapter_names.of(engine.models)]


ROUTES = [
    get("/v1/models", list_models, "The models served here", response_model=ModelList),
    get("/v1/models/{model:path}", show_model, "One model", response_model=ModelCard),
]
