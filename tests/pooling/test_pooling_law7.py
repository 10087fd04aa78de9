"""Scheduling never changes vectors (law 7), in float64: the same numbers alone or batched, chunked, cached, preempted,
ahead, or beside requests that generate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import law7
from delayed_device import DelayedDevice
from law7_engine import preempt_after
from pool_bench import PoolBench, assert_same, rewrite, write_reward_model
from slipstream.device.device import Device
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.runner.graphs import GraphPool
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

# also exactly the model's length, and one of them once more
PROMPTS = [*law7.PROMPTS, list(range(64)), law7.PROMPTS[1]]
EMBED, TOKENS = PoolingParams(task="embed"), PoolingParams(task="token_embed")
MIXED = [
    PoolingParams(task="embed", skip_tokens=2),
    TOKENS,
    PoolingParams(task="embed", dimensions=10, skip_tokens=13),
    PoolingParams(task="token_embed", normalize=False),
    PoolingParams(task="embed", normalize=False),
    PoolingParams(task="token_embed", dimensions=7),
    TOKENS,
    EMBED,
]
METHODS = ("last", "first", "mean", "max+weightedmean+last")


def make(folder, *, batched=True, chunked=False, cached=False, preempted=False, depth=0, late=False, **options):
    cell = dict(batched=batched, chunked=chunked, cached=cached, preempted=preempted, depth=depth)
    device = DelayedDevice(depth) if late else None
    return PoolBench(folder, **law7.options_of(few_pages=18, **cell), device=device, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A causal model with scores of three classes, by its last token."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama")
    score = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    facts = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    return rewrite(folder, facts, {"score.weight": score}, without=("lm_head.weight",))


KNOWN = {}  # results of requests that run alone: several tests compare with the same


def one_by_one(folder, params, **options):
    key = repr((folder, params, options))
    if key not in KNOWN:
        KNOWN[key] = run_one_by_one(folder, params, **options)
    return KNOWN[key]


def run_one_by_one(folder, params, **options):
    each = params if isinstance(params, list) else [params] * len(PROMPTS)
    with make(folder, batched=False, **options) as bench:
        return [bench.pool([prompt], own)[0] for prompt, own in zip(PROMPTS, each, strict=True)]


@pytest.mark.every_second("method", "params")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("params", [EMBED, TOKENS, MIXED], ids=["embed", "tokens", "mixed"])
def test_vectors_do_not_depend_on_scheduling(folder, method, params):
    wanted = one_by_one(folder, params, pooling_type=method)
    assert len({row.tobytes() for row in wanted}) >= 5  # the model tells them apart
    for cell in law7.PAIRED:
        with make(folder, **cell, pooling_type=method) as bench:
            for _ in range(2 if cell["cached"] else 1):  # the second time the cache is warm
                assert_same(bench.pool(PROMPTS, params), wanted)


def test_methods_are_what_they_say(folder):
    """Against token vectors, which take no pooling."""
    plain = PoolingParams(task="token_embed", normalize=False)
    with make(folder) as bench:
        tokens = bench.pool(PROMPTS, plain)
    weights = [np.arange(1, len(t) + 1) for t in tokens]
    weighted = [(t * own[:, None]).sum(0) / own.sum() for t, own in zip(tokens, weights, strict=True)]
    by_hand = {
        "first": [t[0] for t in tokens],
        "last": [t[-1] for t in tokens],
        "mean": [t.mean(0) for t in tokens],
        "max": [t.max(0) for t in tokens],
        "mean_sqrt_len": [t.sum(0) / np.sqrt(len(t)) for t in tokens],
        "weightedmean": weighted,
        "max+first+weightedmean": [np.concatenate([t.max(0), t[0], w]) for t, w in zip(tokens, weighted, strict=True)],
    }
    for method, wanted in by_hand.items():
        with make(folder, pooling_type=method, chunked=True) as bench:
            assert_same(bench.pool(PROMPTS, EMBED.with_changes(normalize=False)), wanted)
            short = [line[:9] / np.linalg.norm(line[:9]) for line in wanted]  # cut, then normalised
            assert_same(bench.pool(PROMPTS, EMBED.with_changes(dimensions=9)), short)


@pytest.mark.parametrize("method", ["mean", "last"])
def test_windows_change_no_vectors(tmp_path, method):
    folder = write_tiny(tmp_path, "mistral")
    wanted = one_by_one(folder, MIXED, pooling_type=method)
    for cell in law7.PAIRED[:3]:
        with make(folder, **cell, pooling_type=method) as bench:
            for _ in range(2 if cell["cached"] else 1):
                assert_same(bench.pool(PROMPTS, MIXED), wanted)


def test_classes_do_not_depend_on_scheduling(classifier):
    params = [PoolingParams(task="classify"), PoolingParams(task="classify", activation=False)] * 4
    wanted = one_by_one(classifier, params)
    assert [round(float(row.sum()), 6) for row in wanted[::2]] == [1.0] * 4
    for cell in law7.PAIRED:
        with make(classifier, **cell) as bench:
            assert_same(bench.pool(PROMPTS, params), wanted)


def test_steps_do_not_depend_on_scheduling(tmp_path):
    """Scores of the tokens that end a step, wherever the prompt was cut; a prompt may have none."""
    folder = write_reward_model(tmp_path)
    prompts = [[1, 9, 2, 3, 9], [4, 5], list(range(40)), [9] * 30, [*range(60), 9, 9]]
    every = PoolingParams(task="token_classify", step_tag_id=None)
    params = [every, every, every.with_changes(step_tag_id=7), every, every.with_changes(returned_token_ids=[1])]
    with make(folder, batched=False) as bench:
        wanted = [bench.pool([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert [one.shape for one in wanted] == [(2, 2), (0, 2), (1, 2), (30, 2), (3, 1)]
    for cell in law7.PAIRED:
        with make(folder, **cell) as bench:
            assert_same(bench.pool(prompts, params), wanted)


GENERATE = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module", params=METHODS)
def side_by_side(request, folder):
    """A method; each prompt pooled and continued, with its parameters and what it gets alone."""
    prompts = [prompt for prompt in PROMPTS[:6] for _ in range(2)]
    params = [own for embed in MIXED[:6] for own in (embed, GENERATE)]
    params[9] = GENERATE.with_changes(max_tokens=64 - len(prompts[9]))  # ends at the model's length
    with make(folder, batched=False, pooling_type=request.param) as bench:
        wanted = [bench.pool([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    return request.param, prompts, params, wanted


def test_generation_and_pooling_side_by_side_change_neither(folder, side_by_side):
    method, prompts, params, wanted = side_by_side
    num_preemptions = num_drafts = 0
    for number, cell in enumerate(law7.PAIRED):
        with_drafts = {} if number % 3 else {"drafts": "ngram:3"}
        with make(folder, **cell, pooling_type=method, **with_drafts) as bench:
            bench.core.scheduler.drafts.length = None
            assert_same(bench.pool(prompts, params), wanted)
            num_preemptions += bench.core.scheduler.num_preemptions
            num_drafts += bench.core.scheduler.drafts.counts.num_drafts
    assert num_preemptions > 0 and num_drafts > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_late_device_changes_nothing(folder, side_by_side, depth):
    method, prompts, params, wanted = side_by_side
    cell = dict(chunked=True, cached=True, preempted=True, depth=depth, late=True)
    with make(folder, **cell, pooling_type=method) as bench:
        preempt_after(bench, 8)
        assert_same(bench.pool(prompts, params), wanted)
        assert bench.core.scheduler.num_preemptions


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_prompt_of_exactly_the_model_length_ends(folder, depth):
    """Upstream keeps a place for a token that a pooling request never draws, and waits for it forever."""
    prompts = [list(range(64))] * 5
    with make(folder, chunked=True, depth=depth) as bench:
        got = bench.pool(prompts, EMBED)
    assert len(got) == 5


def test_prefixes_are_reused_only_where_that_is_sound(folder):
    long = list(range(60))
    for method, params, hits in (("last", EMBED, True), ("last", TOKENS, False), ("mean", EMBED, False)):
        with make(folder, cached=True, pooling_type=method) as bench:
            bench.pool([long], params)
            before = bench.core.scheduler.cache.num_hits
            bench.pool([long], params)
            assert (bench.core.scheduler.cache.num_hits > before) is hits


# Encoders


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_tiny_encoder(tmp_path_factory.mktemp("bert"), "bert", "Model")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("method", ["first", "mean", "max+weightedmean"])
def test_an_encoder_gives_the_same_alone_and_batched(encoder, method, depth):
    wanted = one_by_one(encoder, MIXED, pooling_type=method)
    for late in (False, True) if depth else (False,):
        with make(encoder, depth=depth, late=late, pooling_type=method, chunked=True) as bench:
            assert bench.core.config.scheduler.max_num_batched_tokens == 64  # never cut: a step holds the longest
            assert_same(bench.pool(PROMPTS, MIXED), wanted)
            assert_same(bench.pool(PROMPTS * 3, MIXED * 3), wanted * 3)
            assert_same(bench.pool(PROMPTS, EMBED), one_by_one(encoder, EMBED, pooling_type=method))


@pytest.mark.parametrize("task", ["ForTokenClassification", "ForMaskedLM", "ForSequenceClassification"])
def test_every_task_gives_the_same_alone_and_batched(tmp_path, task):
    folder = write_tiny_encoder(tmp_path, "bert", task)
    name = {"ForTokenClassification": "token_classify", "ForMaskedLM": "sparse"}.get(task, "classify")
    params = PoolingParams(task=name)
    wanted = one_by_one(folder, params)
    with make(folder, depth=2, late=True) as bench:
        assert_same(bench.pool(PROMPTS, params), wanted)
    if name == "token_classify":
        assert [len(matrix) for matrix in wanted] == list(map(len, PROMPTS))


def test_token_types_come_back_as_they_were_sent(tmp_path):
    """One number a request says where the second text begins; it matters, and neighbours have their own."""
    folder = write_tiny_encoder(tmp_path, "bert", "ForSequenceClassification")
    params, types = PoolingParams(task="classify", activation=False), [1, 5, None, 0, 20, 16, 63, None]
    with make(folder) as bench:
        wanted = [bench.pool([p], params, [t])[0] for p, t in zip(PROMPTS, types, strict=True)]
        plain = [bench.pool([p], params)[0] for p in PROMPTS]
        assert [bool(np.array_equal(a, b)) for a, b in zip(wanted, plain, strict=True)] == [
            start is None or start >= len(prompt) for start, prompt in zip(types, PROMPTS, strict=True)
        ]
    with make(folder, depth=2, late=True) as bench:
        assert_same(bench.pool(PROMPTS, params, types), wanted)


@pytest.mark.parametrize("depth", [0, 2])
def test_padding_to_a_size_that_could_be_captured_changes_nothing(encoder, folder, depth, monkeypatch):
    monkeypatch.setattr(Device, "can_graph", True)
    keys = []
    monkeypatch.setattr(GraphPool, "run", lambda self, key, work: (keys.append(key), work())[1])
    for model, method in ((encoder, "mean"), (encoder, "first"), (encoder, "max+weightedmean"), (folder, "last")):
        for params in (EMBED, MIXED):
            wanted = one_by_one(model, params, pooling_type=method, enforce_eager=True)
            keys.clear()
            with make(model, depth=depth, pooling_type=method) as bench:
                if model is folder:
                    bench.core.executor.graphs.token_sizes = []  # the CPU's attention goes row by row through chunks
                assert_same(bench.pool(PROMPTS, params), wanted)
            if model is encoder:
                assert any(key[0] == "forward" for key in keys)
                assert any(key[0] == "pool" for key in keys) is (params is EMBED)
