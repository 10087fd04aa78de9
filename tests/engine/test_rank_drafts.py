"""Drafts with `tensor_parallel_size`: every rank proposes by itself, and tokens are those of one rank without drafts
(law 7, float64)."""

from __future__ import annotations

import pytest
from test_law7 import assert_same, make
from test_law7_drafts import BATCHES

from law7 import PAIRED, PROMPTS, options_of
from rank_threads import run_ranks_as_threads
from slipstream import LLM, SamplingParams
from tiny import write_tiny

CELLS = [cell | {"drafts": ("ngram", "suffix")[number % 2]} for number, cell in enumerate(PAIRED)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def wanted(model):
    with make(model) as llm:
        return {name: llm.generate(PROMPTS, params) for name, params in BATCHES.items()}


def check(llm, wanted):
    """Runs the batches of `wanted` in their order, which gives requests their seeds."""
    llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
    for name, results in wanted.items():
        assert_same(llm.generate(PROMPTS, BATCHES[name]), results)
    assert llm.core.scheduler.drafts.counts.num_accepted > 0
    llm.core.scheduler.check()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_tokens_do_not_depend_on_ranks_and_drafts(model, wanted, cell, monkeypatch):
    """All features, with grammars, where requests are preempted: at depth 0, 1 and 2."""
    run_ranks_as_threads(monkeypatch)
    with make(model, tensor_parallel_size=2, **cell) as llm:
        check(llm, wanted if cell["preempted"] else {name: wanted[name] for name in ("greedy", "penalties")})
        assert (llm.core.scheduler.num_preemptions > 0) == cell["preempted"]


LONG = [list(range(120, 185)), [*range(120, 184), 9, 8], [7, 8, 7, 8]]  # two go beyond the first checkpoint of a state
FEW = SamplingParams(temperature=0.8, seed=3, max_tokens=13, ignore_eos=True, allowed_token_ids=[7, 8, 9], logprobs=1)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"tensor_parallel_size": 4}),
        ("qwen3_next", {"tensor_parallel_size": 2}),
        ("mamba", {"tensor_parallel_size": 2, "num_checkpoints": 8}),
    ],
)
def test_windows_and_recurrent_states(tmp_path, family, options, monkeypatch):
    """Every rank takes rejected drafts back from its part of the states. Models without attention have no pages: each
    rank gets the tokens before a checkpoint with the plan."""
    run_ranks_as_threads(monkeypatch)
    folder = str(write_tiny(tmp_path, family))
    with make(folder, batched=False) as llm:
        wanted = llm.generate(LONG, FEW)
    shared = dict(skip_tokenizer_init=False, use_tqdm_on_load=False, max_model_len=80)
    cell = options_of(few_pages=21, depth=1, cached=True, drafts="suffix")
    with LLM(folder, **shared, **cell, **options) as llm:
        llm.core.scheduler.drafts.length = None
        for _ in range(2):  # the second time from the prefix cache
            assert_same(llm.generate(LONG, FEW), wanted)
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        assert llm.core.scheduler.cache.num_hits > 64
        llm.core.scheduler.check()
