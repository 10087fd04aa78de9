"""Each request gets the logprobs it asked for, whatever other requests want."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.contracts.messages import LOGPROB
from slipstream.contracts.request import Request
from slipstream.contracts.step import StepLogprobs, StepResult
from slipstream.params.sampling import MAX_PACKED_LOGPROBS, SamplingParams
from slipstream.scheduler.outputs import accepted_tokens, logprob_bytes, packed_logprobs


def logprobs_of(num_rows: int, k: int, dtype: type = np.float32, requested: np.ndarray | None = None) -> StepLogprobs:
    rng = np.random.default_rng(k)
    return StepLogprobs(
        chosen=-rng.random(num_rows).astype(dtype),
        rank=rng.integers(1, 99, num_rows),
        top_ids=rng.integers(0, 9999, (num_rows, k)),
        top=-rng.random((num_rows, k)).astype(dtype),
        requested=requested,
    )


def step(num_rows: int, k: int, requested: np.ndarray | None = None) -> StepResult:
    return of(logprobs_of(num_rows, k, requested=requested))


def of(logprobs: StepLogprobs) -> StepResult:
    num_rows = len(logprobs.chosen)
    return StepResult(np.arange(7, 7 + num_rows, dtype=np.int32), np.zeros(num_rows, np.bool_), logprobs)


def request(**params: object) -> Request:
    return Request("r", [1], SamplingParams(**params), max_length=9)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "wanted", [[5] * 7, [0], [None, 0, 2, 40, None, 33, 5, 40, 100], [None, 3], [1, 2, 3], [100] * 2 + [0], [40] * 3]
)
def test_each_row_gets_the_logprobs_it_asked_for(wanted, dtype):
    long = [i for i, k in enumerate(wanted) if k is not None and k > MAX_PACKED_LOGPROBS]
    short = max(k or 0 for i, k in enumerate(wanted) if i not in long) if len(long) < len(wanted) else 0
    apart = logprobs_of(len(long), max(wanted[i] for i in long), dtype) if long else None
    result = of(replace(logprobs_of(len(wanted), short, dtype), wide=apart))
    packed = packed_logprobs([request(logprobs=k) for k in wanted], result)
    for i, (k, values) in enumerate(zip(wanted, packed, strict=True)):
        if k is None:
            assert values is None
            continue
        told, at = (apart, long.index(i)) if i in long else (result.logprobs, i)
        top = zip(told.top[at, :k].tolist(), told.top_ids[at, :k].tolist(), range(1, k + 1), strict=True)
        own = told.chosen[at].item(), result.tokens[i].item(), told.rank[at].item()
        assert np.frombuffer(values, LOGPROB).tolist() == [own, *top]


def test_requested_ids_follow_without_a_rank():
    asked = [request(logprobs=1, logprob_token_ids=[7]), request(), request(logprob_token_ids=[9, 4, 11])]
    requested = -np.arange(6.0).reshape(2, 3)
    with_top, silent, alone = packed_logprobs(asked, step(3, 1, requested=requested))
    assert silent is None
    assert np.frombuffer(with_top, LOGPROB).tolist()[2:] == [(0.0, 7, 0)]
    assert np.frombuffer(alone, LOGPROB).tolist()[1:] == [(-3.0, 9, 0), (-4.0, 4, 0), (-5.0, 11, 0)]


def test_a_report_holds_no_reference_to_the_step():
    result = step(64, 5)
    for own in packed_logprobs([request(logprobs=5)] * 64, result):
        assert type(own) is bytes and len(own) == 6 * LOGPROB.itemsize


def test_only_accepted_tokens_are_reported():
    asked = [request(logprobs=1), request(), request(logprobs=2, logprob_token_ids=[4])]
    requested = -np.arange(3.0).reshape(3, 1)
    result = replace(step(7, 2, requested=requested), counts=np.array([2, 1, 2], np.int32))
    first, silent, last = packed_logprobs(asked, result, [3, 1, 3])
    assert silent is None
    assert np.frombuffer(first, LOGPROB)["token"].reshape(2, 2)[:, 0].tolist() == [7, 8]
    own = np.frombuffer(last, LOGPROB).reshape(2, 4)
    assert own["token"][:, 0].tolist() == [11, 12] and own["logprob"][:, 3].tolist() == [0.0, -1.0]
    assert own.nbytes == 2 * logprob_bytes(asked[2])


def test_a_row_that_failed_keeps_what_it_drew_before():
    failed = np.array([False, True, True])
    one_each = StepResult(np.array([5, 6, 7], np.int32), failed)
    assert accepted_tokens(one_each, None, 3) == [[5], [], []]
    several = StepResult(np.arange(7, dtype=np.int32), failed, counts=np.array([1, 2, 0], np.int32))
    assert accepted_tokens(several, [3, 3, 1], 3) == [[0], [3, 4], []]
