"""Mixtures of experts through the whole engine: scheduling, layouts of checkpoints, memory, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from replay_device import ReplayDevice, captured_forwards
from slipstream import LLM, SamplingParams
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from tiny import write_tiny, write_weights

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss"]
PROMPTS = [[5, 9, 17, 40, 41, 42, 43], [7] * 19, [100, 3], list(range(30, 61)), [5, 9, 17, 40, 41, 42, 43, 44]]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=7, temperature=0.8, seed=3, n=2, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=1.0, seed=4, top_k=20, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
]


def tokens(folder: Path, **options) -> list[list[list[int]]]:
    options = {"max_model_len": 64, "page_size": 4, "dtype": "float64", "num_threads": 1} | options
    with LLM(str(folder), use_tqdm_on_load=False, **options) as llm:
        calls = 2 if llm.config.cache.prefix_caching else 1  # the second time from the prefix cache
        results = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(calls)]
        found = [[[*sample.token_ids] for sample in result.outputs] for result in results[0]]
        assert found == [[[*sample.token_ids] for sample in result.outputs] for result in results[-1]]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_scheduling(family, tmp_path):
    folder = write_tiny(tmp_path, family, torch.float64)
    alone = tokens(folder, max_num_seqs=1, enable_prefix_caching=False, depth=0)
    for options in (
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"depth": 2},
        {"num_pages": 17},  # too few for all rows at once
    ):
        assert tokens(folder, **options) == alone, options


def test_padding_of_captured_steps_changes_nothing(tmp_path):
    """Decode steps are padded to the sizes of graphs; padding is routed to no expert."""
    folder = write_tiny(tmp_path, "qwen3_moe", torch.float64)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    options = {"max_model_len": 64, "page_size": 4, "dtype": "float64", "num_threads": 1, "depth": 0}
    found = []
    for device in (None, ReplayDevice(0)):
        with LLM(str(folder), use_tqdm_on_load=False, _device=device, **options) as llm:
            llm.core.executor.graphs.token_sizes = []  # the CPU's attention takes no padded chunks
            results = llm.generate(PROMPTS[:3], params, use_tqdm=False)  # three rows, padded to four
            found.append([list(result.outputs[0].token_ids) for result in results])
            captured = captured_forwards(llm.core.executor.graphs)
    assert found[0] == found[1]
    assert any(key[1].rows == 4 for key in captured)


STACKED = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "lfm2_moe": ("feed_forward", "w1", "w3", "w2"),
}


@pytest.mark.parametrize("family", STACKED)
def test_stacked_experts_load_as_single_ones_do(family, tmp_path):
    folder = write_tiny(tmp_path, family, torch.float64)
    expected = tokens(folder)
    weights = load_file(folder / "model.safetensors")
    root, gate, up, down = STACKED[family]
    for layer in range(1, 4) if family == "lfm2_moe" else range(2):
        at = f"model.layers.{layer}.{root}.experts"
        count = len([name for name in weights if name.startswith(at) and name.endswith(f"{gate}.weight")])
        parts = [[weights.pop(f"{at}.{e}.{name}.weight") for e in range(count)] for name in (gate, up, down)]
        both = [torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)]
        weights |= {f"{at}.gate_up_proj": torch.stack(both), f"{at}.down_proj": torch.stack(parts[2])}
    write_weights(folder, weights)
    assert tokens(folder) == expected


def change(folder: Path, **facts) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | facts))
    return folder


@pytest.mark.parametrize(
    ("family", "facts", "error", "words"),
    [
        ("olmoe", {"clip_qkv": 8.0}, UnsupportedModel, "clip_qkv"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            BadCheckpoint,
            "quantised by mxfp4, and none is: there is no tensor named blocks",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, UnsupportedModel, "swiglu_limit of 5.0"),
        ("gpt_oss", {"is_causal": False}, UnsupportedModel, "sinks are supported for causal attention only"),
        ("qwen3_moe", {"hidden_act": "gelu"}, UnsupportedModel, "only silu"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, BadCheckpoint, "8 experts and takes 9"),
        ("qwen3_moe", {"moe_intermediate_size": None}, BadCheckpoint, "no moe_intermediate_size"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(family, facts, error, words, tmp_path):
    folder = change(write_tiny(tmp_path, family), **facts)
    with pytest.raises(error, match=words):
        LLM(str(folder), max_model_len=64, use_tqdm_on_load=False)


def test_a_missing_expert_is_named(tmp_path):
    folder = write_tiny(tmp_path, "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    write_weights(folder, weights)
    with pytest.raises(BadCheckpoint, match=r"1 missing \(layers.1.mlp.experts.5.up.weight\)"):
        LLM(str(folder), max_model_len=64, use_tqdm_on_load=False)
