"""Values that only Python has, in every field of a request: the caller gets an error, or the core gets the request.

Over a socket, where a value that cannot be encoded once kept every later message from being sent.
"""

from __future__ import annotations

import asyncio
import decimal
import fractions

import numpy as np
import pytest

from patience import PATIENCE
from scripted_core import EVERY_TASK, TEXT, ScriptedCore, facts
from slipstream import PoolingParams, SamplingParams
from slipstream.base.errors import EngineDead, SlipstreamError
from tiny_tokenizer import write_byte_tokenizer

ODD = [
    "\ud800", ["\ud800"], {"\ud800": 1.0}, b"a", [b"a"], bytearray(b"a"), "\0",
    2**63, 2**64, -(2**70), [2**70], {2**70: 1.0}, {1: 1e400}, True, [True], 1e308, float("nan"), float("inf"), -0.0,
    np.float64(0.5), np.float32("nan"), np.int64(3), np.uint64(2**64 - 1), np.bool_(True), np.array([1, 2]),
    np.array(1.5), np.array(["a"]), [np.int32(1)], {np.int64(1): np.float16(1)},
    decimal.Decimal("0.5"), fractions.Fraction(1, 2), 1j, {1, 2}, frozenset(["a"]), (1, (2,)), range(3), iter([1]),
    object(), SamplingParams, ..., [None], {None: None}, [[]],
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


def show(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:60]


@pytest.mark.parametrize("kind", [SamplingParams, PoolingParams])
def test_no_value_of_a_field_keeps_later_requests_from_being_served(folder, kind):
    of_call = ["prompt", "caller", "request_id", "priority", "cache_salt", "model"]
    fields = [*kind.__struct_fields__, *(of_call if kind is SamplingParams else of_call[:2])]

    async def ask(engine, field, value):
        is_param = field in kind.__struct_fields__ and not (kind is SamplingParams and field in of_call)
        given = {"prompt": "a", "model": "one"} | ({} if is_param else {field: value})
        if kind is SamplingParams:
            params = SamplingParams(**({field: value} if is_param else {}))
            async for _ in engine.generate(given.pop("prompt"), params, **given):
                pass
        else:
            params = PoolingParams(**({"task": "embed"} | ({field: value} if is_param else {})))
            await engine.encode([given.pop("prompt")], params, **given | {"model": "two"})

    async def scenario():
        engine, core = await ScriptedCore.open(facts(folder, "one"), facts(folder, "two", pooling=EVERY_TASK))
        num_refused, num_served, left, failures = 0, 0, 0, []
        try:
            for field in fields:
                for value in ODD:
                    try:
                        await asyncio.wait_for(ask(engine, field, value), PATIENCE)
                        num_served += 1
                    except EngineDead:
                        raise
                    except SlipstreamError:
                        num_refused += 1
                    except Exception as error:
                        failures.append(f"{field} = {show(value)}: {type(error).__name__}: {error}")
                    if engine._requests or engine.load.num_open > left:
                        left = engine.load.num_open
                        failures.append(f"{field} = {show(value)}: something is still open")
                async for result in engine.generate("a", SamplingParams(max_tokens=len(TEXT)), model="one"):
                    final = result
                assert final.finished, field
        finally:
            await engine.close()
        assert not failures, "\n".join(failures)
        return num_refused, num_served

    num_refused, num_served = asyncio.run(scenario())
    assert num_refused > 300 and num_served > 10
