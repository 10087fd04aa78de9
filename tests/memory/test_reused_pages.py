"""Reused pages hold values of earlier requests, also NaN; they must not change the results of the next request."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file

from pool_bench import PoolBench, assert_same, rewrite
from slipstream import LLM
from slipstream.contracts.step import NULL_PAGE
from slipstream.ops.platform import native
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from tiny import write_tiny

BROKEN = 13
EMBED = PoolingParams(task="embed")
GENERATE = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
BAD = [BROKEN] * 50
GOOD = [list(range(20, 35)), [50, 51], [60] * 21]
FAMILIES = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 7}),
    "bounded": ("gemma2", {"sliding_window": 7}),
}
DTYPES = ("float32", "float32 by torch", "float64")
EVERY = list(itertools.product(FAMILIES, DTYPES))


def paired(others):
    """Parameters of a test: each family with each dtype, at both depths with one of the two `others` each, so that
    every pair of values of any two parameters occurs."""
    return [(*pair, depth, others[(place + depth // 2) % 2]) for place, pair in enumerate(EVERY) for depth in (0, 2)]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """One word of the vocabulary has a broken vector."""
    family, config = FAMILIES[request.param]
    path = rewrite(write_tiny(tmp_path_factory.mktemp("tiny"), family, **config), {}, {})
    tensors = load_file(path / "model.safetensors")
    head = {} if "lm_head.weight" in tensors else {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    weight = tensors["model.embed_tokens.weight"].clone()
    weight[BROKEN] = torch.nan
    return rewrite(path, {"tie_word_embeddings": False}, {"model.embed_tokens.weight": weight, **head})


@pytest.fixture
def dtype(request, monkeypatch):
    name, *by_torch = request.param.split(" ", 1)
    if by_torch:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(native, "build_in_background", lambda: None)
    elif name == "float32":
        native.build()
    return name


def make_bench(folder, **options):
    given = dict(max_num_batched_tokens=8, max_num_seqs=1, num_pages=17, enable_prefix_caching=False)
    return PoolBench(folder, **(given | options))


def caches_of(bench):
    return [cache for pair in bench.core.executor.store.caches for cache in pair]


@pytest.mark.every_second("folder", "depth")
@pytest.mark.parametrize(("folder", "dtype", "depth", "max_tokens"), paired([8, 256]), indirect=["folder", "dtype"])
def test_a_cache_full_of_nan_is_as_good_as_new(folder, dtype, depth, max_tokens):
    """The null page too: tables point at it where a row has no page, or no longer one."""
    results = []
    for poison in (0.0, torch.nan):
        options = dict(num_pages=64, max_num_seqs=3, enable_prefix_caching=True)
        with make_bench(folder, dtype=dtype, depth=depth, max_num_batched_tokens=max_tokens, **options) as bench:
            for cache in caches_of(bench):
                cache.fill_(poison)
            results.append([bench.pool([*GOOD, *GOOD], params) for params in (EMBED, GENERATE)])
    for clean, poisoned in zip(*results, strict=True):
        assert_same(poisoned, clean, 1e-4 if dtype == "float32" else 1e-9)


@pytest.mark.every_second("folder", "depth")
@pytest.mark.parametrize(("folder", "dtype", "depth", "rows"), paired([1, 3]), indirect=["folder", "dtype"])
def test_requests_that_reuse_pages_of_a_failed_request_do_not_fail(folder, dtype, depth, rows):
    """Pooling rows leave with their last launch: others have their pages before the host knows."""
    with make_bench(folder, dtype=dtype, depth=depth, max_num_seqs=rows, max_num_batched_tokens=8 * rows) as bench:
        wanted = [bench.pool([prompt], params)[0] for prompt in GOOD for params in (EMBED, GENERATE)]
        bad, good = [], []
        for prompt in GOOD:
            for params in (EMBED, GENERATE):
                bad += [bench.submit(BAD, EMBED), bench.submit(BAD, GENERATE)]  # together they take every page
                good.append(bench.submit(prompt, params))
        bench.run()
        assert set(bad) <= bench.errors.keys()
        assert not [bench.errors[id] for id in good if id in bench.errors]
        got = [bench.results[id] if id in bench.results else bench.tokens[id] for id in good]
        assert_same(got, wanted, 1e-4 if dtype == "float32" else 1e-9)
        for cache in caches_of(bench):
            assert not cache[NULL_PAGE].count_nonzero()


@pytest.mark.every_second("folder", "depth")
@pytest.mark.parametrize(("folder", "dtype"), EVERY, indirect=True)
@pytest.mark.parametrize("depth", [0, 2])
def test_requests_that_reuse_pages_of_an_aborted_request_do_not_fail(folder, dtype, depth):
    """The host never read its values, so it could not know that they were NaN."""
    with make_bench(folder, dtype=dtype, depth=depth) as bench:
        wanted = bench.pool(GOOD, EMBED)
        for _ in range(2):
            for prompt, vector in zip(GOOD, wanted, strict=True):
                bad, good = bench.submit(BAD, EMBED), bench.submit(prompt, EMBED)
                for _ in range(5):
                    bench.step()
                bench.abort(bad)
                bench.run()
                assert bad not in bench.ended
                assert_same([bench.results[good]], [vector], 1e-4 if dtype == "float32" else 1e-9)


@pytest.mark.every_second("folder", "depth")
@pytest.mark.parametrize(("folder", "dtype"), EVERY, indirect=True)
@pytest.mark.parametrize("depth", [0, 2])
def test_samples_of_a_prompt_do_not_feel_what_lies_behind_it_in_its_page(folder, dtype, depth):
    """The page in which they part is copied whole."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=2)
    options = dict(max_num_batched_tokens=8, num_pages=17, page_size=4, max_model_len=64, num_threads=1)
    with LLM(folder, dtype=dtype, depth=depth, max_num_seqs=2, **options) as llm:
        wanted = [output.token_ids for output in llm.generate([GOOD[0]], params)[0].outputs]
        for _ in range(2):
            assert llm.generate([BAD], GENERATE)[0].outputs[0].finish_reason == "error"
            got = [output.token_ids for output in llm.generate([GOOD[0]], params)[0].outputs]
            assert got == wanted
