"""Scheduling never changes tokens (law 7) on the paths that CPU users run: float32 and low-bit C kernels, 1 and 2
threads, rows of a step in any order. Each path is compared with itself, one request at a time. With low-bit weights all
arithmetic is ours and the same for one token and many, so logprobs are equal to the bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from law7 import PAIRED, PROMPTS, options_of
from slipstream import LLM, SamplingParams
from slipstream.nn.chains import FusedCpu
from slipstream.ops.platform import native
from slipstream.scheduler.plan_builder import PlanBuilder
from tiny import write_tiny
from tiny_gguf import K_SIZES, write_gguf

KINDS = ["llama float32", "gemma2 bfloat16", "llama Q4_1", "qwen3 Q4_0", "gemma2 Q8_0", "llama mixed"]
TOLERANCE = 1e-4  # of logprobs in float32, where torch's sums differ between one token and many
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=3)
Order = Callable[[list[Any]], None]
ORDERS: dict[str, Order] = {
    "planned": lambda rows: None,
    "reversed": lambda rows: rows.reverse(),
    "shuffled": random.Random(7).shuffle,
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    family, kind = request.param.split()
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), family, dtype, **(K_SIZES if kind == "mixed" else {}))
    if kind in ("float32", "bfloat16"):
        return str(folder)
    if kind == "mixed":  # every layout of the C kernels
        others = {"attn_k": Kind.Q4_1, "attn_v": Kind.Q6_K, "attn_output": Kind.Q8_0, "ffn_up": Kind.Q5_K}
        return str(write_gguf(folder, Kind.Q4_K, others=others | {"ffn_down": Kind.F16, "output": Kind.Q5_0}))
    return str(write_gguf(folder, Kind[kind]))


@pytest.fixture
def num_fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each step that ran as one C call. Up to how many rows that is used is a matter of speed,
    and on x86-64 it is 4 rows of plain weights: here the bound is that of low-bit weights, so that the path is
    taken with several rows on every machine."""
    monkeypatch.setattr("slipstream.nn.chains.max_rows", lambda products: 64)
    monkeypatch.setattr("slipstream.nn.weights.kinds.bfloat16_is_faster", lambda: True)  # not what is measured here
    counts: list[int] = []
    run = FusedCpu.run

    def counted(self, x, *args):
        out = run(self, x, *args)
        if out is not None:
            counts.append(len(x))
        return out

    monkeypatch.setattr(FusedCpu, "run", counted)
    return counts


@pytest.fixture
def reorder(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on the rows of a plan are in another order: decodes among each other, chunks among each other."""
    sort = PlanBuilder.sort

    def use(name: str) -> None:
        def sort_rows(self: PlanBuilder) -> Any:
            ORDERS[name](self.decodes)
            ORDERS[name](self.chunks)
            return sort(self)

        monkeypatch.setattr(PlanBuilder, "sort", sort_rows)

    return use


def make(model: str, threads: int = 1, budget: int | None = None, **cell: Any) -> LLM:
    options = options_of(few_pages=26, **cell) | {"dtype": "auto", "num_threads": threads}
    if budget is not None:
        options |= {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    return LLM(model, skip_tokenizer_init=True, use_tqdm_on_load=False, max_model_len=96, **options)


def assert_same(model: str, got: list[Any], wanted: list[Any]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        mine, theirs = mine.outputs[0], theirs.outputs[0]
        assert mine.token_ids == theirs.token_ids
        if model.endswith(".gguf"):
            assert mine.logprobs == theirs.logprobs
            continue
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            for token in a.keys() & b.keys():
                assert abs(a[token].logprob - b[token].logprob) < TOLERANCE


@pytest.fixture(scope="module")
def wanted(model: str) -> list[Any]:
    with make(model, batched=False) as llm:
        results = llm.generate(PROMPTS, GREEDY)
    if not model.endswith(".gguf"):
        steps = [step.values() for result in results for step in result.outputs[0].logprobs]
        best = [sorted((entry.logprob for entry in step), reverse=True) for step in steps]
        assert min(first - second for first, second, *_ in best) > 2 * TOLERANCE, "a near tie makes this test random"
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == len(PROMPTS)
    return results


WAYS = [(1, "reversed"), (2, "planned"), (2, "shuffled")]  # threads, and the order of rows
CELLS = [(cell, *WAYS[number % 3]) for number, cell in enumerate(PAIRED)]


@pytest.mark.every_second("model", "cell")
@pytest.mark.parametrize(("cell", "threads", "order"), CELLS, ids=[f"{n}-{t}-{o}" for n, (_, t, o) in enumerate(CELLS)])
def test_greedy_tokens_do_not_depend_on_scheduling(model, wanted, cell, threads, order, reorder, num_fused):
    reorder(order)
    with make(model, threads, **cell) as llm:
        num_fused.clear()
        for _ in range(2):  # the second time the cache is warm
            assert_same(model, llm.generate(PROMPTS, GREEDY), wanted)
        llm.core.scheduler.cache.check()
    assert len(num_fused) > 20 and (max(num_fused) > 1) == cell["batched"]


@pytest.mark.parametrize("batched", [False, True])
def test_late_threads_change_nothing(model, wanted, batched, num_fused):
    """With more threads than cores some of them arrive when the others are parts ahead, and have to catch up."""
    with make(model, threads=9, batched=batched) as llm:
        num_fused.clear()
        assert_same(model, llm.generate(PROMPTS, GREEDY), wanted)
    assert len(num_fused) > 10


@pytest.mark.parametrize(("threads", "order"), [*itertools.product((1, 2), ("planned", "reversed"))])
def test_a_page_completed_in_a_step_is_read_in_that_step(model, threads, order, reorder, num_fused):
    """The budget leaves the last token of a prompt to the second step, where a longer prompt finds its pages."""
    prompt = [7, 9, 11, 40, 41, 42, 43, 44]
    prompts = [prompt, [*prompt, 45]]
    params = GREEDY.with_changes(max_tokens=3)
    with make(model, batched=False) as llm:
        expected = llm.generate(prompts, params)
    reorder(order)
    with make(model, threads, budget=7, cached=True) as llm:
        num_fused.clear()
        results = llm.generate(prompts, params)
        assert num_fused[0] == 2, "both rows have one token in the second step"
        assert results[1].num_cached_tokens == 8
        assert_same(model, results, expected)
        assert_same(model, llm.generate(prompts, params), expected)  # from the cache
