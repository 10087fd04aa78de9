"""Scheduling never changes tokens (law 7), in float64: exactly the same tokens, logprobs within 1e-9."""

from __future__ import annotations

import itertools
import random

import pytest

from law7 import CELLS, FACTORS, PAIRED, PROMPTS
from law7_engine import GREEDY, SHORT, assert_same, logprobs, make
from repeats import slow
from replay_device import ReplayDevice, captured_forwards
from sampling_values import DRAWN, TRUNCATIONS, WORDS, with_value
from slipstream import SamplingParams
from slipstream.runner.features import Size
from tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module", params=["gemma2", "mistral"])
def window_model(request, tmp_path_factory):
    """Layers with a window of two pages, beside full ones or alone."""
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), request.param))


@pytest.fixture(scope="module")
def of_windows(window_model):
    """By the number of tokens."""
    with make(window_model, batched=False) as llm:
        return {params.max_tokens: llm.generate(PROMPTS, params) for params in (GREEDY, SHORT)}


def test_the_selection_has_every_pair_of_values():
    """Preemption counts in batches only; the baseline is the run that all cells are compared with."""
    found, baseline = set(), dict.fromkeys(FACTORS, False) | {"depth": 0}
    for cell in (baseline, *PAIRED):
        assert cell["batched"] or not cell["preempted"]
        found |= set(itertools.combinations(cell.items(), 2))
    every = {pair for cell in CELLS for pair in itertools.combinations(zip(FACTORS, cell, strict=True), 2)}
    assert every - found == {(("batched", False), ("preempted", True))}


@pytest.fixture(scope="module")
def wanted(alone):
    results = alone(GREEDY)
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == len(PROMPTS)  # the model says something
    return results


# A request that runs alone and without a prefix cache never lacks a page: few pages are then no cell of their own.
GREEDY_CELLS = [cell for cell in CELLS if cell[0] or cell[2] or not cell[3]]


@pytest.mark.parametrize(
    FACTORS, [cell if dict(zip(FACTORS, cell, strict=True)) in PAIRED else slow(*cell) for cell in GREEDY_CELLS]
)
def test_greedy_tokens_do_not_depend_on_scheduling(model, alone, wanted, batched, chunked, cached, preempted, depth):
    params = GREEDY if preempted and batched else SHORT
    with make(model, batched=batched, chunked=chunked, cached=cached, preempted=preempted, depth=depth) as llm:
        for _ in range(2 if cached else 1):  # the second time the cache is warm
            assert_same(llm.generate(PROMPTS, params), wanted if params is GREEDY else alone(SHORT))
        llm.core.scheduler.cache.check()


EVERYTHING = dict(
    n=2,
    temperature=1.1,
    top_p=0.95,
    top_k=60,
    min_p=0.001,
    seed=99,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    max_tokens=12,
    min_tokens=4,
    stop=["qq"],
    stop_token_ids=[1, 2, 3, 4, 100, 101, 102],
    logprobs=3,
    prompt_logprobs=2,
    logprob_token_ids=[8, 9],
    logit_bias={70: 3.0, 71: 2.0, 1: 4.0},
    allowed_token_ids=list(range(200)),
    bad_words=WORDS,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    truncate_prompt_tokens=40,
    priority=1,
    cache_salt="salt",
)

JSON = {
    "json": {
        "type": "object",
        "properties": {"kind": {"enum": ["circle", "square"]}, "size": {"type": "integer"}},
        "required": ["kind", "size"],
        "additionalProperties": False,
    },
    "disable_any_whitespace": True,
}
# a feature has the name of its parameter
SINGLE = {name: with_value(name, max_tokens=24 if name.startswith("stop") else 12) for name in DRAWN}
FEATURES = SINGLE | {
    "all truncations": SamplingParams(temperature=1.5, top_p=0.9, top_k=20, min_p=0.01, max_tokens=12),
    "prompt logprobs of samples": SamplingParams(n=2, prompt_logprobs=0, max_tokens=5),
    "json schema": SamplingParams(temperature=1.0, max_tokens=32, structured_outputs=JSON),
    "json schema, drawn": SamplingParams(temperature=1.0, max_tokens=32, structured_outputs=JSON, logprobs=2),
    "whole vocabulary": SamplingParams(logprobs=-1, prompt_logprobs=-1, logprob_token_ids=[1], max_tokens=5),
    "shown special tokens": SamplingParams(
        logit_bias={256: 8.0, 257: 8.0}, skip_special_tokens=False, spaces_between_special_tokens=False
    ),
    "everything": SamplingParams(**EVERYTHING),
    "everything among others": [
        SamplingParams(**EVERYTHING),
        SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=12),
        SamplingParams(bad_words=["e", "a"], repetition_penalty=1.3, max_tokens=14, logprobs=2),
        SamplingParams(n=2, allowed_token_ids=[5, 6, 7, 8], logit_bias={6: 2.0}, prompt_logprobs=1, max_tokens=9),
        SamplingParams(**EVERYTHING | dict(seed=3, logprobs=None, n=1)),
        SamplingParams(temperature=0, logprob_token_ids=[9], max_tokens=12),
    ],
    "mixed": [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, top_k=9, max_tokens=16, logprobs=5),
        SamplingParams(n=2, seed=5, max_tokens=10),
        SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=14),
        SamplingParams(top_p=0.5, max_tokens=16, logprobs=1),
        SamplingParams(min_tokens=5, stop_token_ids=list(range(256)), max_tokens=12),
    ],
}

FEATURES["grammars among others"] = [
    FEATURES["json schema"],
    FEATURES["temperature"],
    SamplingParams(n=2, seed=5, max_tokens=12, structured_outputs={"regex": "[a-f]{4}-[0-9]{2,}"}),
    SamplingParams(
        max_tokens=16,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        structured_outputs={"grammar": 'start: "<" /[a-z]{1,6}/ ("," /[a-z]{1,6}/)* ">"'},
    ),
    FEATURES["repetition_penalty"],
    SamplingParams(max_tokens=20, stop=["ight"], structured_outputs={"choice": ["the night is dark", "day is bright"]}),
]


@pytest.fixture(scope="module")
def alone(model):
    """Results of requests that run one after another, computed once for equal parameters."""
    known = {}

    def generate(params, prompts=PROMPTS):
        key = repr((params, prompts))
        if key not in known:
            with make(model, batched=False) as llm:
                known[key] = llm.generate(prompts, params)
        return known[key]

    return generate


# The feature is one more factor of the pairwise selection: in each half of PAIRED, with the baseline, each factor has
# all its values. Batches of several features, which have every parameter, also together, run in all cells.
CELLS_OF = {
    feature: PAIRED if isinstance(params, list) else PAIRED[number % 2 * 3 :][:3]
    for number, (feature, params) in enumerate(FEATURES.items())
}


def test_each_feature_runs_with_every_value_of_each_factor():
    for cells in CELLS_OF.values():
        for place, factor in enumerate(FACTORS):
            found = {cell[factor] for cell in cells} | {False}  # of the baseline; its depth is 0
            assert found == {cell[place] for cell in CELLS}


WHOLE = ("json schema", "stop_token_ids", "stop", "min_tokens", "everything")  # features that may end an answer


@pytest.mark.parametrize("feature", FEATURES)
def test_sampled_tokens_do_not_depend_on_scheduling(model, alone, feature):
    params, prompts = FEATURES[feature], PROMPTS
    if not isinstance(params, list) and feature not in WHOLE:
        params = params.with_changes(max_tokens=min(params.max_tokens, 7))
        prompts = PROMPTS[:4]  # the others differ in their pages only, which greedy requests have in all cells
    wanted = alone(params, prompts)
    for cell in CELLS_OF[feature]:
        # prompts of 9 tokens take fewer chunks
        with make(
            model, **cell, preempt_at=8 if feature == "truncate_prompt_tokens" and cell["chunked"] else None
        ) as llm:
            assert_same(llm.generate(prompts, params), wanted)
            assert (llm.core.scheduler.num_preemptions > 0) == cell["preempted"]


@pytest.mark.parametrize("feature", ["greedy", "n"])
def test_windows_change_no_tokens(window_model, of_windows, feature):
    """Pages before the window are given back while requests run, shared, cached and preempted."""
    params, wanted = GREEDY, of_windows[GREEDY.max_tokens]
    if feature == "n":
        params = FEATURES["n"]
        with make(window_model, batched=False) as llm:
            wanted = llm.generate(PROMPTS, params)
    assert len({tuple(r.outputs[0].token_ids) for r in wanted}) == len(PROMPTS)
    for cell in PAIRED if feature == "greedy" else PAIRED[:3]:
        if feature == "greedy":
            params = GREEDY if cell["preempted"] else SHORT
            wanted = of_windows[params.max_tokens]
        with make(window_model, **cell) as llm:
            for _ in range(2 if feature == "greedy" and cell["cached"] else 1):  # the second time the cache is warm
                assert_same(llm.generate(PROMPTS, params), wanted)
            if cell["cached"] and not cell["preempted"] and feature == "greedy":
                assert llm.core.scheduler.cache.num_hits > 100  # most of the second round
            llm.core.scheduler.cache.check()


@pytest.fixture(scope="module")
def of_fp8_cache(model):
    with make(model, batched=False, kv_cache_dtype="fp8") as llm:
        return llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("cell", [PAIRED[0], PAIRED[1]], ids=str)
def test_an_fp8_cache_changes_no_tokens_by_scheduling(model, wanted, of_fp8_cache, cell):
    with make(model, **cell, kv_cache_dtype="fp8") as llm:
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, GREEDY), of_fp8_cache)
    assert logprobs(of_fp8_cache) != logprobs(wanted)  # the cache is rounded


@pytest.mark.parametrize("depth", [1, 2])
def test_a_late_device_changes_no_window_tokens(window_model, of_windows, depth):
    with make(window_model, chunked=True, cached=True, preempted=True, depth=depth, late=True) as llm:
        assert_same(llm.generate(PROMPTS, GREEDY), of_windows[GREEDY.max_tokens])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_late_device_changes_nothing(model, alone, depth):
    for params in (GREEDY, FEATURES["mixed"], FEATURES["everything among others"], FEATURES["grammars among others"]):
        wanted = alone(params)
        with make(model, chunked=True, cached=True, preempted=True, depth=depth, late=True) as llm:
            assert_same(llm.generate(PROMPTS, params), wanted)


REPLAYED = {
    "greedy": GREEDY.with_changes(logprobs=None),
    "logprobs": GREEDY,
    "random": GREEDY.with_changes(temperature=1.0, seed=3, logprobs=None),
    "cut": GREEDY.with_changes(temperature=0.8, seed=3, **TRUNCATIONS | dict(top_k=20, top_p=0.9, min_p=0.01)),
    "top_p": GREEDY.with_changes(temperature=1.1, seed=4, top_p=0.8, logprobs=None),
    "penalties": GREEDY.with_changes(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2),
    "penalties and noise": GREEDY.with_changes(temperature=0.9, seed=5, repetition_penalty=1.3, min_p=0.02),
    "bias": GREEDY.with_changes(logit_bias={5: 4.0, 9: -3.0}, logprobs=None),
    "allowed": GREEDY.with_changes(temperature=0.9, seed=6, allowed_token_ids=list(range(5, 80))),
    "min_tokens": GREEDY.with_changes(ignore_eos=False, min_tokens=9, stop_token_ids=list(range(2, 150))),
    "bad_words": GREEDY.with_changes(temperature=0.9, seed=7, bad_words=WORDS, logprobs=None),
}


@pytest.mark.parametrize("depth", [0, 2])
def test_replayed_masks_give_the_same_tokens(model, alone, depth):
    params = FEATURES["grammars among others"]
    wanted = alone(params)
    with make(model, cached=True, preempted=True, depth=depth, device=ReplayDevice(depth)) as llm:
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        assert_same(llm.generate(PROMPTS, params), wanted)
        assert any("grammar" in key.sampling for key, entry in graphs._captured.items() if key[0] == "head" and entry)


@pytest.mark.every_second("feature", "depth")
@pytest.mark.parametrize(("depth", "whole"), [(0, False), (2, True)])
@pytest.mark.parametrize("feature", [*REPLAYED, "all of them", "mixed", "everything among others"])
def test_replayed_steps_give_the_same_tokens(model, alone, depth, whole, feature):
    """Bodies of single tokens and heads of all steps are padded, captured and replayed, as on a GPU: `whole` those of a
    step as one graph."""
    replayed = {name: params.with_changes(max_tokens=10) for name, params in REPLAYED.items()}
    params = replayed.get(feature) or FEATURES.get(feature) or [*replayed.values()][-len(PROMPTS) :]
    wanted = alone(params)
    device = ReplayDevice(depth)
    with make(model, chunked=True, cached=True, preempted=True, depth=depth, device=device, preempt_at=9) as llm:
        llm.core.executor.whole_steps = whole
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for _ in range(2 if feature in REPLAYED else 1):  # those without a seed get another the second time
            assert_same(llm.generate(PROMPTS, params), wanted)
        captured = [key for key, entry in graphs._captured.items() if entry is not None]
        assert ("forward", Size(4, 4), False) in [key[:3] for key in captured_forwards(graphs)]
        assert whole == any(key[0] == "step" for key in captured)
        heads = [key for key in captured if key[0] == "head"]
        # those that decode, and those of a step that also computes a chunk
        picks = {True} if whole else {True, False}
        assert feature == "everything among others" or {key.is_picked for key in heads} == picks
        assert device.num_replays > 10


@pytest.fixture(scope="module")
def of_reused_rows(model):
    """Prompts, their parameters and what they give alone."""
    order = random.Random(1).sample(2 * [*REPLAYED.values()], 2 * len(REPLAYED))
    params = [asked.with_changes(max_tokens=9 + place % 5) for place, asked in enumerate(order)]
    prompts = [[7 + place, 9, 11] for place in range(len(params))]
    with make(model, batched=False) as llm:
        return prompts, params, llm.generate(prompts, params)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_reused_row_has_none_of_the_earlier_requests_parameters(model, of_reused_rows, depth):
    """Replayed work reads each row's parameters from tables, also defaults that the present request did not write."""
    prompts, params, wanted = of_reused_rows
    with make(model, depth=depth, device=ReplayDevice(depth), max_num_seqs=7) as llm:
        llm.core.executor.graphs.token_sizes = []
        assert_same(llm.generate(prompts, params), wanted)


def test_few_graphs_serve_whatever_number_of_logprobs_is_wanted(model):
    """A step reports a few more logprobs than requested; results contain the requested ones only."""
    asked = [SHORT.with_changes(logprobs=k) for k in (0, *range(2, 6), 17, 18, 19, 20)]
    with make(model, batched=False) as llm:
        wanted = [llm.generate(PROMPTS[:1], params) for params in asked]
    with make(model, device=ReplayDevice(0)) as llm:
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []
        for params, expected in zip(asked, wanted, strict=True):
            assert_same(llm.generate(PROMPTS[:1], params), expected)
        assert {key.sampling[0] for key in graphs._captured if key[0] == "head"} == {0, 5, 20}


def test_depth_runs_ahead(model):
    """At depth 2 three steps are under way before the first result is asked for."""
    with make(model, depth=2) as llm:
        under_way = [len(llm.core.in_flight) for _ in llm.stream(PROMPTS[0], GREEDY)]
        assert max(under_way) == 2  # looked at after a commit
