"""LongRoPE checkpoints: each request gets the short or the long factors by its own length, as transformers chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from causal_oracle import continue_greedily, norm_in_float64, oracle
from delayed_device import DelayedDevice
from law7 import PAIRED, options_of
from pool_bench import PoolBench, assert_same, rewrite
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.params.pooling import PoolingParams
from tiny import LONG_ROPE, write_tiny

ORIGINAL = 32  # the length that the short factors serve
SHARED = list(range(40, 68))
PROMPTS = {
    "short": [7, 9, 11],
    "ends at the limit": SHARED[:24],
    "crosses": SHARED[:20] + [100],
    "as long as the limit": SHARED + [101, 102, 103, 104],
    "one over": SHARED + [101, 102, 103, 104, 105],
    "long": SHARED + list(range(120, 160)),
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
PARAMS = [GREEDY.with_changes(max_tokens=9) if name == "ends at the limit" else GREEDY for name in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": ORIGINAL}
    return write_tiny(tmp_path_factory.mktemp("phi"), "phi3", torch.float64, **rope)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of each prompt."""
    return [
        continue_greedily(folder, ids, params.max_tokens or 0)
        for ids, params in zip(PROMPTS.values(), PARAMS, strict=True)
    ]


def make(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), use_tqdm_on_load=False, max_model_len=96, **options)  # type: ignore[arg-type]


def check(llm: LLM, wanted: list[tuple[list[int], list[float]]], tolerance: float = 1e-9) -> None:
    results = llm.generate([*PROMPTS.values()] * 2, PARAMS * 2)
    for result, (tokens, logprobs) in zip(results, wanted * 2, strict=True):
        (sample,) = result.outputs
        assert list(sample.token_ids) == tokens
        found = [step[token].logprob for token, step in zip(tokens, sample.logprobs or [], strict=True)]
        assert found == pytest.approx(logprobs, abs=tolerance)


CELLS = [dict(batched=False), *PAIRED[2:], *(cell | {"drafts": "ngram"} for cell in PAIRED[:2])]


@pytest.mark.parametrize("cell", CELLS, ids=[" ".join(k for k, v in cell.items() if v) or "plain" for cell in CELLS])
def test_each_request_has_the_factors_of_its_own_length(folder: Path, wanted, cell) -> None:
    """Beside requests of the other kind, with prefixes in common, in chunks, preempted, and launched ahead."""
    with make(folder, **options_of(few_pages=26, **cell)) as llm:
        for _ in range(2 if cell.get("cached") else 1):  # the second time the cache is warm
            check(llm, wanted)
        if cell.get("preempted") and cell["batched"] and cell["depth"] < 2:
            assert llm.core.scheduler.num_preemptions > 0
        llm.core.scheduler.check()


@pytest.mark.parametrize("device", [DelayedDevice, ReplayDevice])
def test_factors_are_chosen_on_the_device(folder: Path, wanted, device) -> None:
    """Late steps, and steps that replay what was captured of another."""
    options = options_of(few_pages=26, chunked=True, cached=True, preempted=True, depth=2)
    with make(folder, **options, _device=device(2)) as llm:
        llm.core.executor.graphs.token_sizes = []
        for _ in range(2):
            check(llm, wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_float32_kernels_take_them_too(folder: Path, wanted, threads: int) -> None:
    options = options_of(few_pages=26, chunked=True, cached=True) | dict(dtype="float32", num_threads=threads)
    with make(folder, **options) as llm:
        check(llm, wanted, 1e-3)


def test_an_engine_without_long_contexts_has_the_short_factors(folder: Path, wanted) -> None:
    with LLM(str(folder), use_tqdm_on_load=False, max_model_len=ORIGINAL, dtype="float64", page_size=4) as llm:
        names = [*PROMPTS]
        for name in ("short", "ends at the limit"):
            place = names.index(name)
            (result,) = llm.generate([PROMPTS[name]], PARAMS[place].with_changes(max_tokens=8))
            assert list(result.outputs[0].token_ids) == wanted[place][0][:8]


def test_samples_part_ways_at_the_switch(folder: Path) -> None:
    """Each goes on from its own tokens; those that come late take no pages from a leader that has switched."""
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True, logprobs=0)
    prompts = [PROMPTS["as long as the limit"], PROMPTS["crosses"], SHARED[:31]]
    with make(folder, **options_of(few_pages=26, batched=False)) as llm:
        alone = llm.generate(prompts, params)
    late, short_of_pages = dict(cached=True, depth=2), dict(preempted=True, chunked=True)
    for rows, cell in ((8, {}), (2, late), (8, late), (2, short_of_pages)):
        with make(folder, **options_of(few_pages=30, **cell) | dict(max_num_seqs=rows)) as llm:
            together = llm.generate(prompts, params)
        for one, other in zip(alone, together, strict=True):
            assert [list(s.token_ids) for s in one.outputs] == [list(s.token_ids) for s in other.outputs]
            assert len({tuple(s.token_ids) for s in one.outputs}) == 4


def test_prompt_logprobs_are_those_of_the_prompts_own_factors(folder: Path) -> None:
    prompts = {name: PROMPTS[name] for name in ("as long as the limit", "one over", "long")}
    logits = oracle(folder, torch.float64, prompts)
    with make(folder, **options_of(few_pages=26, chunked=True, cached=True)) as llm:
        results = llm.generate([*prompts.values()], GREEDY.with_changes(prompt_logprobs=0, max_tokens=4))
    for (name, ids), result in zip(prompts.items(), results, strict=True):
        logprobs = logits[name].log_softmax(-1)
        expected = [float(logprobs[place, token]) for place, token in enumerate(ids[1:])]
        assert result.prompt_logprobs is not None
        found = [step[token].logprob for step, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
        assert found == pytest.approx(expected, abs=1e-9)


def test_the_two_kinds_share_no_pages(folder: Path) -> None:
    """Also if a salt is spelled like anything that the cache may use to keep them apart."""
    short, long = SHARED, SHARED + list(range(120, 140))
    with make(folder, **options_of(few_pages=26, cached=True)) as llm:
        once = GREEDY.with_changes(max_tokens=1)
        assert [r.num_cached_tokens for r in llm.generate([short], once)] == [0]
        assert [r.num_cached_tokens for r in llm.generate([long], once)] == [0]
        assert [r.num_cached_tokens for r in llm.generate([short, long], once)] == [24, 44]
        for salt in ("long", "\0long", "\0"):
            salted = once.with_changes(cache_salt=salt)
            assert [r.num_cached_tokens for r in llm.generate([short], salted)] == [0]


def test_the_server_default_of_as_many_tokens_as_fit_keeps_short_prompts_short(folder: Path, wanted) -> None:
    """A request may run to the model length and mostly ends long before."""
    first = wanted[0][0]
    with make(folder, **options_of(few_pages=26)) as llm:
        (result,) = llm.generate([PROMPTS["short"]], GREEDY.with_changes(max_tokens=None, stop_token_ids=[first[5]]))
    assert list(result.outputs[0].token_ids) == first[: first.index(first[5]) + 1]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
def test_pooled_prompts_have_the_factors_of_their_own_length(causal: bool, tmp_path: Path) -> None:
    """In pages and chunk by chunk, or whole where every token sees all of its text."""
    facts = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": ORIGINAL, "is_causal": causal}
    folder = write_tiny(tmp_path, "phi3", torch.float64, **facts)
    rewrite(folder, {"architectures": ["Phi3Model"]}, {}, without=("lm_head.weight",))
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    norm_in_float64(model)
    wanted = []
    for ids in PROMPTS.values():
        everything = None if causal else torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), attention_mask=everything, use_cache=False).last_hidden_state[0]
        wanted.append(hidden.numpy())
    options = dict(max_model_len=96, pooling_type="last") | (dict(max_num_batched_tokens=11) if causal else {})
    with PoolBench(folder, **options) as bench:
        tokens = bench.pool([*PROMPTS.values()], PoolingParams(task="token_embed", normalize=False))
        assert_same(tokens, wanted)
        last = PoolingParams(task="embed", normalize=False)
        for _ in range(2):  # the second time the cache is warm
            assert_same(bench.pool([*PROMPTS.values()], last), [hidden[-1] for hidden in wanted])
