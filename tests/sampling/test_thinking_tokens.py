"""`thinking_token_budget` of a model with random weights: the same tokens under any scheduling, and exact."""

from __future__ import annotations

import re

import pytest

from law7 import PAIRED, options_of
from repeats import slow
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption, InvalidParams
from tiny import write_tiny

REASONING = {"reasoning_start_str": "<a>", "reasoning_end_str": ". So:</a>"}
BUDGETS = [0, 3, 11, 40]
LENGTH = 22


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def make(model, reasoning=REASONING, drafts=None, **cell):
    options = options_of(few_pages=26, **cell) | ({} if drafts is None else {"drafts": drafts})
    return LLM(model, use_tqdm_on_load=False, max_model_len=96, reasoning_config=reasoning, **options)


def generate(llm):
    """Prompts that end within reasoning, with budgets; one whose reasoning is not open, and one without a budget."""
    start = llm.tokenizer.encode("<a>", add_special_tokens=False)
    prompts = [[9 + i] * (4 + 5 * i) + start for i in range(len(BUDGETS))]
    one = SamplingParams(seed=4, max_tokens=LENGTH, ignore_eos=True, n=2)
    params = [one.with_changes(thinking_token_budget=budget) for budget in BUDGETS]
    results = llm.generate([*prompts, [5, 6], prompts[0]], [*params, params[1], one], use_tqdm=False)
    return [[sample.token_ids for sample in result.outputs] for result in results]


@pytest.fixture(scope="module")
def wanted(model):
    with make(model, batched=False) as llm:
        found = generate(llm)
        end = llm.tokenizer.encode(". So:</a>", add_special_tokens=False)
    for budget, samples in zip(BUDGETS, found, strict=False):
        for tokens in samples:
            assert tokens[budget : budget + len(end)] == end[: max(0, LENGTH - budget)], budget
    assert found[0][0][len(end) :] != found[0][1][len(end) :]  # what follows is sampled
    assert all(tokens.count(end[-1]) < 5 for tokens in (*found[-1], *found[-2]))
    return found


@pytest.mark.parametrize(
    "cell", [*PAIRED[:3], *map(slow, PAIRED[3:])], ids=lambda cell: "-".join(map(str, cell.values()))
)
def test_tokens_do_not_depend_on_scheduling(model, wanted, cell):
    with make(model, **cell) as llm:
        assert generate(llm) == wanted
        if cell["preempted"] and cell["batched"]:
            assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_drafts_are_accepted_up_to_the_budget_and_across_it(model, depth):
    """The model repeats itself, so that drafts are accepted; the prompts have the forced text, so it is drafted too."""
    found = []
    for drafts in (None, "ngram:4"):
        with make(model, depth=depth, drafts=drafts) as llm:
            llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
            start = llm.tokenizer.encode("<a>", add_special_tokens=False)
            end = llm.tokenizer.encode(". So:</a>", add_special_tokens=False)
            prompts = [[7, 8, 9, 7, 8, 9, *end, 30 + i, *start] for i in range(4)]
            one = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logit_bias={7: 9.0, 8: 9.1, 9: 9.0})
            params = [one.with_changes(thinking_token_budget=budget) for budget in (0, 7, 8, 21)]
            results = llm.generate(prompts, params, use_tqdm=False)
            found.append([result.outputs[0].token_ids for result in results])
            if drafts:
                assert sum(llm.core.scheduler.drafts.counts.accepted_at) > 20
    assert found[0] == found[1]
    for budget, tokens in zip((0, 7, 8, 21), found[0], strict=True):
        assert tokens[budget : budget + len(end)] == end


@pytest.mark.parametrize("depth", [0, 2])
def test_a_structure_follows_the_reasoning(model, depth):
    prefix = 'start: thought\nthought[lazy]: TEXT "</a>"\nTEXT: /(.|\\n)*/'
    shape = {"regex": "[0-9]{3}", "prefix": prefix}
    with make(model, depth=depth) as llm:
        prompt = llm.tokenizer.encode("hello<a>", add_special_tokens=False)
        params = SamplingParams(seed=3, max_tokens=60, thinking_token_budget=12, n=3, structured_outputs=shape)
        for sample in llm.generate([prompt], params, use_tqdm=False)[0].outputs:
            assert re.search(r"\. So:</a>[0-9]{3}$", sample.text, re.S) and sample.finish_reason == "stop"


def test_what_cannot_be_done_is_refused(model):
    with make(model, None) as llm:
        with pytest.raises(InvalidParams, match="reasoning_config"):
            llm.generate([[5]], SamplingParams(thinking_token_budget=3), use_tqdm=False)
        assert llm.generate([[5]], SamplingParams(thinking_token_budget=-1), use_tqdm=False)
    for given, words in (
        ({"reasoning_start_str": "a"}, "reasoning_end_str of reasoning_config is None"),
        ({"reasoning_start": "a"}, "did you mean reasoning_start_str"),
        ("{", "give a JSON object"),
        ('{"reasoning_start_str": "a", "reasoning_end_str": " "}', "give a text"),
    ):
        with pytest.raises(InvalidOption, match=words):
            make(model, given)
    with pytest.raises(InvalidParams, match="thinking_token_budget is -2"):
        SamplingParams(thinking_token_budget=-2)
