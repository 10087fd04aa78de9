"""Random bodies: the response is never a 5xx."""

from __future__ import annotations

import asyncio
import json
from functools import cache

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.asgi import check_error
from serve.fuzzed_door import fuzzed_door
from serve.samples import SAMPLES
from slipstream.serve.http.pooling.tei import EmbedRequest
from slipstream.serve.http.table import all_routes


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def door(runner, tmp_path_factory):
    with fuzzed_door(runner, tmp_path_factory.mktemp("tokenizer")) as door:
        yield door


ROUTES = [route for route in all_routes() if route.body is not None and route.access != "admin"]
TEI_FIELDS = (*EmbedRequest.__struct_fields__, "query", "texts", "raw_scores", "return_text")  # what / takes
plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20)
anything = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
likely = st.sampled_from(
    [0, 1, 2, -1, 0.5, True, False, None, "", "x", "hello", [], {}, [1, 2], ["a", "b"], [[1], [2]]]
)
parts = st.lists(
    st.fixed_dictionaries({}, optional={"type": st.just("text") | likely, "text": likely | anything}) | likely,
    max_size=3,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", ""]), "content": likely | anything | parts}
    ),
    max_size=3,
)
texts = likely | st.text(max_size=10) | st.lists(st.text(max_size=10), max_size=3)
usual = dict.fromkeys(("prompt", "tokens", "input", "inputs", "query", "documents", "texts", "text_1"), texts)
usual |= {"messages": messages, "text_2": texts}


@cache  # a strategy is validated once, which takes longer than a draw
def some_fields(names):
    return st.dictionaries(st.sampled_from(names), likely | anything, max_size=5)


@cache
def required_fields(body):
    return [field.encode_name for field in msgspec.structs.fields(body) if field.required]


@st.composite
def bodies(draw, route):
    names = tuple(getattr(route.body, "__struct_fields__", TEI_FIELDS))
    body = draw(some_fields(names))
    for name, value in usual.items():
        if name in names and draw(st.integers(0, 9)):
            body[name] = draw(value)
    for name in required_fields(route.body) if route.path != "/" else ():
        if name not in body and draw(st.integers(0, 9)):
            body[name] = SAMPLES[route.path][name]
    return body


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_any_body_gets_an_answer_in_our_shape(runner, door, route, data):
    body = data.draw(bodies(route))
    exchange = runner.run(door.post(route.path, json.dumps(body).encode()))
    assert 200 <= exchange.status < 500, (body, exchange.body)
    if exchange.status != 200:
        check_error(exchange, route)
        if route.error_model is None and "error_type" not in exchange.json():
            error = exchange.json()["error"]
            # infinity is no JSON; all else is about some field
            assert error["param"] or "not JSON" in error["message"], error
    else:
        exchange.parsed()


@given(body=st.binary(max_size=60))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_any_bytes_get_a_400(runner, door, body):
    exchange = runner.run(door.post("/v1/completions", body))
    assert exchange.status == 400 and exchange.error
