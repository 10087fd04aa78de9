"""Drafts with `tensor_parallel_size`: every rank proposes by itself, and tokens are those of one rank without drafts
(law 7, float64)."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from drafts.test_law7_drafts import BATCHES as UNSEEDED
from law7 import PAIRED, PROMPTS, options_of
from law7_engine import GREEDY, assert_same, make
from rank_threads import run_ranks_as_threads
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from tiny import write_tiny, write_weights
from tiny_drafters import write_dflash, write_eagle, write_eagle3, write_few, write_mtp

CELLS = [cell | {"drafts": ("ngram", "suffix")[number % 2]} for number, cell in enumerate(PAIRED)]
# with seeds: tokens do not depend on which batches ran before
BATCHES = {
    name: params.with_changes(seed=7)
    if isinstance(params, SamplingParams)
    else [p.with_changes(seed=7) for p in params]
    for name, params in UNSEEDED.items()
}
# of each cell: every batch runs where requests are preempted, grammars at depth 0, 1 and 2
BATCHES_OF = [
    ("greedy", "words", "grammars"),
    ("penalties", "others", "grammars"),
    ("greedy", "penalties"),
    ("penalties",),
    ("greedy",),
    ("reports", "grammars"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def wanted(model):
    with make(model) as llm:
        return {name: llm.generate(PROMPTS, params) for name, params in BATCHES.items()}


def test_every_batch_runs_where_requests_are_preempted():
    preempted = [names for cell, names in zip(CELLS, BATCHES_OF, strict=True) if cell["preempted"]]
    assert {name for names in preempted for name in names} == {*BATCHES}
    assert all("grammars" in names for names in preempted)


@pytest.mark.parametrize("cell", range(len(CELLS)), ids=lambda place: "-".join(map(str, CELLS[place].values())))
def test_tokens_do_not_depend_on_ranks_and_drafts(model, wanted, cell, monkeypatch):
    run_ranks_as_threads(monkeypatch)
    with make(model, tensor_parallel_size=2, **CELLS[cell]) as llm:
        scheduler = llm.core.scheduler
        scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        for name in BATCHES_OF[cell]:
            assert_same(llm.generate(PROMPTS, BATCHES[name]), wanted[name])
        assert scheduler.drafts.counts.num_accepted > 0
        assert (scheduler.num_preemptions > 0) == CELLS[cell]["preempted"]
        scheduler.check()


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
    with make(folder) as llm:
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


def write_method(folder, method):
    """A model, and its speculative_config."""
    if method.startswith("mtp"):
        return write_mtp(folder, method.removeprefix("mtp of ")), {"method": "mtp"}
    model = write_few(folder / "model")
    if method == "draft_model":
        drafter = write_few(folder / "drafter", seed=1, num_key_value_heads=1)  # whose key head both ranks have
    elif method == "eagle3 with its own embedding":
        drafter = write_eagle3(folder / "drafter", model, None)
        weights = load_file(drafter / "model.safetensors")
        embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        write_weights(drafter, weights | {"embed_tokens.weight": embedding.clone()})
    else:
        drafter = {"eagle": write_eagle, "eagle3": write_eagle3, "dflash": write_dflash}[method](
            folder / "drafter", model
        )
    return model, {"method": method.split()[0], "model": str(drafter)}


@pytest.mark.parametrize(
    "method",
    [
        "draft_model",
        "eagle",
        "eagle3",
        "eagle3 with its own embedding",
        "dflash",
        "mtp of deepseek_v3",
        "mtp of qwen3_5",
    ],
)
def test_models_that_draft_are_divided_too(tmp_path, method, monkeypatch):
    """Tokens are those without drafts, and as many drafts are right as on one rank."""
    run_ranks_as_threads(monkeypatch)
    model, spec = write_method(tmp_path, method)
    cells = [(1, PAIRED[2]), (2, PAIRED[2]), (2, PAIRED[0])]
    if method not in ("draft_model", "eagle3", "mtp of deepseek_v3"):
        cells.pop()
    length = 14 if len(cells) == 3 else 9  # enough to run out of pages
    drawn = [SamplingParams(temperature=0.6, seed=seed, max_tokens=length, ignore_eos=True) for seed in range(6)]
    asked = [drawn, GREEDY.with_changes(max_tokens=7)]
    with make(str(model)) as llm:
        wanted = [llm.generate(PROMPTS, params) for params in asked]
    counts = []
    for num_ranks, cell in cells:
        options = cell | {"speculative_config": spec | {"num_speculative_tokens": 3}}
        with make(str(model), tensor_parallel_size=num_ranks, **options) as llm:
            llm.core.scheduler.drafts.length = None
            for params, results in [*zip(asked, wanted, strict=True)][: 1 if cell["preempted"] else 2]:
                assert_same(llm.generate(PROMPTS, params), results)
            counts.append((llm.core.scheduler.drafts.counts.num_drafts, llm.core.scheduler.drafts.counts.num_accepted))
            for _ in range(4):  # it depends on threads whether pages run out
                if cell["preempted"] and not llm.core.scheduler.num_preemptions:
                    llm.reset_prefix_cache()
                    assert_same(llm.generate(PROMPTS, drawn), wanted[0])
            assert (llm.core.scheduler.num_preemptions > 0) == cell["preempted"]
            llm.core.scheduler.check()
    assert counts[0] == counts[1] and 0 < counts[0][1] < counts[0][0]


def test_a_drafter_that_cannot_be_divided_is_refused_by_name(tmp_path, model):
    odd = write_tiny(tmp_path, "llama", num_attention_heads=1, num_key_value_heads=1)
    spec = {"method": "draft_model", "model": str(odd)}
    with pytest.raises(InvalidOption, match="the draft model of .* is 2, and the model has 1 attention heads"):
        estimate_build(make_options(model=model, device="cpu", tensor_parallel_size=2, speculative_config=spec))
