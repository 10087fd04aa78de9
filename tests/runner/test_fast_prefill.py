"""KV-sharing fast prefill: trailing layers that only read the cache of earlier layers run for the last tokens alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from law7 import PROMPTS
from pool_bench import PoolBench, assert_same
from replay_device import PaddedAttention, ReplayDevice
from slipstream.nn import chains
from slipstream.nn.chains import CudaChain
from slipstream.nn.shapes import tail_of
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from tiny_sites import write_sites

GENERATE = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=2)
EMBED, TOKENS = PoolingParams(task="embed"), PoolingParams(task="token_embed")


@pytest.fixture(params=["shared", "mixed", "sinks"])
def folder(request, tmp_path, monkeypatch):
    """Four layers, of which the last two, or the last, read sites of others."""
    return write_sites(tmp_path, request.param, monkeypatch)


def count_rows(layers):
    """By layer, the rows of the inputs of its attention, step by step."""
    seen = [[] for _ in layers]
    for rows, block in zip(seen, layers, strict=True):
        multiply = block.attention.qkv.after_norm

        def counted(norm, x, *others, rows=rows, multiply=multiply):
            rows.append(len(x))
            return multiply(norm, x, *others)

        block.attention.qkv.after_norm = counted
    return seen


def test_layers_of_the_tail_run_on_rows_instead_of_tokens(folder):
    model = load(folder, torch.float64)
    tail = tail_of(model.shape.layers)
    assert tail in (2, 3) and model.tail == tail
    seen = count_rows(model.layers)
    runner = HandRunner(model, torch.float64)
    chunks = {"a": [5], "b": [6] * 9, "c": [7] * 30}
    hidden = model(runner.context(runner.batch(chunks), only_last=True))
    assert hidden.shape == (3, 64)
    assert seen == [[40]] * tail + [[3]] * (4 - tail)
    expected = model(runner.context(HandRunner(model, torch.float64).batch(chunks)))  # all tokens
    assert seen[-1] == [3, 40]
    torch.testing.assert_close(hidden, expected[[0, 9, 39]], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("params", "is_fast"),
    [
        ([GENERATE, GENERATE, GENERATE], True),
        ([EMBED, GENERATE, EMBED], True),
        ([GENERATE, SCORED, GENERATE], False),
        ([EMBED, TOKENS, GENERATE], False),
    ],
)
def test_it_is_off_by_itself_where_all_tokens_are_read(folder, params, is_fast):
    prompts = [[5] * 9, [6] * 20, [7] * 14]
    with PoolBench(folder, pooling_type="last") as bench:
        seen = count_rows(bench.core.executor.model.layers)
        bench.pool(prompts, params)
    assert seen[0][0] == 43 and seen[-1][0] == (3 if is_fast else 43)
    assert all(rows[0] == 43 for rows in seen[:2])


def test_results_are_the_same_with_and_without(folder, monkeypatch):
    params = [GENERATE, EMBED, GENERATE, EMBED, GENERATE, GENERATE]
    options = dict(pooling_type="last", max_num_seqs=8, max_num_batched_tokens=23)
    with PoolBench(folder, **options) as bench:
        found = [bench.pool(PROMPTS, params) for _ in range(2)]  # the second time from the prefix cache
    with PoolBench(folder, **options) as bench:
        monkeypatch.setattr(bench.core.executor, "_reads_only_last", lambda plan: False)
        wanted = bench.pool(PROMPTS, params)
    for results in found:
        assert_same(results, wanted)


@pytest.mark.parametrize("depth", [0, 2])
def test_padded_and_replayed_steps_give_the_same(folder, depth):
    """As a GPU captures them. Padding rows take the last token of the step, whatever earlier steps left there."""
    options = dict(max_num_seqs=8, enable_prefix_caching=False)
    with PoolBench(folder, **options) as bench:
        wanted = [bench.pool([prompt], GENERATE)[0] for prompt in PROMPTS]
    device = ReplayDevice(depth)
    with PoolBench(folder, **options, max_num_batched_tokens=23, depth=depth, device=device) as bench:
        runner = bench.core.executor
        runner.attention = PaddedAttention(runner.attention.groups, torch.float64)
        for _ in range(4):
            assert_same(bench.pool(PROMPTS, GENERATE), wanted)
        assert device.num_replays > 10


def test_places_of_padding_rows_are_the_last_token():
    """A padded step has more rows than requests: their first token is T, so their last is T - 1."""
    from slipstream.nn.context import BatchView, ForwardContext

    ints = torch.zeros(8, dtype=torch.int64)
    batch = BatchView(
        ids=ints, positions=ints, lengths=ints[:4], slots=(), page_tables=(), num_tokens=np.ones(4, np.int32),
        max_lengths=np.ones(4, np.int32), num_single=0, query_starts=torch.tensor([0, 5, 8, 8, 8], dtype=torch.int32),
    )  # fmt: skip
    context = ForwardContext(batch, None, None, [], ())
    assert context.last_indices().tolist() == [4, 7, 7, 7]


def test_a_chain_steps_aside_for_it(folder, monkeypatch):
    model = load(folder, torch.float64)
    chain = CudaChain.of(list(model.layers), model.norm)
    assert chain is not None and chain.has_tail
    monkeypatch.setattr(chains, "choose_chain", lambda x, weights, is_streaming: "library")
    runner = HandRunner(model, torch.float64)
    context = runner.context(runner.batch({"a": [5] * 4, "b": [6] * 9}), only_last=True)
    x = torch.zeros(13, 64, dtype=torch.float64)
    assert chain.run(x, context) is None and not x.any()
