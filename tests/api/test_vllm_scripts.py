"""Scripts for vLLM's Python API, over one tiny model."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

from loop_pace import keep_pace
from patience import PATIENCE
from slipstream import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    FlatLogprobs,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from slipstream.api.vllm import NOT_SUPPORTED
from slipstream.base.errors import EngineClosed, EngineDead, InvalidOption, InvalidParams, InvalidPrompt
from slipstream.front.param_checks import StructuredOutputsConfig
from slipstream.metrics.prometheus import Counter, Gauge, Histogram, Vector
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1)
LISTED = json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())["classes"]
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def llm(folder, tmp_path_factory):
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path_factory.mktemp("profile") / "new")}
    options = {"disable_log_stats": False, "profiler_config": profiler, "drafts": "ngram:2"}
    with LLM(folder, use_tqdm_on_load=False, **SMALL, **options) as llm:
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
    assert isinstance(sample.logprobs, list) and isinstance(sample.logprobs, FlatLogprobs)
    assert type(plain["logprobs"]) is list
    assert plain["text"] == sample.text and plain["token_ids"] == sample.token_ids and len(plain["logprobs"]) == 10
    assert found.request_id.isdigit() and found.metrics.num_generation_tokens == 10
    assert found.metrics.queued_ts <= found.metrics.first_token_ts <= found.metrics.last_token_ts


def test_a_result_made_by_a_script_takes_vllms_arguments(caplog):
    given = ("7", "Hello", [1, 2], [None, {}], [], True, None, None, None, None, 2)
    found = RequestOutput(*given, kv_transfer_params={"block": 3}, of_a_later_version=1)
    names = LISTED["RequestOutput"]["methods"]["__init__"][: len(given)]
    assert [getattr(found, name) for name in names] == list(given) and found.kv_transfer_params == {"block": 3}
    assert "no of_a_later_version" in caplog.text
    assert found == RequestOutput(*given, kv_transfer_params={"block": 3}) != RequestOutput(*given)


def test_pooling_outputs_have_tensors(llm):
    (found,) = llm.encode("Hello", pooling_task="embed")
    (vector,) = llm.embed("Hello")
    for name in LISTED["PoolingRequestOutput"]["methods"]["__init__"]:
        assert hasattr(found, name), name
    assert isinstance(found.outputs.data, torch.Tensor) and found.outputs.data.tolist() == vector.outputs.embedding
    assert dataclasses.asdict(vector.outputs) == {"embedding": vector.outputs.embedding}
    tokens = llm.encode("Hello", pooling_task="token_embed")[0].outputs.data
    assert isinstance(tokens, torch.Tensor) and tokens.shape[0] == len(found.prompt_token_ids)


def test_an_engine_one_step_at_a_time(llm):
    engine = llm.llm_engine
    (wanted,) = llm.generate("Hello", TEN)
    engine.add_request("mine", "Hello", TEN)
    engine.add_request("last", {"prompt": "Hello"}, TEN.with_changes(output_kind=RequestOutputKind.FINAL_ONLY))
    engine.add_request("gone", "Hello", TEN)
    with pytest.raises(InvalidParams, match="'mine' is in use"):
        engine.add_request("mine", "Hello", TEN)
    found = {"mine": [], "last": [], "gone": []}
    assert engine.get_num_unfinished_requests() == 3
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id].append(output)
            if output.request_id == "gone":
                engine.abort_request(["gone", "unknown"])
    assert [len(outputs) for outputs in found.values()] == [10, 1, 1] and engine.step() == []
    for outputs in (found["mine"], found["last"]):
        assert outputs[-1].finished and outputs[-1].outputs[0].token_ids == wanted.outputs[0].token_ids
    assert engine.model_config.max_model_len == 64 and engine.model_config.get_vocab_size() > 0


def test_added_requests_may_have_the_ids_of_a_call(llm):
    engine = llm.llm_engine
    (wanted,) = llm.generate("Hello", TEN)
    names = [str(int(wanted.request_id) + place) for place in range(1, 6)]
    for name in names:
        engine.add_request(name, "Hello", TEN)
    (found,) = llm.generate("Hello", TEN)
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    assert set(last) == set(names)
    assert {tuple(each.outputs[0].token_ids) for each in [found, *last.values()]} == {
        tuple(wanted.outputs[0].token_ids)
    }


def test_running_requests_are_computed_again(llm):
    (whole,) = llm.generate("Hello again", TEN)
    engine = llm.llm_engine
    engine.add_request("again", "Hello again", TEN)
    for _ in range(4):
        engine.step()
    preempted = llm.core.scheduler.num_preemptions
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert llm.core.scheduler.num_preemptions == preempted + 1
    done = []
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
    assert [output.outputs[0].token_ids for output in done] == [whole.outputs[0].token_ids]
    with pytest.raises(InvalidParams, match="reset_connector"):
        llm.reset_prefix_cache(reset_connector=True)


def test_metrics_are_objects_of_vllms_classes(llm):
    def read():
        found = {}
        for metric in llm.get_metrics():
            found.setdefault(metric.name, metric)
        return found

    before = read()
    llm.generate([[1, 2, 1, 2, 1, 2], [3] * 5], TEN)
    llm.embed("Hello")
    after = read()

    def grown(name):
        return after[name].value - before[name].value

    assert isinstance(after["vllm:generation_tokens"], Counter) and grown("vllm:generation_tokens") == 20
    assert grown("vllm:prompt_tokens") == 11 + len(llm.get_tokenizer().encode("Hello"))
    assert after["vllm:num_requests_running"] == Gauge(
        "vllm:num_requests_running", {"model_name": llm.config.model.name, "engine": "0"}, 0
    )
    latency = after["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram) and latency.count == latency.buckets["+Inf"] > 0 and latency.sum > 0
    assert latency.count - before["vllm:e2e_request_latency_seconds"].count == 3
    assert after["vllm:time_to_first_token_seconds"].count - before["vllm:time_to_first_token_seconds"].count == 2
    assert isinstance(after["vllm:spec_decode_num_draft_tokens"], Counter)
    by_position = after["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(by_position, Vector) and len(by_position.values) == 2
    assert sum(by_position.values) == after["vllm:spec_decode_num_accepted_tokens"].value
    assert all(metric.name.startswith("vllm:") for metric in llm.get_metrics())


def test_a_profile_is_written(llm):
    with pytest.raises(InvalidParams, match="no profile is being recorded"):
        llm.stop_profile()
    llm.start_profile("mine")
    with pytest.raises(InvalidParams, match="stop_profile first"):
        llm.start_profile()
    llm.generate("Hello", TEN.with_changes(max_tokens=2))
    llm.stop_profile()
    (path,) = Path(llm._front_end.profiler_config.torch_profiler_dir).iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert path.name.startswith("mine_") and any("aten::" in event.get("name", "") for event in events)


def test_functions_of_the_worker(llm):
    assert llm.collective_rpc(lambda worker, add: worker.rank + add, args=(2,)) == [2]
    assert llm.collective_rpc("get_model") == [llm.core.executor.model]
    (wanted,) = llm.generate("Hello", TEN)
    assert llm.collective_rpc("reload_weights") == [None] and llm.collective_rpc("check_health") == [None]
    assert llm.generate("Hello", TEN)[0].outputs == wanted.outputs
    for wrong in ("_loop", "execute_model", 3):
        with pytest.raises(InvalidParams, match="a worker has no method"):
            llm.collective_rpc(wrong)
    with pytest.raises(InvalidParams, match="timeout"):
        llm.collective_rpc("get_model", timeout=1.0)


def test_dummy_weights_are_replaced_by_those_of_the_files(llm, folder):
    (wanted,) = llm.generate("Hello", TEN)
    with LLM(folder, load_format="dummy", use_tqdm_on_load=False, **SMALL) as dummy:
        (before,) = dummy.generate("Hello", TEN)
        dummy.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
        dummy.collective_rpc("reload_weights")
        (found,) = dummy.generate("Hello", TEN)
        with pytest.raises(InvalidParams, match="takes load_config"):
            dummy.collective_rpc("update_config", args=({"model_config": {"max_model_len": 3}},))
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids != before.outputs[0].token_ids


def test_what_scripts_read_of_the_model_config(llm, folder):
    config = llm.llm_engine.model_config
    assert (config.model, config.dtype, config.architecture) == (folder, torch.float32, "LlamaForCausalLM")
    assert (config.get_hidden_size(), config.get_head_size(), config.get_total_num_kv_heads()) == (64, 16, 2)
    assert config.hf_config.num_hidden_layers == config.get_total_num_hidden_layers() == 2
    assert config.head_dtype is config.dtype  # of the projection to tokens
    assert (config.runner_type, config.is_multimodal_model, config.max_model_len) == ("generate", False, 64)


def test_what_scripts_read_of_the_vllm_config(llm):
    config = llm.llm_engine.vllm_config
    assert config.model_config == llm.model_config and llm.model_config.embedding_size == 64
    assert (config.cache_config.block_size, config.cache_config.num_gpu_blocks) == (4, 64)
    assert config.cache_config.gpu_memory_utilization and config.cache_config.enable_prefix_caching
    assert config.scheduler_config.max_num_seqs == 4 and config.scheduler_config.max_model_len == 64
    assert config.parallel_config.tensor_parallel_size == config.parallel_config.world_size == 1


def test_beam_search_of_a_few_prompts_at_once(llm):
    params, prompts = BeamSearchParams(beam_width=2, max_tokens=3), ["a", "bc", "d"]
    wanted = [each for output in llm.beam_search(prompts, params) for each in output.sequences]
    found = [each for output in llm.beam_search(prompts, params, concurrency_limit=2) for each in output.sequences]
    assert [each.tokens for each in found] == [each.tokens for each in wanted]
    # float32: on some processors the order of sums depends on the number of rows
    assert [each.cum_logprob for each in found] == pytest.approx([each.cum_logprob for each in wanted], abs=1e-4)


def test_methods_of_vllm_exist_or_say_why_not(llm):
    ours = [name for name in LISTED["LLM"]["methods"] if name != "__init__" and hasattr(llm, name)]
    assert {"generate", "chat", "beam_search", "encode", "embed", "classify", "score", "apply_model"} <= set(ours)
    for name in LISTED["LLM"]["methods"]:
        if name not in ("__init__", *ours):
            with pytest.raises(AttributeError, match=f"LLM.{name} is not supported: "):
                getattr(llm, name)
    assert sorted(NOT_SUPPORTED) == sorted(set(LISTED["LLM"]["methods"]) - {"__init__"} - set(ours))
    assert llm.apply_model(lambda model: isinstance(model, torch.nn.Module)) == [True]
    assert llm.get_default_sampling_params() == SamplingParams() and llm.reset_prefix_cache() is True


def test_arguments_of_vllm_that_ask_for_something_are_refused(llm):
    unused = {"lora_request": None, "tokenization_kwargs": {}, "mm_processor_kwargs": None}
    (wanted,) = llm.generate("Hello", TEN, **unused)
    with pytest.raises(InvalidParams, match="mm_processor_kwargs is not supported"):
        llm.generate("Hello", TEN, mm_processor_kwargs={"crops": 4})
    with pytest.raises(TypeError, match="lora_requst"):
        llm.generate("Hello", TEN, lora_requst=None)
    with pytest.raises(InvalidPrompt, match="takes no images: the model reads text only"):
        llm.generate({"prompt": "Hello", "multi_modal_data": {"image": 1}}, TEN)
    prompt = TokensPrompt(prompt_token_ids=wanted.prompt_token_ids)
    assert llm.generate([prompt, TextPrompt(prompt="Hello")], TEN)[1].outputs == wanted.outputs
    messages, template = [{"role": "user", "content": "Hello"}], "{% for m in messages %}{{ m.content }}{% endfor %}"
    (found,) = llm.chat(messages, TEN, chat_template=template, chat_template_content_format="string", **unused)
    assert found.prompt == "Hello" and found.outputs[0].token_ids == wanted.outputs[0].token_ids
    with pytest.raises(InvalidParams, match="chat_template_content_format"):
        llm.chat(messages, TEN, chat_template_content_format="xml")


def test_engine_args_are_a_dataclass(folder):
    args = EngineArgs(model=folder, use_tqdm_on_load=False, **SMALL | {"max_model_len": 32})
    args.seed = 3
    assert dataclasses.asdict(args)["max_model_len"] == 32 and args.given()["seed"] == 3
    with pytest.raises(TypeError, match="max_modellen"):
        EngineArgs(max_modellen=3)
    with LLM.from_engine_args(args) as llm:
        with pytest.raises(InvalidOption, match="disable_log_stats=False"):
            llm.get_metrics()
        with pytest.raises(InvalidOption, match="profiler_config="):
            llm.start_profile()
        assert llm.llm_engine.model_config.max_model_len == 32


def test_the_asynchronous_engine(folder, llm, monkeypatch):
    (wanted,) = llm.generate("Hello", TEN)

    async def last(results):
        async for result in results:
            final = result
        return final

    async def scenario():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, enable_log_requests=False, **SMALL))
        keep_pace(engine.engine)
        await engine.check_health()
        with monkeypatch.context() as patch, pytest.raises(EngineDead):
            patch.setattr(engine.engine, "failure", EngineDead("no device"))
            assert engine.errored and not engine.is_running and engine.dead_error is engine.engine.failure
            await engine.check_health()
        await engine.pause_generation()  # before any request
        await engine.resume_generation()
        delta = TEN.with_changes(output_kind=RequestOutputKind.DELTA)
        parts = [result async for result in engine.generate("Hello", delta, "0", lora_request=None)]
        assert [token for part in parts for token in part.outputs[0].token_ids] == wanted.outputs[0].token_ids
        found = [result async for result in engine.encode("Hello", None, "1")]
        assert len(found) == 1 and isinstance(found[0].outputs.data, torch.Tensor) and found[0].request_id == "1"
        endless = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
        streams = [engine.generate("Hi", endless, f"long{n}") for n in range(2)]
        assert [len((await anext(stream)).outputs) for stream in streams] == [1, 1]
        assert engine.output_processor.get_num_unfinished_requests() == 2
        running = [asyncio.create_task(last(stream)) for stream in streams]
        await engine.pause_generation(mode="wait")
        assert not engine.output_processor.has_unfinished_requests()
        assert await engine.is_paused() and not engine.engine.load.num_not_started
        assert [len((await task).outputs[0].token_ids) for task in running] == [60, 60]
        waiting = asyncio.create_task(last(engine.generate("Hello", TEN, "2")))
        await asyncio.sleep(0)
        assert not waiting.done()
        await engine.resume_generation()
        assert (await waiting).outputs[0].token_ids == wanted.outputs[0].token_ids
        frozen = engine.generate("Hi", endless, "kept")
        await anext(frozen)
        await engine.pause_generation(mode="keep")
        queued, goes_on = (asyncio.create_task(last(each)) for each in (engine.generate("Hello", TEN, "3"), frozen))
        await asyncio.wait([goes_on], timeout=0.05)
        assert not goes_on.done() and await engine.is_paused()
        await engine.abort("3", internal=False)
        await engine.resume_generation()
        assert len((await goes_on).outputs[0].token_ids) == 60
        aborted = await queued
        assert aborted.finished and aborted.outputs[0].finish_reason == "abort" and not aborted.outputs[0].token_ids
        streams = [engine.generate("Hi", endless, f"abort{n}") for n in range(2)]
        firsts = [await anext(stream) for stream in streams]
        await engine.abort([first.request_id for first in firsts])
        assert [(await last(stream)).outputs[0].finish_reason for stream in streams] == ["abort", "abort"]
        await engine.close()
        with pytest.raises(EngineClosed):
            await engine.check_health()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


@pytest.mark.parametrize("kind", [dict, StructuredOutputsConfig])
def test_defaults_of_structured_output(folder, kind):
    config = kind(backend="xgrammar", disable_any_whitespace=True)
    with LLM(str(folder), structured_outputs_config=config, **SMALL) as llm:
        wanted = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "minItems": 4})
        bias = {ord(" "): 100.0, ord(","): 90.0, ord("]"): 80.0}
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=wanted, logit_bias=bias)
        assert " " not in llm.generate("x", params, use_tqdm=False)[0].outputs[0].text
    with LLM(str(folder), structured_outputs_config=kind(backend="outlines"), **SMALL) as llm:
        params.logit_bias = {ord("\n"): 100.0} | bias
        text = llm.generate("x", params, use_tqdm=False)[0].outputs[0].text
        assert "\n" not in text and " " in text and "  " not in text  # at most one space, as of outlines
    with pytest.raises(InvalidOption, match="structured_outputs_config.*enable_in_reasoning"):
        LLM(str(folder), structured_outputs_config=kind(enable_in_reasoning=True), **SMALL)


def test_engine_args_as_flags_of_a_script(folder):
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model=folder)
    parser.add_argument("--max-tokens", type=int)
    flags = (
        "--max-tokens 3 --max-model-len 64 --max_num_seqs 4 --enforce-eager --no-enable-prefix-caching --dtype float32"
    )
    given = parser.parse_args([*flags.split(), "--hf-overrides", '{"rope_theta": 5.0}', "--trust-remote-code"])
    args = EngineArgs.from_cli_args(given)
    wanted = dict(max_model_len=64, max_num_seqs=4, enforce_eager=True, enable_prefix_caching=False, dtype="float32")
    assert args.given() == wanted | {"model": folder, "hf_overrides": {"rope_theta": 5.0}, "trust_remote_code": True}
    del given.max_tokens
    with LLM(**vars(given)) as llm:
        assert llm.llm_engine.model_config.max_model_len == 64
    short = EngineArgs.from_cli_args(
        parser.parse_args(["-tp", "2", "-dp", "1", "-pp", "1", "-q", "fp8", "-ep", "-dpn", "0"])
    )
    sizes = dict(tensor_parallel_size=2, data_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0)
    assert short.given() == sizes | dict(model=folder, quantization="fp8", enable_expert_parallel=True)
