"""Two ranks on one GPU: tokens of one rank, over NCCL with captured collectives, with drafts and logits processors, and
a rank that is killed.

Both ranks share the only GPU of a test machine (SLIPSTREAM_RANKS_SHARE_GPU), so NCCL passes data through sockets.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from slipstream import LLM, AdapterLogitsProcessor, LoRARequest, SamplingParams
from slipstream.base.errors import EngineDead, InvalidOption, ReplicaLost
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.params.structured import StructuredOutputsParams
from tiny import write_tiny
from tiny_adapter import write_adapter
from tiny_drafters import write_few, write_mtp

pytestmark = pytest.mark.cuda

OPTIONS = dict(
    use_tqdm_on_load=False,
    max_model_len=128,
    page_size=16,
    num_pages=64,
    max_num_seqs=4,
    dtype="float32",
    device="cuda",
    max_num_batched_tokens=64,
)
PROMPTS = [[i + 3, *range(20, 30 + 7 * i), i + 5] for i in range(4)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-c]{2,9}")),
]


@pytest.fixture(autouse=True)
def share(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_RANKS_SHARE_GPU", "1")


def run(llm):
    outputs = llm.generate(PROMPTS, [PARAMS[i % 3] for i in range(len(PROMPTS))], use_tqdm=False)
    again = llm.generate(PROMPTS[-2:], PARAMS[0], use_tqdm=False)  # cached prefixes
    return [each.outputs[0].token_ids for each in (*outputs, *again)]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"enforce_eager": True, "depth": 0}),
        ("qwen3", {"depth": 2}),
        ("qwen3_moe", {"depth": 1}),
        ("qwen3_next", {"depth": 1}),
    ],
    ids=str,
)
def test_two_ranks_give_the_tokens_of_one_until_one_is_killed(tmp_path, family, options):
    folder = str(write_tiny(tmp_path, family, head_dim=64))
    with LLM(folder, **OPTIONS | options) as llm:
        wanted = run(llm)
    with LLM(folder, **OPTIONS | options, tensor_parallel_size=2) as llm:
        assert run(llm) == wanted
        graphs = llm.core.executor.runner.graphs
        assert not graphs.gave_up and (options.get("enforce_eager") or graphs.num_captured > 4)
        llm.core.scheduler.check()
        if family == "qwen3":
            check_killed_rank(llm, is_busy=options["depth"] == 2)


def check_killed_rank(llm, is_busy):
    """The engine ends with an error that names the rank; NCCL would wait for it for ever."""
    victim = llm.core.executor._ranks.children[0].process
    if is_busy:
        os.kill(victim.pid, signal.SIGSTOP)  # the collectives of the next step wait for it
        threading.Timer(1.5, os.kill, (victim.pid, signal.SIGKILL)).start()
    else:
        os.kill(victim.pid, signal.SIGKILL)
        while not llm.core.has_requests():  # an idle engine has a turn of its loop to report it
            time.sleep(0.01)
    with pytest.raises(EngineDead, match="rank 1 has ended: killed by SIGKILL"):
        llm.generate(PROMPTS, PARAMS[0], use_tqdm=False)


def write_drafting(folder, method):
    """A model, and its speculative_config. The models repeat themselves, so that some drafts are right."""
    if method == "mtp":
        model, spec = write_mtp(folder, kv_lora_rank=512, qk_rope_head_dim=64), {}
    else:
        model, spec = write_few(folder / "model", head_dim=64), {}
        if method == "draft_model":
            spec = {"model": str(write_few(folder / "drafter", seed=1, head_dim=64))}
    return str(model), {"method": method, "num_speculative_tokens": 3} | spec


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ngram", {"enforce_eager": True, "depth": 0}),
        ("ngram", {"depth": 2}),
        ("draft_model", {"depth": 2}),
        ("mtp", {"depth": 1}),
    ],
    ids=str,
)
def test_drafts_of_two_ranks_change_no_token(tmp_path, method, options):
    """Drafts beside grammars and penalties, in captured heads with collectives."""

    def run_both(llm):
        more = llm.generate(PROMPTS, PARAMS[0].with_changes(max_tokens=40), use_tqdm=False)
        return run(llm), [each.outputs[0].token_ids for each in more]

    folder, spec = write_drafting(tmp_path, method)
    with LLM(folder, **OPTIONS | options) as llm:
        wanted = run_both(llm)
    with LLM(folder, **OPTIONS | options, tensor_parallel_size=2, speculative_config=spec) as llm:
        llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        for _ in range(2):
            assert run_both(llm) == wanted
        counts = llm.core.scheduler.drafts.counts
        assert 0 < counts.num_accepted < counts.num_drafts
        assert not llm.core.executor.runner.graphs.gave_up
        llm.core.scheduler.check()


class Shift(AdapterLogitsProcessor):
    """Sees logits, and runs on rank 0 only: raises every third token from one that depends on the output."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if "shift" not in (params.extra_args or {}):
            return None

        def shift(prompt, output, logits):
            logits[(sum(output) + params.extra_args["shift"]) % 3 :: 3] += 4.0
            return logits

        return shift


def narrow(prompt, output):
    """Sees tokens: a mask that travels to all ranks."""
    start = (sum(prompt) + sum(output)) % 200
    return range(start, start + 90)


def prefer(output):
    return {sum(output) % 300: 3.0, 9: -float("inf")}


narrow.needs = prefer.needs = "tokens"


@pytest.mark.parametrize("options", [{"enforce_eager": True, "depth": 0}, {"depth": 2, "drafts": "ngram:3"}], ids=str)
def test_logits_processors_of_two_ranks_give_the_tokens_of_one(tmp_path, options):
    """Drafts are of the requests without processors."""
    folder = str(write_tiny(tmp_path, "qwen3", head_dim=64))
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [
        greedy.with_changes(extra_args={"shift": 1}),
        SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logits_processors=[narrow, prefer]),
        SamplingParams(seed=6, max_tokens=12, ignore_eos=True, extra_args={"shift": 2}, logits_processors=[prefer]),
        greedy,
    ]
    found = []
    for num_ranks in (1, 2):
        more = {"tensor_parallel_size": num_ranks, "logits_processors": [Shift]}
        with LLM(folder, **OPTIONS | options | more) as llm:
            if llm.core.scheduler.drafts is not None:
                llm.core.scheduler.drafts.length = None
            found.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, asked, use_tqdm=False)])
            plain = [params.with_changes(extra_args=None, logits_processors=None) for params in asked]
            without = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, plain, use_tqdm=False)]
            assert [a == b for a, b in zip(found[-1], without, strict=True)] == [False, False, False, True]
    assert found[0] == found[1]


def test_experts_adapters_and_a_second_tier_of_two_ranks(tmp_path):
    folder = str(write_tiny(tmp_path, "qwen3_moe", head_dim=64))
    attention = [f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"]
    adapter = LoRARequest("a", 1, str(write_adapter(tmp_path / "adapter", tmp_path, attention, spread=0.5)))
    options = OPTIONS | {"enable_lora": True, "max_lora_rank": 8, "num_pages": 16}
    with LLM(folder, **options) as llm:
        wanted = (
            run(llm),
            [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS[0], lora_request=adapter)],
        )
    more = dict(tensor_parallel_size=2, enable_expert_parallel=True, kv_offloading_size=0.01)
    with LLM(folder, **options, **more) as llm:
        adapted = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS[0], lora_request=adapter)]
        assert (run(llm), adapted) == wanted
        llm.generate([[200 + i, *range(90, 190)] for i in range(4)], PARAMS[0], use_tqdm=False)  # takes all pages
        assert run(llm) == wanted[0] and llm.core.scheduler.cache.tier.bytes_loaded


def test_engines_that_share_experts_give_the_tokens_of_one_until_one_is_killed(tmp_path):
    folder = str(write_tiny(tmp_path, "qwen3_moe", head_dim=64))
    with LLM(folder, **OPTIONS) as llm:
        wanted = run(llm)
    with LLM(folder, **OPTIONS, data_parallel_size=2, enable_expert_parallel=True) as llm:
        assert run(llm) == wanted
        stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        next(stream)
        replicas = llm._engine.client.replicas
        idle = next(each for each in replicas if not each.requests)
        os.kill(idle.pid, signal.SIGKILL)  # it has no request, but a part of the experts
        with pytest.raises(ReplicaLost, match="died after it had sent a part"):
            list(stream)


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"depth": 2}], ids=str)
def test_drafts_of_engines_that_share_experts_change_no_token(tmp_path, options):
    """Also beside an engine that has no requests: its padding steps have as many tokens as the drafts of the other."""
    folder = str(write_tiny(tmp_path, "qwen3_moe", head_dim=64))
    few = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, allowed_token_ids=[7, 8, 9])
    with LLM(folder, **OPTIONS | options) as llm:
        wanted = [run(llm), *([each.outputs[0].token_ids] for each in llm.generate(PROMPTS, few, use_tqdm=False))]
    more = dict(data_parallel_size=2, enable_expert_parallel=True, drafts="ngram:3")
    with LLM(folder, **OPTIONS | options | more) as llm:
        assert run(llm) == wanted[0]
        alone = [llm.generate([prompt], few, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
        assert [[each] for each in alone] == wanted[1:]


def test_fewer_gpus_than_ranks_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_RANKS_SHARE_GPU")
    folder = str(write_tiny(tmp_path, "qwen3"))
    with pytest.raises(InvalidOption, match="tensor_parallel_size is 4, and [0-3] GPUs are visible"):
        estimate_build(make_options(model=folder, device="cuda", tensor_parallel_size=4))
