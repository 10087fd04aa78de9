"""POST /score and /v1/score in vLLM's format: scores of pairs of texts."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec

from slipstream.front.pooling_calls import score
from slipstream.front.served import SCORING
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.pooling.fields import PoolFields, PoolUsage, pooling_params, size_of
from slipstream.serve.http.pooling.run import activation, choose, run
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import post

Texts = str | list[str]
_ONE = msgspec.Meta(description="one text, or as many as text_2 has")
_OTHER = msgspec.Meta(description="another name of text_1 or text_2")


class ScoreRequest(PoolFields, kw_only=True, forbid_unknown_fields=True):
    """Two lists of texts, under one of three pairs of names."""

    text_1: Annotated[Texts | None, _ONE] = None
    text_2: Texts | None = None
    data_1: Annotated[Texts | None, _OTHER] = None
    data_2: Annotated[Texts | None, _OTHER] = None
    queries: Annotated[Texts | None, _OTHER] = None
    documents: Annotated[Texts | None, _OTHER] = None
    instruction: Annotated[str | None, msgspec.Meta(description="for models that take one")] = None
    activation: Annotated[
        bool | None, msgspec.Meta(description="probabilities instead of raw scores; default true")
    ] = None
    use_activation: Annotated[bool | None, msgspec.Meta(description="another name of activation")] = None


class ScoreObject(msgspec.Struct):
    index: int
    object: str
    score: float


class ScoreResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[ScoreObject]
    usage: PoolUsage


_NAMES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))


async def create_score(request: Request, body: ScoreRequest) -> Response:
    chosen = choose(request, body.model, *SCORING, "classify")
    first, second = _sides(request, body)
    request.check_count(max(len(first), len(second)), "texts")
    given = {"activation": body.activation, "use_activation": body.use_activation}
    own = activation(chosen.reads_pairs, f"{chosen.name} compares vectors", **given)
    params = pooling_params(request, body, chosen.inputs.pooling, **own)
    pooling_call = score(chosen.inputs, first, second, params, instruction=body.instruction)
    found, num_tokens = await run(request, chosen, pooling_call, size_of(first) + size_of(second))
    data = [ScoreObject(index, "score", one.outputs.score) for index, one in enumerate(found)]
    usage = PoolUsage(num_tokens, num_tokens)
    return json_response(ScoreResponse(f"score-{request.id}", "list", int(time.time()), chosen.name, data, usage))


def _sides(request: Request, body: ScoreRequest) -> tuple[list[str], list[str]]:
    given = [pair for pair in _NAMES if getattr(body, pair[0]) is not None or getattr(body, pair[1]) is not None]
    if len(given) != 1:
        raise bad_request("give text_1 and text_2, and no other pair of texts", "text_1")
    sides = []
    request.set_input_field(given[0][0])
    for name in given[0]:
        texts = getattr(body, name)
        texts = [texts] if isinstance(texts, str) else texts
        if not texts:
            raise bad_request(f"{name} is empty; give a text or a list of them", name)
        sides.append(texts)
    return sides[0], sides[1]


ROUTES = [
    post(path, create_score, "Score pairs of texts", ScoreRequest, response_model=ScoreResponse)
    for path in ("/score", "/v1/score")
]
