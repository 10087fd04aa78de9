"""Which steps compute the last layer for each row's last token only; results are the same either way."""

from __future__ import annotations

import pytest
import torch

from law7 import PROMPTS
from pool_bench import PoolBench, assert_same
from replay_device import PaddedAttention, ReplayDevice, tensors_in
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

GENERATE = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
EMBED, TOKENS = PoolingParams(task="embed"), PoolingParams(task="token_embed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def count_steps(bench):
    """For each step: its rows, its tokens, and how many of them pass through the last MLP."""
    runner, steps = bench.core.executor, []
    launch, mlp = runner.launch, runner.model.layers[-1].mlp
    after_norm = mlp.after_norm

    def counted(norm, x, *others):
        steps[-1].append(len(x))
        return after_norm(norm, x, *others)

    runner.launch = lambda plan: (steps.append([len(plan.rows), plan.total_tokens]), launch(plan))
    mlp.after_norm = counted
    return steps


@pytest.mark.parametrize(
    ("method", "params", "is_last"),
    [
        ("last", [GENERATE, GENERATE, GENERATE], True),
        ("last", [GENERATE, SCORED, GENERATE], False),
        ("last", [EMBED, EMBED, EMBED], True),
        ("last", [EMBED, EMBED.with_changes(dimensions=9), GENERATE], True),
        ("last", [EMBED, TOKENS, GENERATE], False),
        ("last", [TOKENS, TOKENS, TOKENS], False),
        ("mean", [EMBED, EMBED, GENERATE], False),
        ("first", [EMBED, EMBED, EMBED], False),
        ("mean", [GENERATE, GENERATE, GENERATE], True),
    ],
)
@pytest.mark.parametrize("max_tokens", [512, 16], ids=["whole", "chunked"])
def test_only_hidden_states_that_are_read_are_computed(folder, method, params, is_last, max_tokens):
    prompts = [[5] * 9, [6] * 20, [7] * 14]
    with PoolBench(folder, pooling_type=method, max_num_batched_tokens=max_tokens) as bench:
        steps = count_steps(bench)
        bench.pool(prompts, params)
    chunks = [step for step in steps if step[1] > step[0]]
    assert len(chunks) == (1 if max_tokens == 512 else 3)
    alone = [rows == computed for rows, _, computed in chunks]
    everything = [tokens == computed for _, tokens, computed in chunks]
    assert all(one or all_of_it for one, all_of_it in zip(alone, everything, strict=True))
    if max_tokens == 512 or is_last:
        assert alone == [is_last] * len(chunks)
    else:  # one that reads all may come later, or be gone
        assert any(everything)


def test_no_hidden_state_of_an_unfinished_prompt_is_read(folder):
    """Only the step that ends a prompt reads one."""
    with PoolBench(folder, max_num_batched_tokens=16) as bench:
        steps = count_steps(bench)
        bench.pool([list(range(60))], [GENERATE])
    assert steps[:4] == [[1, 16, 1], [1, 16, 1], [1, 16, 1], [1, 12, 1]]


def test_models_without_a_cache_compute_all_hidden_states(tmp_path):
    with PoolBench(write_tiny_encoder(tmp_path, "bert", "Model"), pooling_type="first") as bench:
        assert not bench.core.executor._reads_only_last(_plan_of(bench, [[5, 6, 7], [8, 9]]))


def _plan_of(bench, prompts):
    for prompt in prompts:
        bench.submit(prompt, EMBED)
    return bench.core.scheduler.plan()


MIXES = {
    "generated": [GENERATE] * len(PROMPTS),
    "pooled": [EMBED] * len(PROMPTS),
    "both": [GENERATE, EMBED, GENERATE, EMBED, EMBED.with_changes(dimensions=9), GENERATE],
    "some of all tokens": [GENERATE, EMBED, SCORED, TOKENS, EMBED, GENERATE],
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_padded_steps_with_chunks_give_the_same(folder, mix, depth):
    """As a GPU captures them: one kind of step is replayed at addresses that another kind does not write."""
    options = dict(pooling_type="last", max_num_seqs=8, enable_prefix_caching=False)
    params = MIXES[mix]
    with PoolBench(folder, **options) as bench:
        wanted = [bench.pool([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    device = ReplayDevice(depth)
    with PoolBench(folder, **options, max_num_batched_tokens=23, depth=depth, device=device) as bench:
        runner = bench.core.executor
        runner.attention = PaddedAttention(runner.attention.groups, torch.float64)
        for _ in range(4):  # kernel by kernel, captured, replayed
            assert_same(bench.pool(PROMPTS, params), wanted)
            assert_same(bench.pool(PROMPTS[:3], params[:3]), wanted[:3])
        captured = [key for key, entry in runner.graphs._captured.items() if entry is not None]
        kinds = {only_last for part, size, only_last, *_ in captured if part == "forward" and not size.is_single}
        assert kinds == ({True, False} if "all" in mix else {True})
        assert device.num_replays > 20
        # graphs keep lengths, and what steps of single tokens leave; all else is in the same place whatever the step
        kept = storages_of(entry[1] for entry in runner.graphs._captured.values() if entry is not None)
        shared = storages_of([runner.ring.arena, runner.graphs.hidden._memory, runner.graphs.results._memory])
        sizes = [size for part, size, *_ in captured if part == "forward"]
        numbers = sum(size.rows * (1 + size.is_single * runner.model.shape.hidden_size) for size in sizes)
        assert sum(size for place, size in kept.items() if place not in shared) == numbers * 8


def storages_of(tensors):
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(list(tensors))
    }
