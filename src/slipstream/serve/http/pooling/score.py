"""POST /score and /v1/score, in vLLM's words: how well texts go together."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec

from slipstream.frontend.pooling.calls import score
from slipstream.frontend.served import SCORING
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.pooling.fields import PoolFields, PoolUsage, pooling_params, size_of
from slipstream.serve.http.pooling.run import activation, choose, run
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import post

Texts = str | list[str]
_ONE = msgspec.Meta(description="one text for all of the others, or as many as there are others")
_OTHER = msgspec.Meta(description="another name")


class ScoreRequest(PoolFields, kw_only=True, forbid_unknown_fields=True):
    """Two sides, under one of three pairs of names."""

    text_1: Annotated[Texts | None, _ONE] = None
    text_2: Texts | None = None
    data_1: Annotated[Texts | None, _OTHER] = None
    data_2: Annotated[Texts | None, _OTHER] = None
    queries: Annotated[Texts | None, _OTHER] = None
    documents: Annotated[Texts | None, _OTHER] = None
    instruction: Annotated[str | None, msgspec.Meta(description="for models that take one")] = None
    activation: Annotated[bool | None, msgspec.Meta(description="probabilities or raw scores")] = None
    use_activation: Annotated[bool | None, msgspec.Meta(description="the same")] = None


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


async def create_score(call: Call, body: ScoreRequest) -> Reply:
    chosen = choose(call, body.model, *SCORING, "classify")
    first, second = _sides(call, body)
    call.check_count(max(len(first), len(second)), "texts")
    said = {"activation": body.activation, "use_activation": body.use_activation}
    own = activation(chosen.reads_pairs, f"{chosen.name} compares vectors", **said)
    params = pooling_params(call, body, chosen.inputs.pooling, **own)
    verb = score(chosen.inputs, first, second, params, instruction=body.instruction)
    found, num_tokens = await run(call, chosen, verb, size_of(first) + size_of(second))
    data = [ScoreObject(index, "score", one.outputs.score) for index, one in enumerate(found)]
    usage = PoolUsage(num_tokens, num_tokens)
    return json_reply(ScoreResponse(f"score-{call.id}", "list", int(time.time()), chosen.name, data, usage))


def _sides(call: Call, body: ScoreRequest) -> tuple[list[str], list[str]]:
    given = [pair for pair in _NAMES if getattr(body, pair[0]) is not None or getattr(body, pair[1]) is not None]
    if len(given) != 1:
        raise bad_request("give text_1 and text_2, and no other pair of texts", "text_1")
    sides = []
    call.reads(given[0][0])
    for name in given[0]:
        texts = getattr(body, name)
        texts = [texts] if isinstance(texts, str) else texts
        if not texts:
            raise bad_request(f"{name} is empty; give a text or a list of them", name)
        sides.append(texts)
    return sides[0], sides[1]


ROUTES = [
    post(path, create_score, "How well texts go together", ScoreRequest, answer=ScoreResponse)
    for path in ("/score", "/v1/score")
]
