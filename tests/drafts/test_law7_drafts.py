"""Drafts never change tokens (law 7), in float64: the same tokens as without drafts, whatever the drafter proposes."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from draft_search import search
from engine.test_law7 import FEATURES, REPLAYED
from law7 import DRAFTED, PROMPTS
from law7_engine import GREEDY, assert_same, make
from mask_gate import DraftGate
from replay_device import ReplayDevice, captured_forwards
from replay_drafter import ReplayDrafter
from slipstream import SamplingParams
from slipstream.base.errors import InvalidOption
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.ops.sampling import MatchRule
from slipstream.runner.features import Size
from tiny import write_tiny
from tiny_drafters import write_dflash, write_eagle3
from tiny_encoder import write_tiny_encoder

# every sampling feature, in batches of one request for each prompt
BATCHES = {
    "greedy": GREEDY,
    "penalties": [
        FEATURES["repetition_penalty"],
        FEATURES["presence_penalty"],
        FEATURES["frequency_penalty"],
        FEATURES["min_tokens"],
        SamplingParams(temperature=0.6, seed=2, repetition_penalty=1.2, frequency_penalty=0.7, max_tokens=14),
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2, max_tokens=14),
    ],
    "words": [
        FEATURES["bad_words"],
        SamplingParams(temperature=0, bad_words=["e", "a", "th"], repetition_penalty=1.3, max_tokens=14, logprobs=2),
        FEATURES["logit_bias"],
        FEATURES["allowed_token_ids"],
        FEATURES["all truncations"],
        FEATURES["min_p"],
    ],
    "others": FEATURES["mixed"],
    "reports": [
        FEATURES["prompt_logprobs"],
        FEATURES["stop_token_ids"],
        FEATURES["stop"],
        FEATURES["logprob_token_ids"],
        FEATURES["n"],
        FEATURES["temperature"],
    ],
    "grammars": FEATURES["grammars among others"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def texts_of(results):
    return [result.prompt_token_ids + sample.token_ids for result in results for sample in result.outputs]


@pytest.fixture(scope="module")
def wanted(model):
    with make(model) as llm:
        return {name: llm.generate(PROMPTS, params) for name, params in BATCHES.items()}


def draft(llm, kind, results):
    llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
    if kind in ("right", "wrong", "random"):
        ReplayDrafter.replace(llm, texts_of(results), kind)


@pytest.mark.parametrize("cell", DRAFTED, ids=lambda cell: "-".join(map(str, cell.values())))
def test_tokens_do_not_depend_on_drafts(model, wanted, cell):
    with make(model, **cell) as llm:
        counts = llm.core.scheduler.drafts.counts
        for name in [*BATCHES] if cell["drafts"] == "random" else ("greedy", "penalties"):
            params = BATCHES[name]
            draft(llm, cell["drafts"], wanted[name])
            assert_same(llm.generate(PROMPTS, params), wanted[name])
            if name == "greedy" and cell["drafts"] == "right":
                assert counts.num_accepted == counts.num_drafts > 30, "a right draft was rejected"
        assert counts.num_drafts > 0
        assert (counts.num_accepted > 0) == (cell["drafts"] != "wrong")
        llm.core.scheduler.cache.check()


def spec_of(method, model, tmp_path):
    if method == "eagle3":
        taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
        folder = write_eagle3(tmp_path, Path(model), eagle_config=taps)
    elif method == "dflash":
        taps = {"mask_token_id": 300, "target_layer_ids": [0, 0]}
        folder = write_dflash(tmp_path, Path(model), dflash_config=taps)
    else:
        folder = write_tiny(tmp_path, "mistral")  # the same weights, and a window
    return {"method": method, "model": str(folder), "num_speculative_tokens": 3}


SEEDED_GRAMMARS = [params.with_changes(seed=7) for params in BATCHES["grammars"]]


@pytest.fixture(scope="module")
def of_grammars(model):
    with make(model) as llm:
        return llm.generate(PROMPTS, SEEDED_GRAMMARS)


@pytest.mark.every_second("method", "depth")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("method", ["random", "draft_model", "eagle3", "dflash"])
def test_rows_with_drafts_sit_out_while_their_masks_are_late(model, of_grammars, method, depth, tmp_path, monkeypatch):
    asked, results = SEEDED_GRAMMARS, of_grammars
    dice = random.Random(depth)
    gate = DraftGate(monkeypatch, lambda _: dice.random() < 0.5)
    drafter = {"drafts": method} if method == "random" else {"speculative_config": spec_of(method, model, tmp_path)}
    with make(model, cached=True, preempted=True, depth=depth, **drafter) as llm:
        core, sat = llm.core, []
        draft(llm, method, results)
        step, sit_out = core.step, core.scheduler.sit_out

        def step_and_pass():
            core.constraints.min_budget = dice.choice([0.0, 0.01])  # a late row is not slow for ever
            outputs = step()
            gate.let_pass()
            return outputs

        monkeypatch.setattr(core, "step", step_and_pass)
        monkeypatch.setattr(core.scheduler, "sit_out", lambda *given: sat.append(given) or sit_out(*given))
        assert_same(llm.generate(PROMPTS, asked), results)
        assert sat and gate.num_stopped
        core.scheduler.cache.check()


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "dflash"])
def test_tokens_do_not_depend_on_models_that_draft(model, wanted, method, tmp_path):
    """Features that depend on the output or report more than tokens; the cells are in the files of the drafters."""
    with make(model, speculative_config=spec_of(method, model, tmp_path), cached=True, depth=1) as llm:
        llm.core.scheduler.drafts.length = None
        for name in (
            "greedy",
            "penalties",
            "words",
            "others",
            "reports",
        ):  # in this order: it gives requests their seeds
            assert_same(llm.generate(PROMPTS, BATCHES[name]), wanted[name])
        assert llm.core.scheduler.drafts.counts.num_drafts > 0
        llm.core.scheduler.cache.check()


LAST_REPLAYED = [*REPLAYED.values()][-len(PROMPTS) :]


@pytest.fixture(scope="module")
def of_replayed(model):
    with make(model, batched=False) as llm:
        return llm.generate(PROMPTS, LAST_REPLAYED)


@pytest.mark.every_second("depth", "kind")
@pytest.mark.parametrize(("depth", "whole"), [(0, False), (2, True)])
@pytest.mark.parametrize("kind", ["random", "ngram"])
def test_replayed_steps_with_drafts_give_the_same_tokens(model, wanted, of_replayed, depth, whole, kind):
    """A step with drafts replays the graphs of a decode step of more rows: two, or one for the whole step."""
    device = ReplayDevice(depth)
    with make(model, chunked=True, cached=True, preempted=True, depth=depth, device=device, drafts=kind) as llm:
        llm.core.executor.whole_steps = whole
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for asked, results in ((GREEDY, wanted["greedy"]), (LAST_REPLAYED, of_replayed)):
            draft(llm, kind, results)
            assert_same(llm.generate(PROMPTS, asked), results)
        captured = [key for key, entry in graphs._captured.items() if entry is not None]
        heads = [key[-1] if key[0] == "step" else key for key in captured if (key[0] == "step") == whole]
        assert any(key[0] == "head" and key.drafts[:2] == (True, 3) for key in heads)
        assert ("forward", Size(8, 8, has_drafts=True), False) in [key[:3] for key in captured_forwards(graphs)]
        assert llm.core.scheduler.drafts.counts.num_accepted > 0
        assert llm.core.executor.input_batch.rows.computed[-1] == 0, "the padding row has a length"


@pytest.mark.every_second("depth", "is_replayed")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_replayed", [False, True], ids=["eager", "replayed"])
def test_results_have_the_drafts_that_a_search_makes(model, wanted, depth, is_replayed):
    """Those of steps with and without drafts; the host chooses the next number by them."""
    device = ReplayDevice(depth) if is_replayed else None
    with make(model, cached=True, batched=True, depth=depth, device=device, drafts="ngram") as llm:
        planner, seen = llm.core.scheduler.drafts, set()
        numbers = itertools.cycle([(0, 0, 0), (3, 3, 3)])
        planner.length.choose = lambda counts, count_matched: (next(numbers), 3)
        llm.core.executor.graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        counts = planner.counts
        see = counts.see

        def check(requests, tokens, drafts, has_drafts):
            for row, (request, new) in enumerate(zip(requests, tokens, strict=True)):
                if drafts is not None and new:
                    assert drafts[row].tolist() == search(request.tokens + new, MatchRule(2, 4, math.inf), 3)
                    seen.add((has_drafts, bool(drafts[row, 0] >= 0)))
            see(requests, tokens, drafts, has_drafts)

        counts.see = check
        assert_same(llm.generate(PROMPTS, GREEDY), wanted["greedy"])
        assert {has_drafts for has_drafts, _ in seen} == {is_matched for _, is_matched in seen} == {False, True}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_late_device_changes_nothing(model, wanted, depth):
    with make(model, chunked=True, cached=True, preempted=True, depth=depth, late=True, drafts="ngram") as llm:
        llm.core.scheduler.drafts.length = None
        for name in ("greedy", "penalties"):  # in the order of BATCHES: it gives requests their seeds
            assert_same(llm.generate(PROMPTS, BATCHES[name]), wanted[name])


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_windows_with_drafts(tmp_path, family):
    """Pages before a window are freed by committed positions, not by drafts."""
    folder = str(write_tiny(tmp_path, family))
    with make(folder, batched=False) as llm:
        results = llm.generate(PROMPTS, GREEDY)
    for cell in (DRAFTED[0], DRAFTED[3]):
        with make(folder, **cell | {"drafts": "random" if family == "gemma2" else "ngram"}) as llm:
            if family == "gemma2":  # has layers that keep every position
                draft(llm, "random", results)
            assert_same(llm.generate(PROMPTS, GREEDY), results)
            llm.core.scheduler.cache.check()


def test_models_without_drafts_are_refused_by_name(tmp_path):
    options = dict(load_format="dummy", drafts="ngram")
    with pytest.raises(InvalidOption, match="it generates no text"):
        estimate_build(make_options(model=str(write_tiny_encoder(tmp_path / "encoder")), task="embed", **options))
