"""Every mistake gives one clear error, and the engine goes on serving others."""

from __future__ import annotations

import json
import math
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from sampling_values import NUMBERS, bad_values
from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.base.errors import (
    BadCheckpoint,
    BadTokenizer,
    EngineClosed,
    InvalidOption,
    InvalidParams,
    InvalidPrompt,
    ModelNotFound,
    NotEnoughMemory,
    PromptTooLong,
    SlipstreamError,
    UnsupportedModel,
)
from tiny import write_tiny

SMALL = dict(use_tqdm_on_load=False, max_model_len=64, num_pages=32, max_num_seqs=4, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SMALL) as llm:
        yield llm


def changed(folder, tmp_path, **config):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return copy


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ([1] * 64, PromptTooLong, "64 tokens"),
        ([1] * 5000, PromptTooLong, "5000 tokens"),
        ("", InvalidPrompt, "cannot be empty"),
        ([[]], InvalidPrompt, "cannot be empty"),
        ([1, 99999], InvalidPrompt, "99999"),
        ([1, -1], InvalidPrompt, "-1"),
        ([[1, "x"]], InvalidPrompt, "'x'"),
        ({"text": "hi"}, InvalidPrompt, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, InvalidPrompt, "list of token ids"),
        (3.5, InvalidPrompt, "float"),
    ],
)
def test_a_bad_prompt_is_refused_and_others_are_served(llm, prompt, error, says):
    with pytest.raises(error, match=says):
        llm.generate(prompt)
    assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "bad",
    [
        *({name: value} for name in NUMBERS for value in bad_values(name)),
        dict(temperature=1e300),
        dict(min_tokens=20, max_tokens=10),
        dict(stop=[""]),
        dict(stop=[1]),
        dict(stop_token_ids=["a"]),
        dict(stop_token_ids=[-1]),
        dict(ignore_eos="yes"),
        dict(logprob_token_ids=[1, -1]),
        dict(logprob_token_ids=7),
        dict(logit_bias=[1, 2]),
        dict(logit_bias={1: math.nan}),
        dict(logit_bias={1: math.inf}),
        dict(logit_bias={-1: 1.0}),
        dict(logit_bias={"x": 1.0}),
        dict(logit_bias={1: 1.0, "1": 2.0}),
        dict(logit_bias={True: 1.0}),
        dict(allowed_token_ids=[]),
        dict(allowed_token_ids=[1.0]),
        dict(bad_words=[""]),
        dict(bad_words=[" "]),
        dict(bad_words=[3]),
        dict(skip_special_tokens=1),
        dict(spaces_between_special_tokens=None),
        dict(detokenize="no"),
        dict(stop=["x"], detokenize=False),
        dict(truncate_prompt_tokens=0),
        dict(truncate_prompt_tokens=-2),
        dict(truncate_prompt_tokens=True),
        dict(priority=None),
        dict(cache_salt=3),
        dict(cache_salt=None),
        dict(cache_salt="\ud800"),
    ],
)
def test_bad_sampling_params_fail_where_they_are_built(bad):
    with pytest.raises(InvalidParams, match=next(iter(bad))):
        SamplingParams(**bad)


def test_params_are_checked_against_the_vocabulary(llm):
    with pytest.raises(InvalidParams, match="stop_token_ids has 100000"):
        llm.generate([1], SamplingParams(stop_token_ids=[100000]))
    with pytest.raises(InvalidParams, match="logprobs is 100000"):
        llm.generate([1], SamplingParams(logprobs=100000))


def test_a_bias_that_was_changed_is_checked_again(llm):
    params = SamplingParams(max_tokens=1, logit_bias={1: 2.0})
    llm.generate([1], params)
    params.logit_bias[99999] = 2.0
    with pytest.raises(InvalidParams, match="logit_bias has 99999"):
        llm.generate([1], params)
    assert llm.generate([1], SamplingParams(max_tokens=1))[0].finished


def test_as_many_params_as_prompts(llm):
    with pytest.raises(InvalidParams, match="2 prompts and 3"):
        llm.generate([[1], [2]], [SamplingParams()] * 3)


def test_one_bad_prompt_among_good_ones_runs_none(llm):
    with pytest.raises(InvalidPrompt, match="prompt 2 of 2: token id 99999"):
        llm.generate([[1], [99999]])
    assert not llm.core.has_requests()


def test_unknown_option_names_a_near_one(folder):
    with pytest.raises(InvalidOption, match="did you mean max_model_len"):
        LLM(str(folder), max_modellen=3)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (dict(tensor_parallel_size=3), "give a number that divides it"),
        (dict(quantization="awq"), "only fp8 quantises at load"),
        (dict(kv_cache_dtype="int4"), "fp8"),
        (dict(max_logprobs="all"), "max_logprobs"),
        (dict(dtype="int3"), "bfloat16"),
        (dict(max_num_seqs=0), "from 1 up"),
        (dict(max_num_seqs="many"), "whole number"),
        (dict(depth=-1), "0 to 8"),
        (dict(num_threads=100_000), "at most 1024"),
        (dict(max_num_seqs=10**9), "at most 65536"),
        (dict(max_model_len=1), "at least 2"),
        (dict(kv_cache_memory="lots"), "512MiB"),
        (dict(kv_cache_memory="1MiB", num_pages=9), "num_pages and kv_cache_memory are both given"),
        (dict(revision="v2"), "revision is 'v2', and .* is no hub name"),
        (dict(override_generation_config={"temprature": 1}), "'temprature', which nothing reads"),
        (dict(record_steps=0, record_redact=True), "record_redact is given and record_steps is 0"),
        (dict(record_steps=0, record_dir="records"), "record_dir is given and record_steps is 0"),
        (dict(gpu_memory_utilization=1.5), "up to 1"),
        (dict(max_model_len=10**6), "was made for"),
        (dict(max_num_batched_tokens=8, enable_chunked_prefill=False), "chunked prefill"),
        (dict(load_format="gguf"), "folder"),
    ],
)
def test_options_that_cannot_be_honoured_name_the_alternative(folder, option, says):
    with pytest.raises(InvalidOption, match=says):
        LLM(str(folder), **(dict(use_tqdm_on_load=False) | option))


def test_carried_over_options_that_change_nothing_pass(folder):
    carried = dict(
        tensor_parallel_size=1, quantization=None, kv_cache_dtype="auto", trust_remote_code=True, swap_space=4
    )
    with LLM(str(folder), **SMALL, **carried, served_model_name="tiny") as llm:
        assert llm.config.model.name == "tiny"


def test_no_memory(folder):
    with pytest.raises(NotEnoughMemory, match="kv_cache_memory"):
        LLM(str(folder), use_tqdm_on_load=False, num_pages=2)
    with pytest.raises(NotEnoughMemory):
        LLM(str(folder), use_tqdm_on_load=False, max_model_len="auto", kv_cache_memory=1)


def test_auto_length_fits_the_memory(folder):
    for auto in ("auto", -1):
        with LLM(str(folder), use_tqdm_on_load=False, num_pages=3, page_size=4, max_model_len=auto) as llm:
            assert llm.config.scheduler.max_model_len == llm.inputs.description.max_model_len == 12
            with pytest.raises(PromptTooLong, match="length is 12"):
                llm.generate([1] * 12)
            assert (
                len(llm.generate([1] * 8, SamplingParams(max_tokens=99, ignore_eos=True))[0].outputs[0].token_ids) == 4
            )


def test_an_unknown_architecture_is_refused_with_similar_ones_and_the_page_of_all(folder, tmp_path):
    with pytest.raises(UnsupportedModel, match="MammothForCausalLM is not .* MambaForCausalLM.*docs/models.md"):
        LLM(str(changed(folder, tmp_path, architectures=["MammothForCausalLM"])), **SMALL)


def test_broken_config(folder, tmp_path):
    copy = changed(folder, tmp_path)
    (copy / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        LLM(str(copy), **SMALL)
    (copy / "config.json").unlink()
    with pytest.raises(SlipstreamError):
        LLM(str(copy), **SMALL)


def test_truncated_weights(folder, tmp_path):
    copy = changed(folder, tmp_path)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint):
        LLM(str(copy), **SMALL)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_integers_are_no_weights_of_a_model_that_is_not_quantised(folder, tmp_path, dtype):
    copy = changed(folder, tmp_path)
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file(weights | {name: weights[name].to(dtype)}, copy / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=f"{name} has numbers of type .* lacks quantization_config"):
        LLM(str(copy), **SMALL)


def test_truncated_gguf(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(BadCheckpoint):
        LLM(str(path), **SMALL)


def test_missing_model():
    for name in ("no/such/model/anywhere", "", "  "):
        with pytest.raises(ModelNotFound):
            LLM(name, **SMALL)


def test_a_broken_chat_template_shows_at_start(folder):
    with pytest.raises(BadTokenizer, match="template"):
        LLM(str(folder), chat_template="{% if %}", **SMALL)


def test_template_arguments_may_not_take_our_names(llm):
    for name in ("messages", "special_tokens", "template", "tools"):
        with pytest.raises(InvalidParams, match=name):
            llm.chat([{"role": "user", "content": "hi"}], chat_template_kwargs={name: 1})


def test_min_tokens_beyond_the_model_length_are_refused(llm):
    with pytest.raises(InvalidParams, match="min_tokens"):
        llm.generate([1], SamplingParams(max_tokens=None, min_tokens=64))


@pytest.mark.parametrize("kind", [LLM, AsyncEngine])
def test_an_unreadable_tokenizer_is_reported_before_weights_are_loaded(folder, tmp_path, kind, monkeypatch):
    copy = changed(folder, tmp_path)
    (copy / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("slipstream.engine.build.build_core", None)
    before = threading.enumerate()
    with pytest.raises(BadTokenizer):
        kind(str(copy), max_model_len=64, num_pages=64, depth=1)
    assert threading.enumerate() == before


def test_missing_tokenizer(folder, tmp_path):
    copy = changed(folder, tmp_path)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(BadTokenizer, match="skip_tokenizer_init"):
        LLM(str(copy), **SMALL)
    with LLM(str(copy), skip_tokenizer_init=True, **SMALL) as llm:
        assert len(llm.generate([3, 4], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
        with pytest.raises(InvalidPrompt, match="token ids"):
            llm.generate("text")
        with pytest.raises(InvalidParams, match="stop_token_ids"):
            llm.generate([1], SamplingParams(stop="x"))


def test_closed_engine(folder):
    llm = LLM(str(folder), **SMALL)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate([1])
