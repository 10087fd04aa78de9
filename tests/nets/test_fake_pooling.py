"""The FakeTensor net over pooling: every method and task, chunked or whole, kept queries and their documents."""

from __future__ import annotations

import pytest
from fake_mode import NO_VALUES
from torch._subclasses.fake_tensor import DataDependentOutputException

from pool_bench import PoolBench, write_reward_model
from slipstream.contracts.step import StepResult
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder


def of(task, **others):
    return PoolingParams(task=task, **others)


EMBED = [of("embed"), of("embed", normalize=False), of("embed", dimensions=5)]
SKIPPED = [of("embed", skip_tokens=5), of("embed", skip_tokens=50, normalize=False)]  # some tokens, and all
TOKENS = [of("token_embed"), of("token_embed", dimensions=3, normalize=False)]
LATE = [of("token_embed", query_key="q", query_uses=2), *[of("token_embed", query_key="q")] * 2]
CLASSES = [of("classify"), of("classify", activation=False)]
STEPS = [of("token_classify"), of("token_classify", step_tag_id=9, returned_token_ids=[1, 0])]
GENERATE = [SamplingParams(temperature=0.7, max_tokens=6, logprobs=1)]
# family, architecture, requests
MODELS = {
    "first": ("llama", dict(pooling_type="first"), EMBED + TOKENS),
    "last": ("llama", dict(pooling_type="last"), EMBED + TOKENS),
    "mean": ("llama", dict(pooling_type="mean"), EMBED + TOKENS),
    "all sums": ("llama", dict(pooling_type="max+weightedmean+mean_sqrt_len+first+last"), SKIPPED + EMBED + TOKENS),
    "last, skipped": ("llama", dict(pooling_type="last"), SKIPPED + EMBED),
    "encoder, all sums": ("bert Model", dict(pooling_type="max+weightedmean+first+last"), SKIPPED + EMBED),
    "beside generation": ("llama", dict(pooling_type="mean"), GENERATE + EMBED + GENERATE + TOKENS),
    "late": ("llama", {}, LATE + EMBED),
    "encoder": ("bert Model", {}, EMBED + TOKENS + EMBED),
    "encoder, one kind": ("bert Model", {}, EMBED[:1] * 4),
    "encoder, late": ("bert Model", {}, LATE + TOKENS),
    "classes": ("bert ForSequenceClassification", {}, CLASSES),
    "token classes": ("modernbert ForTokenClassification", {}, STEPS),
    "sparse": ("bert ForMaskedLM", {}, [of("sparse")] * 2),
}


def drive(tmp_path, family, options, params, break_runner=None) -> int:
    """Run an engine whose device has no values. Returns the number of steps."""
    name, _, task = family.partition(" ")
    folder = write_tiny_encoder(tmp_path, name, task) if task else write_tiny(tmp_path, name, num_hidden_layers=1)
    small = dict(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64 if not task else 20, num_pages=64)
    with PoolBench(folder, dtype="float32", **small, **options) as bench:
        core, runner = bench.core, bench.core.executor
        if break_runner is not None:
            break_runner(runner)
        has_types = bench.core.config.model.pooling.has_types
        for i, one in enumerate(params):
            bench.submit(range(3 + i, 14 + i), one, type_start=4 if has_types and i % 2 else None)
        steps = 0
        with NO_VALUES:
            while (plan := core.scheduler.plan()) is not None:
                runner.launch(plan)
                result = runner.finish().wait()  # the buffer's memory, which nothing wrote
                core.scheduler.commit(
                    StepResult(result.tokens * 0 + 5, result.failed & False, result.logprobs, None, result.pooled)
                )
                steps += 1
        assert not core.scheduler.has_requests()
        return steps


@pytest.mark.parametrize("name", MODELS)
def test_no_step_looks_at_a_value(tmp_path, name):
    family, options, params = MODELS[name]
    assert drive(tmp_path, family, options, params) > 0


def test_a_planted_look_at_a_value_is_caught(tmp_path):
    def plant(runner):
        keep = runner.heads[-1].token_vectors.queries.keep
        runner.heads[-1].token_vectors.queries.keep = lambda vectors, *rest: (
            bool(vectors.sum() > 0),
            keep(vectors, *rest),
        )

    with pytest.raises(DataDependentOutputException):
        drive(tmp_path, "llama", {}, LATE, plant)


def test_no_step_of_a_reward_model_looks_at_a_value(tmp_path):
    """A causal model with scores for each token, whose prompts are cut."""
    with PoolBench(write_reward_model(tmp_path), max_num_batched_tokens=8) as bench:
        for one in STEPS:
            bench.submit([9, *range(20), 9, 9], one)
        with NO_VALUES:
            while (plan := bench.core.scheduler.plan()) is not None:
                bench.core.executor.launch(plan)
                bench.core.scheduler.commit(bench.core.executor.finish().wait())
