"""Scripts for vLLM's Python API, over one tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from slipstream import LLM, RequestOutputKind, SamplingParams
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1)
LISTED = json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())["classes"]
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, use_tqdm_on_load=False, **SMALL) as llm:
        yield llm


def test_output_kinds_of_a_stream(llm):
    (whole,) = llm.generate("Hello", TEN)
    kinds = {kind: list(llm.stream("Hello", TEN.with_changes(output_kind=kind))) for kind in RequestOutputKind}
    cumulative, delta, final = kinds.values()
    assert [len(each.outputs[0].token_ids) for each in cumulative] == list(range(1, 11))
    assert [token for each in delta for token in each.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert "".join(each.outputs[0].text for each in delta) == whole.outputs[0].text
    assert len(delta) == 10 and [each.finished for each in delta] == [False] * 9 + [True]
    assert [each.outputs[0].token_ids for each in final] == [whole.outputs[0].token_ids] and final[0].finished


def test_a_request_can_skip_the_prefix_cache(llm):
    prompt = list(range(1, 22))
    wanted = llm.generate(prompt, TEN)[0].outputs[0].token_ids
    again = llm.generate(prompt, TEN)[0]
    fresh = llm.generate(prompt, TEN.with_changes(skip_reading_prefix_cache=True))[0]
    assert (again.num_cached_tokens, fresh.num_cached_tokens) == (20, 0)
    assert again.outputs[0].token_ids == fresh.outputs[0].token_ids == wanted


def test_parameters_changed_after_the_call_change_later_calls_only(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    stream = llm.stream("Hello", params)
    first = next(stream)
    params.max_tokens = 5
    assert len(list(stream)[-1].outputs[0].token_ids) == 3 and len(first.outputs[0].token_ids) == 1
    assert len(llm.generate("Hello", params)[0].outputs[0].token_ids) == 5
    params.max_tokens = 2
    assert len(llm.generate("Hello", params)[0].outputs[0].token_ids) == 2


def test_flat_logprobs_have_their_attributes(llm):
    params = TEN.with_changes(logprobs=2, flat_logprobs=True)
    logprobs = llm.generate("Hello", params)[0].outputs[0].logprobs
    assert len(logprobs) == 10 and logprobs.start_indices[0] == 0
    for start, end, entry in zip(logprobs.start_indices, logprobs.end_indices, logprobs, strict=True):
        assert logprobs.token_ids[start:end] == list(entry)
        assert logprobs.logprobs[start:end] == [each.logprob for each in entry.values()]
        assert logprobs.ranks[start:end] == [each.rank for each in entry.values()]
    assert len(logprobs.decoded_tokens) == logprobs.end_indices[-1]


def test_outputs_have_the_fields_of_vllm(llm):
    (found,) = llm.generate("Hello", TEN.with_changes(logprobs=1))
    for name in LISTED["RequestOutput"]["methods"]["__init__"]:
        assert hasattr(found, name), name
    (sample,) = found.outputs
    for name in LISTED["CompletionOutput"]["fields"]:
        assert hasattr(sample, name), name
    plain = dataclasses.asdict(sample)
    assert plain["text"] == sample.text and plain["token_ids"] == sample.token_ids and len(plain["logprobs"]) == 10
    assert found.request_id.isdigit() and found.metrics.num_generation_tokens == 10
    assert found.metrics.queued_ts <= found.metrics.first_token_ts <= found.metrics.last_token_ts


def test_pooling_outputs_have_tensors(llm):
    (found,) = llm.encode("Hello", pooling_task="embed")
    (vector,) = llm.embed("Hello")
    for name in LISTED["PoolingRequestOutput"]["methods"]["__init__"]:
        assert hasattr(found, name), name
    assert isinstance(found.outputs.data, torch.Tensor) and found.outputs.data.tolist() == vector.outputs.embedding
    assert dataclasses.asdict(vector.outputs) == {"embedding": vector.outputs.embedding}
    tokens = llm.encode("Hello", pooling_task="token_embed")[0].outputs.data
    assert isinstance(tokens, torch.Tensor) and tokens.shape[0] == len(found.prompt_token_ids)
