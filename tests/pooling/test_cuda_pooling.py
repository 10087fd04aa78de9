"""Pooling on a GPU: replayed or eager, ahead or not, whole or in chunks: the CPU's values, without waiting."""

from __future__ import annotations

import pytest

from pool_bench import PoolBench, assert_same, write_reward_model
from slipstream.device.sync_check import watch
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

pytestmark = pytest.mark.cuda

PROMPTS = [[i + 3, *range(20, 20 + 7 * i), i + 5] for i in range(8)]
OPTIONS = dict(dtype="float32", page_size=16, max_num_seqs=8)
EMBED = PoolingParams(task="embed")
MIXED = [
    EMBED,
    PoolingParams(task="token_embed"),
    PoolingParams(task="embed", dimensions=10),
    PoolingParams(task="embed", normalize=False, skip_tokens=3),
    PoolingParams(task="token_embed", query_key="q", query_uses=2),
    PoolingParams(task="token_embed", query_key="q"),
    PoolingParams(task="token_embed", query_key="q"),
    EMBED,
]
GENERATE = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


MODELS = [
    "mean encoder", "first encoder", "max+weightedmean encoder", "last llama", "mean llama", "first llama",
    "weightedmean+max+last llama",
]  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    method, kind = request.param.split()
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    if kind == "encoder":
        path = write_tiny_encoder(folder, "bert", "Model", hidden_size=96)
    else:
        path = write_tiny(folder, "llama", hidden_size=256)
    return dict(folder=path, pooling_type=method, **OPTIONS), kind == "llama"


@pytest.mark.parametrize(
    "options",
    [dict(enforce_eager=True, depth=0), dict(depth=0), dict(depth=1), dict(depth=2, max_num_batched_tokens=40)],
    ids=["eager", "graphs", "ahead", "chunked"],
)
def test_numbers_are_those_of_the_cpu(model, options):
    given, generates = model
    params = [*MIXED[:7], GENERATE] if generates else MIXED
    with PoolBench(**given, device_kind="cpu") as bench:
        wanted, mixed = bench.pool(PROMPTS, EMBED), bench.pool(PROMPTS, params)
    with PoolBench(**given, **options, device_kind="cuda") as bench:
        for _ in range(3):  # eager, captured, replayed
            assert_same(bench.pool(PROMPTS, EMBED), wanted, 2e-4)
            assert_same(bench.pool(PROMPTS, params), mixed, 2e-3)


def test_steady_state_never_waits_outside_the_commit(model):
    given, generates = model
    params = [*MIXED[:7], GENERATE] if generates else MIXED
    with PoolBench(**given, device_kind="cuda", depth=2, max_num_batched_tokens=40) as bench:
        for _ in range(3):
            bench.pool(PROMPTS, EMBED), bench.pool(PROMPTS, params)
        with watch() as log:
            bench.pool(PROMPTS, EMBED), bench.pool(PROMPTS, params)
        assert not log.found, "\n".join(f"{sync.what} x{sync.count}\n{sync.stack}" for sync in log.found)


CLASSES = [PoolingParams(task="classify"), PoolingParams(task="classify", activation=False)]
TOKEN_CLASSES = [PoolingParams(task="token_classify"), PoolingParams(task="token_classify", activation=False)]
STEPS = [PoolingParams(task="token_classify"), PoolingParams(task="token_classify", returned_token_ids=[1])]
# what the model is, what is asked of it, and where the second text of a pair begins
HEADS = {
    "pairs": ("bert ForSequenceClassification", CLASSES, [None, 3, 8, None, 20, 1, 30, 49]),
    "classes": ("modernbert ForSequenceClassification", CLASSES, ()),
    "token classes": ("roberta ForTokenClassification", TOKEN_CLASSES, ()),
    "words": ("bert ForMaskedLM", [PoolingParams(task="sparse")] * 2, ()),
    "steps": ("reward", STEPS, ()),
}


@pytest.mark.parametrize("name", HEADS)
def test_every_head_gives_the_cpus_values_without_waiting(name, tmp_path):
    (family, *task), (alike, other), types = (HEADS[name][0].split(), *HEADS[name][1:])
    if family == "reward":
        folder = write_reward_model(tmp_path)
    else:
        folder = write_tiny_encoder(tmp_path, family, *task, hidden_size=96)
    mixed = [alike, other] * (len(PROMPTS) // 2)
    with PoolBench(folder, **OPTIONS, device_kind="cpu") as bench:
        wanted = bench.pool(PROMPTS, alike, types), bench.pool(PROMPTS, mixed, types)
    with PoolBench(folder, **OPTIONS, device_kind="cuda", depth=2, max_num_batched_tokens=64) as bench:
        for _ in range(3):  # eager, captured, replayed
            assert_same(bench.pool(PROMPTS, alike, types), wanted[0], 2e-3)
            assert_same(bench.pool(PROMPTS, mixed, types), wanted[1], 2e-3)
        with watch() as log:
            bench.pool(PROMPTS, alike, types), bench.pool(PROMPTS, mixed, types)
        assert not log.found, "\n".join(f"{sync.what} x{sync.count}\n{sync.stack}" for sync in log.found)
