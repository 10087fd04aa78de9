"""Prompts of embeddings: the embeddings of token ids give the tokens that the ids give, however they are scheduled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from delayed_device import DelayedDevice
from law7 import PAIRED, PROMPTS, options_of
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption, InvalidParams, InvalidPrompt
from tiny import write_tiny

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def table(folder):
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"].double()


def make(folder, device=None, **options):
    given = dict(dtype="float64", num_threads=1, max_model_len=96, enable_prompt_embeds=True, use_tqdm_on_load=False)
    return LLM(str(folder), _device=device, **given | options)


def tokens_of(outputs):
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module")
def llm(folder):
    with make(folder, page_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(llm):
    return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("cell", PAIRED, ids=str)
def test_scheduling_never_changes_tokens(cell, folder, table, wanted):
    """Every second prompt is embeddings; those of equal values share cached pages."""
    prompts = [{"prompt_embeds": table[ids]} if index % 2 else ids for index, ids in enumerate(PROMPTS)]
    depth = cell["depth"]
    device = (ReplayDevice if cell["batched"] else DelayedDevice)(depth)
    with make(folder, device, **options_of(few_pages=26, **cell)) as llm:
        llm.core.executor.graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for _ in range(2):
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            assert tokens_of(outputs) == wanted
        if cell["cached"] and not cell["preempted"]:
            assert outputs[4].num_cached_tokens and outputs[1].num_cached_tokens
    assert outputs[1].prompt_token_ids == [0] * len(PROMPTS[1])


def test_a_page_is_shared_only_by_equal_embeddings(llm, table):
    ids, others = PROMPTS[4], PROMPTS[4][::-1]
    greedy = PARAMS.with_changes(temperature=0.0)
    wanted = tokens_of(llm.generate([ids, others], greedy, use_tqdm=False))
    for _ in range(2):
        prompts = [{"prompt_embeds": table[ids]}, {"prompt_embeds": table[others][None]}]
        assert tokens_of(llm.generate(prompts, greedy, use_tqdm=False)) == wanted
    salted = llm.generate({"prompt_embeds": table[ids], "cache_salt": "other"}, greedy, use_tqdm=False)
    assert salted[0].num_cached_tokens == 0 and tokens_of(salted) == wanted[:1]


def test_samples_and_logprobs(llm, table):
    params = PARAMS.with_changes(n=3, logprobs=2)
    by_ids, by_values = llm.generate([PROMPTS[4], {"prompt_embeds": table[PROMPTS[4]].numpy()}], params, use_tqdm=False)
    assert tokens_of([by_values]) == tokens_of([by_ids])
    for ours, theirs in zip(by_values.outputs, by_ids.outputs, strict=True):
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)


def test_penalties_see_no_prompt_tokens(llm, table):
    """Neither token 0, the id of every position of the prompt, nor the tokens of the embeddings are penalised."""
    bias = {0: 60.0, 9: 50.0}
    params = SamplingParams(temperature=0, max_tokens=2, repetition_penalty=3.0, logit_bias=bias, ignore_eos=True)
    ids = [9, 11, 9]
    (found,) = tokens_of(llm.generate({"prompt_embeds": table[ids]}, params, use_tqdm=False))
    assert found == [0, 9]


def test_embeddings_are_those_behind_the_scale(tmp_path):
    folder = write_tiny(tmp_path, "gemma2")
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].double()
    with make(folder) as llm:
        prompts = [PROMPTS[4], {"prompt_embeds": weight[PROMPTS[4]] * weight.shape[1] ** 0.5}]
        by_ids, by_values = tokens_of(llm.generate(prompts, PARAMS.with_changes(temperature=0.0), use_tqdm=False))
    assert by_ids == by_values


def test_what_is_wrong_is_refused(llm, folder, table):
    size = table.shape[1]
    cases = [
        (torch.zeros(3, size + 1), "give a float tensor"),
        (torch.zeros(2, 3, size), "give a float tensor"),
        (torch.zeros(3, size, dtype=torch.int64), "int64"),
        (torch.zeros(0, size), "no tokens"),
        (torch.zeros(96, size), "96 tokens"),
        (torch.zeros(3, size).to_sparse(), "sparse"),
        (torch.full((3, size), float("nan")), "NaN"),
        ("text", "str"),
        (np.zeros((3, size), "U1"), "dtype"),
    ]
    for values, words in cases:
        with pytest.raises(InvalidPrompt, match=words):
            llm.generate({"prompt_embeds": values}, PARAMS, use_tqdm=False)
    embedded = {"prompt_embeds": table[:3]}
    with pytest.raises(InvalidPrompt, match="both given"):
        llm.generate(embedded | {"prompt_token_ids": [1]}, PARAMS, use_tqdm=False)
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        with pytest.raises(InvalidParams, match=name):
            llm.generate(embedded, PARAMS.with_changes(**{name: 1}), use_tqdm=False)
    with pytest.raises(InvalidOption, match="drafts are made"):
        make(folder, drafts="ngram:3")
    with (
        make(folder, enable_prompt_embeds=False) as other,
        pytest.raises(InvalidPrompt, match="takes no prompt_embeds"),
    ):
        other.generate(embedded, PARAMS, use_tqdm=False)


@pytest.mark.cuda
def test_a_gpu_decodes_after_embeddings_with_graphs(folder, table):
    params = PARAMS.with_changes(temperature=0.0, max_tokens=16)
    given = dict(dtype="float32", max_model_len=96, enable_prompt_embeds=True, use_tqdm_on_load=False)
    with LLM(str(folder), device="cuda", max_num_batched_tokens=16, **given) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))
        prompts = [{"prompt_embeds": table[ids].cuda()} if index % 2 else ids for index, ids in enumerate(PROMPTS)]
        for _ in range(2):
            assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == wanted
        assert llm.core.executor.graphs.num_captured
