"""`tensor_parallel_size=2`: the tokens and logprobs of one rank; failures of ranks; what is refused."""

from __future__ import annotations

import json
import os
import signal

import pytest

from patience import PATIENCE
from rank_threads import run_ranks_as_threads
from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.base.errors import EngineDead, InvalidOption
from slipstream.config.checks import check_rank_options
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build, open_models
from slipstream.params.structured import StructuredOutputsParams
from slipstream.serve.cli.main import main
from tiny import write_tiny
from tiny_adapter import write_adapter

SMALL = dict(
    max_model_len=64,
    num_pages=64,
    page_size=4,
    max_num_seqs=4,
    num_threads=1,
    dtype="float64",
    use_tqdm_on_load=False,
    enable_lora=True,
    max_lora_rank=8,
)
DRAFTS = {"drafts": "suffix:2"}  # of engines with two ranks
PROMPTS = [[i, i + 1, i + 2] * (1 + i % 5) for i in range(1, 9)]


def prefer(output_ids):
    return {len(output_ids) % 7: 2.0, 9: -float("inf")}


prefer.needs = "tokens"

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3),
    SamplingParams(
        temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, repetition_penalty=1.2, logits_processors=[prefer]
    ),
    SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-c]{2,6}")),  # masks
]


def run(folder, adapter):
    with LLM(folder, **SMALL) as llm:
        return generate(llm, adapter)


def generate(llm, adapter):
    outputs = llm.generate(PROMPTS, [PARAMS[i % 3] for i in range(len(PROMPTS))], use_tqdm=False)
    again = llm.generate(PROMPTS[:2], PARAMS[0], use_tqdm=False)  # cached prefixes
    adapted = llm.generate(PROMPTS[:2], PARAMS[0], use_tqdm=False, lora_request=LoRARequest("a", 1, str(adapter)))
    assert [each.outputs[0].token_ids for each in adapted] != [each.outputs[0].token_ids for each in again]
    return [each.outputs[0] for each in (*outputs, *again, *adapted)]


def check_equal(found, wanted):
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        for of_one, of_other in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert of_one.keys() == of_other.keys()
            for token, logprob in of_one.items():
                assert logprob.logprob == pytest.approx(of_other[token].logprob, abs=1e-9)


def check_handoff(folder, port, wanted, caplog):
    """Ranks of another engine fetch their parts of the pages; an engine of one rank has other pages."""
    transfer = {"kv_role": "kv_consumer", "kv_peers": [f"127.0.0.1:{port}"], "kv_buffer_size": 2**22}
    transfer["kv_timeout"] = PATIENCE
    params = [PARAMS[i % 3] for i in range(len(PROMPTS))]
    options = SMALL | DRAFTS | {"kv_transfer_config": transfer}
    with LLM(folder, **options, tensor_parallel_size=2) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        check_equal([each.outputs[0] for each in outputs], wanted[: len(PROMPTS)])
        assert [each.num_cached_tokens for each in outputs] == [(len(each) - 1) // 4 * 4 for each in PROMPTS]
        llm.core.scheduler.check()
    with LLM(folder, **options) as llm:
        assert not llm.generate(PROMPTS[:1], params[0], use_tqdm=False)[0].num_cached_tokens
    assert "tensor_parallel_size is 2 there and 1 here" in caplog.text


def test_two_ranks_give_the_results_of_one_until_one_is_killed(tmp_path, capfd, caplog, monkeypatch):
    folder = str(write_tiny(tmp_path, "qwen3"))
    attention = [f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"]
    adapter = write_adapter(tmp_path / "adapter", tmp_path, attention, spread=0.5)
    wanted = run(folder, adapter)
    transfer = {"kv_role": "kv_producer", "kv_port": 0, "kv_buffer_size": 2**22}
    options = SMALL | DRAFTS | {"num_pages": 18, "kv_transfer_config": transfer}
    with LLM(folder, **options, tensor_parallel_size=2) as llm:
        llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        check_equal(generate(llm, adapter), wanted)
        assert (num_accepted := llm.core.scheduler.drafts.counts.num_accepted) > 0
        assert llm.core.scheduler.cache.tier.bytes_loaded  # each rank copies its part of the pages
        llm.save_record(tmp_path / "record")
        run_ranks_as_threads(monkeypatch)  # those of later engines: processes take seconds to start
        check_handoff(folder, llm.core.handoff.server.port, wanted, caplog)
        os.kill(llm.core.executor._ranks.children[0].process.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="rank 1"):
            llm.generate(PROMPTS, PARAMS[0], use_tqdm=False)
    assert main(["replay", str(tmp_path / "record"), "--json"]) == 0  # on two ranks
    report = json.loads(capfd.readouterr().out)
    num_tokens = sum(len(each.token_ids) for each in wanted) - num_accepted  # compared together with the draw before
    assert (report["difference"], report["num_skipped"]) == (None, 0)
    assert report["num_compared"] >= num_tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, "4 attention heads; give a number that divides it"),
        ({"tensor_parallel_size": 0}, "1 to 64"),
        ({"speculative_config": {"method": "ngram", "draft_tensor_parallel_size": 1}}, "give the same number"),
    ],
)
def test_options_of_one_rank_are_refused_by_name(tmp_path, options, words):
    folder = str(write_tiny(tmp_path, "llama"))
    with pytest.raises(InvalidOption, match=words):
        estimate_build(make_options(**{"model": folder, "device": "cpu", "tensor_parallel_size": 2, **options}))


def test_fewer_gpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    options = make_options(tensor_parallel_size=4)
    with pytest.raises(InvalidOption, match="tensor_parallel_size is 4, and 3 GPUs are visible"):
        check_rank_options(options, "cuda")
    check_rank_options(make_options(tensor_parallel_size=3), "cuda")
    check_rank_options(make_options(tensor_parallel_size=3, drafts="ngram"), "cuda")
    check_rank_options(options, "cpu")
    check_rank_options(make_options(tensor_parallel_size=4, distributed_executor_backend="ray"), "cuda")
    monkeypatch.setenv("SLIPSTREAM_RANKS_SHARE_GPU", "1")
    with pytest.raises(InvalidOption, match="give num_pages"):
        check_rank_options(options, "cuda")
    check_rank_options(make_options(tensor_parallel_size=4, num_pages=9), "cuda")


def test_several_models_are_refused(tmp_path):
    with pytest.raises(InvalidOption, match="serve it alone"):
        open_models([make_options(tensor_parallel_size=2), make_options(task="embed")])
