"""Drafts with `tensor_parallel_size`: every rank proposes by itself, and tokens are those of one rank without drafts
(law 7, float64)."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from test_law7 import GREEDY, assert_same, make
from test_law7_drafts import BATCHES

from law7 import PAIRED, PROMPTS, options_of
from rank_threads import run_ranks_as_threads
from slipstream import LLM, SamplingParams
from slipstream.config.options import make_options
from slipstream.engine.build import foresee
from slipstream.errors import InvalidOption
from tiny import write_tiny, write_weights
from tiny_drafters import write_dflash, write_eagle, write_eagle3, write_few, write_mtp

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
    asked = [GREEDY, [SamplingParams(temperature=0.6, seed=seed, max_tokens=16, ignore_eos=True) for seed in range(6)]]
    with make(str(model), batched=False) as llm:
        wanted = [llm.generate(PROMPTS, params) for params in asked]
    counts = []
    cells = [(1, PAIRED[2]), (2, PAIRED[2]), (2, PAIRED[0])]
    for num_ranks, cell in cells if method in ("draft_model", "eagle3", "mtp of deepseek_v3") else cells[:2]:
        options = cell | {"speculative_config": spec | {"num_speculative_tokens": 3}}
        with make(str(model), tensor_parallel_size=num_ranks, **options) as llm:
            llm.core.scheduler.drafts.length = None
            for params, results in zip(asked, wanted, strict=True):
                assert_same(llm.generate(PROMPTS, params), results)
            counts.append((llm.core.scheduler.drafts.counts.num_drafts, llm.core.scheduler.drafts.counts.num_accepted))
            llm.core.scheduler.check()
    assert counts[0] == counts[1] and 0 < counts[0][1] < counts[0][0]


def test_a_drafter_that_cannot_be_divided_is_refused_by_name(tmp_path, model):
    odd = write_tiny(tmp_path, "llama", num_attention_heads=1, num_key_value_heads=1)
    spec = {"method": "draft_model", "model": str(odd)}
    with pytest.raises(InvalidOption, match="the draft model of .* is 2, and the model has 1 attention heads"):
        foresee(make_options(model=model, device="cpu", tensor_parallel_size=2, speculative_config=spec))
