"""The values of logprobs_mode, against the stages in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_harness import GREEDY, Harness, admission, make_plan, penalized, truncated

from slipstream.params.sampling import SamplingParams

VOCAB, K = 40, 6
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
PENALIZED = SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.3)
SAMPLED = SamplingParams(temperature=2.5, top_k=5, top_p=0.9, min_p=0.01)


def _expected(mode, logits):
    processed = [penalized(logits[0], (1, 2), (), PENALIZED), truncated(logits[1], SAMPLED), logits[2]]
    values = np.stack(processed) if mode.startswith("processed") else logits
    return values if mode.endswith("logits") else values - np.log(np.exp(values).sum(-1, keepdims=True))


@pytest.mark.parametrize("mode", MODES)
def test_reported_values(mode):
    logits = np.random.default_rng(3).normal(size=(3, VOCAB)) * 3
    requested = GREEDY.with_changes(logprob_token_ids=[5, 0, 39])
    admitted = [admission(row, params, seed=row) for row, params in enumerate((PENALIZED, SAMPLED, requested))]
    out = Harness(4, VOCAB, logprobs_mode=mode).step([0, 1, 2], [2] * 3, logits, admitted, num_logprobs=K)
    expected = _expected(mode, logits)
    chosen = expected[np.arange(3), out.tokens.numpy()]
    np.testing.assert_allclose(out.logprobs.chosen.numpy(), chosen, rtol=1e-12)
    assert out.logprobs.rank.tolist() == [int((expected[row] >= chosen[row]).sum()) for row in range(3)]
    ids = out.logprobs.top_ids.numpy()
    np.testing.assert_allclose(out.logprobs.top.numpy(), np.take_along_axis(expected, ids, -1), rtol=1e-12)
    np.testing.assert_allclose(out.logprobs.top.numpy(), -np.sort(-expected, -1)[:, :K], rtol=1e-12)
    np.testing.assert_allclose(out.requested.numpy(), expected[2:, [5, 0, 39]], rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_head_reports_processed_values_only_where_they_are_the_raw_ones(mode):
    harness = Harness(4, VOCAB, logprobs_mode=mode)
    sampler = harness.sampler
    sampler.apply(make_plan([0, 1], [admission(0, GREEDY), admission(1, SAMPLED)], num_logprobs=2))

    def is_captured(rows, num_logprobs=None):
        return sampler.prepare(make_plan(rows, num_logprobs=num_logprobs), capture=True).key is not None

    assert is_captured([0], 2) and is_captured([0, 1])
    assert is_captured([0, 1], 2) == mode.startswith("raw")
