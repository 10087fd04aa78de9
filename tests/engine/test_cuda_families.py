"""Experts, hybrids and shared caches on a GPU: eager, captured, chunked or cached, the tokens are those of the CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tiny import write_tiny
from tiny_saved import NEMOTRON_3

pytestmark = pytest.mark.cuda

HEADS = {"head_dim": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", HEADS),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", HEADS),
    "olmoe": ("olmoe", {}),
    "glm4_moe": ("glm4_moe", HEADS),
    "gpt_oss": ("gpt_oss", HEADS),
    "gemma3n": ("gemma3n", HEADS),
    "gemma4": ("gemma4", {"head_dim": 64, "global_head_dim": 128}),
    "gemma4 with heads of 512": ("gemma4", {"head_dim": 256, "global_head_dim": 512}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "qwen3_next": ("qwen3_next", HEADS),
    "qwen3_5": ("qwen3_5", HEADS),
    "qwen3_5_moe": ("qwen3_5_moe", HEADS),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "granite_moe_hybrid": ("granite_moe_hybrid", {}),
    "bamba": ("bamba", {}),
    "falcon_h1": ("falcon_h1", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_3_latent": ("nemotron_h", {**NEMOTRON_3, "moe_latent_size": 24}),
    "jamba": ("jamba", {}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "ministral3": ("ministral3", HEADS),  # queries scaled by position
    "granite": ("granite", HEADS),  # scaled sublayers
    "apertus": ("apertus", HEADS),  # an activation with weights
    "hunyuan": ("hunyuan_v1_dense", HEADS),  # norms after rope
    "glm4": ("glm4", HEADS),  # a part of a head rotates, norms after
    "cohere": ("cohere", {"use_qk_norm": True, "hidden_size": 256}),  # sublayers side by side, layer norms of heads
    "cohere2": ("cohere2", {"hidden_size": 256}),  # layers without rope
    "nemotron": ("nemotron", HEADS),  # layer norms
    "gpt_neox": ("gpt_neox", {"hidden_size": 256}),  # sublayers side by side, each with a norm
    "gpt2": ("gpt2", {"n_embd": 256}),  # a table of positions
}
TEXT = random.Random(0).choices(range(300), k=230)
PROMPTS = [TEXT[:118], TEXT[:200], [*TEXT[:190], 7, 8, 9], [5], [*TEXT[:70], 3], TEXT[160:215]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
OPTIONS = dict(
    dtype="float32", max_model_len=256, max_num_seqs=8, num_pages=400, max_num_batched_tokens=1024,
    use_tqdm_on_load=False,
)  # fmt: skip


@dataclass
class Wanted:
    folder: str
    greedy: list[Any]
    sampled: list[Any]


@pytest.fixture(scope="module", params=FAMILIES)
def wanted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    family, overrides = FAMILIES[request.param]
    folder = str(write_tiny(tmp_path_factory.mktemp("tiny"), family, **overrides))
    with LLM(folder, **OPTIONS, device="cpu", num_threads=1) as llm:
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (GREEDY, SAMPLED)]
    return Wanted(folder, *found)


def check(llm: LLM, wanted: list[Any], params: SamplingParams) -> None:
    got = llm.generate(PROMPTS, params, use_tqdm=False)
    for ours, other in zip(got, wanted, strict=True):
        for sample, expected in zip(ours.outputs, other.outputs, strict=True):
            assert sample.token_ids == expected.token_ids
            for step, values in zip(sample.logprobs, expected.logprobs, strict=True):
                assert all(abs(step[token].logprob - values[token].logprob) < 1e-3 for token in values if token in step)
    llm.core.scheduler.check()


@pytest.mark.parametrize(
    "options",
    [
        dict(enforce_eager=True, depth=0, enable_prefix_caching=False),
        dict(depth=1, enable_prefix_caching=False),
        dict(depth=2, max_num_batched_tokens=43),
        dict(depth=2, num_pages=136, page_size=4, max_num_batched_tokens=61),
    ],
    ids=["eager", "graphs", "chunked and cached", "preempted"],
)
def test_tokens_are_those_of_the_cpu(wanted: Wanted, options: dict[str, Any]) -> None:
    with LLM(wanted.folder, **(OPTIONS | options), device="cuda") as llm:
        for _ in range(3):  # eager, captured, replayed; the cache is warm from the second time on
            check(llm, wanted.greedy, GREEDY)
            check(llm, wanted.sampled, SAMPLED)
        graphs = llm.core.executor.graphs
        assert (graphs.num_captured > 0) == (not options.get("enforce_eager", False))
        assert not graphs.gave_up


def test_launching_never_waits_in_steady_state(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    with LLM(wanted.folder, **(OPTIONS | dict(depth=2, max_num_batched_tokens=43)), device="cuda") as llm:
        hot_path = llm.core.executor.hot_path
        for mode in ("", "", "error"):  # eager, captured, replayed
            hot_path.mode = mode
            check(llm, wanted.greedy, GREEDY)
        assert not hot_path.log.found
