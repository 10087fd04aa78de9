"""Logits processors with `tensor_parallel_size`: the code runs on rank 0, and all ranks draw from its edits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from law7 import PAIRED, PROMPTS
from rank_threads import run_ranks_as_threads
from repeats import slow
from sampling.test_logits_processors import MIXED, Sharpen, Watermark, flat, make, narrow, prefer
from slipstream import SamplingParams
from tiny import write_tiny

ENGINE = [Watermark, Sharpen]
GRAMMAR = SamplingParams(seed=8, max_tokens=12, structured_outputs={"regex": "[a-f]{4}-[0-9]{2,}"})
BATCHES = [  # with grammars: alone, and under the masks of processors
    MIXED,
    [*MIXED[:4], GRAMMAR, GRAMMAR.with_changes(logits_processors=[prefer], extra_args={"watermark": "c"})],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def wanted(model):
    with make(model, engine=ENGINE) as llm:
        found = [flat(llm.generate(PROMPTS, batch, use_tqdm=False)) for batch in BATCHES]
        plain = [params.with_changes(extra_args=None, logits_processors=None) for params in BATCHES[1]]
        without = flat(llm.generate(PROMPTS, plain, use_tqdm=False))
    assert [a == b for a, b in zip(found[1], without, strict=True)] == [False] * 5 + [True, False]
    return found


@pytest.fixture(scope="module")
def two_ranks(model):
    with pytest.MonkeyPatch.context() as patch:
        run_ranks_as_threads(patch)
        with make(model, engine=ENGINE, depth=1, tensor_parallel_size=2) as llm:
            yield llm


@pytest.mark.parametrize(
    "cell", [*PAIRED[:3], *map(slow, PAIRED[3:])], ids=lambda cell: "-".join(map(str, cell.values()))
)
def test_tokens_are_those_of_one_rank(model, wanted, cell, monkeypatch):
    run_ranks_as_threads(monkeypatch)
    drafts = "suffix" if cell["preempted"] else None  # of the requests without processors
    with make(model, engine=ENGINE, tensor_parallel_size=2, drafts=drafts, **cell) as llm:
        for batch, results in [*zip(BATCHES, wanted, strict=True)][
            not cell["batched"] :
        ]:  # the second has most of the first
            assert flat(llm.generate(PROMPTS, batch, use_tqdm=False)) == results
        assert (llm.core.scheduler.num_preemptions > 0) == cell["preempted"]
        assert llm.core.constraints.num_live == 0


def test_code_that_is_random_gives_all_ranks_the_same_tokens(model, two_ranks):
    """A rank that drew another token would compute the next one from it: logprobs would not be those of the text."""

    def noise(output, logits):
        return logits + 3 * torch.randn_like(logits)

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0, logits_processors=[noise])
    (result,) = two_ranks.generate([[5, 6, 7]], params, use_tqdm=False)
    tokens = result.outputs[0].token_ids
    assert len(set(tokens)) > 10
    with make(model) as llm:
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scored = llm.generate([[5, 6, 7, *tokens]], asked, use_tqdm=False)[0].prompt_logprobs[3:]
    for token, own, other in zip(tokens, result.outputs[0].logprobs, scored, strict=True):
        assert own[token].logprob == pytest.approx(other[token].logprob, abs=1e-9)


@pytest.mark.parametrize("needs", ["logits", "tokens"])
def test_an_error_ends_its_request_only(two_ranks, needs):
    def broken(output, logits=None):
        return 1 / 0 if len(output) == 2 else logits

    broken.needs = needs
    good = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = two_ranks.generate([[3, 4]], good, use_tqdm=False)[0].outputs[0].token_ids
    both = [good.with_changes(logits_processors=[broken]), good]
    bad, other = two_ranks.generate([[1, 2], [3, 4]], both, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and "broken" in bad.outputs[0].stop_reason
    assert len(bad.outputs[0].token_ids) == 2 and other.outputs[0].token_ids == alone


def test_values_that_no_message_can_have_stay_with_the_request(two_ranks, tmp_path):
    """Requests of Python code may have any arguments, and numbers of numpy."""
    values = SamplingParams(temperature=np.float64(0.5), seed=3, max_tokens=4, extra_args={"any": object()})
    with_code = values.with_changes(logits_processors=[narrow])
    for params in (values, with_code):
        assert two_ranks.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].finish_reason == "length"
    two_ranks.save_record(tmp_path / "record")
