"""PoolingParams are validated at construction and can be serialized."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from slipstream.base.errors import InvalidParams
from slipstream.contracts.messages import Abort, Output, Pooled, Submit
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams

BAD = [
    (dict(task="translate"), "task is 'translate'; give one of embed, classify"),
    (dict(dimensions=0), "dimensions is 0; give 1 to"),
    (dict(dimensions=True), "give a whole number"),
    (dict(normalize=1), "normalize is 1; give True, False or None"),
    (dict(activation=True, use_activation=False), "which mean the same; leave one out"),
    (dict(truncate_prompt_tokens=0), "leaves no prompt"),
    (dict(truncation_side="middle"), "give right, left or never"),
    (dict(step_tag_id=-1), "step_tag_id is -1"),
    (dict(returned_token_ids=[-1]), "token ids are whole numbers"),
    (dict(query_uses=2), "there is no query_key"),
    (dict(query_key="q", task="embed"), "late interaction compares token vectors"),
    (dict(query_key=3), "query_key is 3"),
    (dict(priority="high"), "priority is 'high'"),
    (dict(cache_salt=None), "cache_salt is None"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_value_fails_where_it_is_built(fields, message):
    with pytest.raises(InvalidParams, match=message):
        PoolingParams(**fields)


def test_use_activation_is_another_name():
    for given in (dict(activation=False), dict(use_activation=False), dict(activation=False, use_activation=False)):
        assert PoolingParams(**given).activation is PoolingParams(**given).use_activation is False
    assert PoolingParams(use_activation=False).with_changes(activation=True).use_activation is True
    assert PoolingParams(activation=True).with_changes(use_activation=None).activation is None


def test_late_interaction_has_two_sides():
    query, document = PoolingParams(query_key="q", query_uses=3), PoolingParams(query_key="q")
    assert (query.is_query, query.is_document) == (True, False)
    assert (document.is_query, document.is_document) == (False, True)
    assert not PoolingParams().is_query and not PoolingParams().is_document


@pytest.mark.parametrize("params", [PoolingParams(task="embed", returned_token_ids=[4, 2]), SamplingParams(stop=["x"])])
def test_both_kinds_of_parameters_cross_the_wire(params):
    message = Submit("a", [1, 2], params, 0.0, type_start=1)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit | Abort)
    assert decoded == message and type(decoded.params) is type(params)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (0, 4), (0,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_cross_the_wire(shape, dtype):
    array = np.arange(12, dtype=dtype)[: int(np.prod(shape))].reshape(shape)
    output = Output("a", 0, [], pooled=Pooled.of(array))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=Output)
    for one in (output, decoded):
        assert one.pooled.array().dtype == dtype and np.array_equal(one.pooled.array(), array)
