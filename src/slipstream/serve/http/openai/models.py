"""GET /v1/models: what is served here, the default first."""

from __future__ import annotations

import msgspec

from slipstream.serve.http.call import Call
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import get


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


async def list_models(call: Call, body: None) -> Reply:
    return json_reply(ModelList("list", [_card(call, name) for name in call.state.engine.models]))


async def show_model(call: Call, body: None) -> Reply:
    call.state.check_ready()
    return json_reply(_card(call, call.path_params["model"]))


def _card(call: Call, name: str) -> ModelCard:
    served = call.state.engine.model(name)
    return ModelCard(name, "model", call.state.started, "slipstream", served.max_num_tokens)


ROUTES = [
    get("/v1/models", list_models, "The models served here", answer=ModelList),
    get("/v1/models/{model:path}", show_model, "One model", answer=ModelCard),
]
