"""Gemma 3n and 4 (shared KV caches, several head sizes) and DeepSeek (latents), through the whole engine (law 7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from law7 import PAIRED, PROMPTS, options_of
from slipstream import LLM, SamplingParams
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from tiny import write_tiny

EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("gemma3n", {}),
    "gemma4": ("gemma4", EXPERTS),
    "deepseek": ("deepseek_v3", {}),
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, top_k=20, n=2, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
]


Found = tuple[list[list[int]], list[dict[int, float]]]
"""The tokens of each sample, and logprobs of outputs and prompts by token, step by step."""


def generate(folder: Path, **cell: Any) -> tuple[list[Found], int]:
    """What each call gave, and how many requests were preempted."""
    with LLM(str(folder), use_tqdm_on_load=False, max_model_len=60, **options_of(few_pages=16, **cell)) as llm:
        # the second time from the cache; requests that run one after another find each other's prefixes the first time
        calls = 2 if cell.get("cached") and cell["batched"] else 1
        results = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(calls)]
        assert llm.core.scheduler.cache.num_hits > 0 or not cell.get("cached")
        llm.core.scheduler.cache.check()
        return [read(each) for each in results], llm.core.scheduler.num_preemptions


def read(results: list[Any]) -> Found:
    samples = [sample for result in results for sample in result.outputs]
    steps = [step for sample in samples for step in sample.logprobs or []]
    steps += [step for result in results for step in result.prompt_logprobs or [] if step is not None]
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in steps]
    return [list(sample.token_ids) for sample in samples], logprobs


def assert_same(found: Found, wanted: Found, cell: Any = None) -> None:
    assert found[0] == wanted[0], cell
    assert len(found[1]) == len(wanted[1]) > 40
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert ours.keys() == theirs.keys() and all(abs(ours[token] - theirs[token]) < 1e-9 for token in ours), cell


@pytest.mark.parametrize("name", MODELS)
def test_scheduling_does_not_change_tokens(name: str, tmp_path: Path) -> None:
    family, facts = MODELS[name]
    folder = write_tiny(tmp_path, family, **facts)
    (wanted,), _ = generate(folder, batched=False)
    num_preempted = 0
    for cell in (PAIRED[0], PAIRED[1], PAIRED[3]):
        both, num = generate(folder, **cell)
        num_preempted += num
        for found in both:
            assert_same(found, wanted, cell)
    assert num_preempted > 0


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_random_weights_and_the_memory_plan(family: str, tmp_path: Path) -> None:
    """A model from its config alone generates, within the memory that was planned for its weights."""
    folder = write_tiny(tmp_path, family)
    (folder / "model.safetensors").unlink()
    with LLM(
        str(folder), use_tqdm_on_load=False, load_format="dummy", max_model_len=64, num_pages=64, num_threads=1
    ) as llm:
        (result,) = llm.generate([[5, 6, 7]], PARAMS[0], use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 14


def change(folder: Path, **facts: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | facts))
    return folder


@pytest.mark.parametrize(
    ("family", "facts", "error", "words"),
    [
        ("gemma3n", {"num_kv_shared_layers": 4}, BadCheckpoint, "no layer before them is of the kind of layer 1"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5, 0.5]}, BadCheckpoint, "activation_sparsity_pattern.* has 2"),
        ("gemma3n", {"is_causal": False}, UnsupportedModel, "shared KV caches are supported for causal attention only"),
        ("gemma4", {"use_bidirectional_attention": "all"}, UnsupportedModel, "shared KV caches"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, UnsupportedModel, "per_layer_config"),
        ("gemma4", EXPERTS | {"hidden_activation": "silu"}, UnsupportedModel, "experts of silu is not supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedModel, "topk_method noaux_tc is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedModel, "norm_topk_prob True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func softmax"),
        ("deepseek_v3", {"moe_layer_freq": 2}, UnsupportedModel, "moe_layer_freq 2"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            BadCheckpoint,
            "no tensor named weight_scale",
        ),
        ("deepseek_v3", {"architectures": ["DeepseekV32ForCausalLM"]}, UnsupportedModel, "DeepseekV32.* is not an"),
        ("gemma4", {"architectures": ["Gemma4AssistantForCausalLM"]}, UnsupportedModel, "Gemma4Assistant.* is not an"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    family: str, facts: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = change(write_tiny(tmp_path, family), **facts)
    with pytest.raises(error, match=words):
        LLM(str(folder), max_model_len=64, use_tqdm_on_load=False)
