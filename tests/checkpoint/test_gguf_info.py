from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.gguf_info import gguf_model_info
from slipstream.checkpoint.locate import LocatedModel
from slipstream.checkpoint.model_info import ModelInfo

FACTS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.head_count": 4,
}


def info(path: Path, *, arch: str = "llama", tensors: tuple[str, ...] = (), **given: Any) -> ModelInfo:
    """Of a file with these facts; a dot in a name is written as two underscores, None leaves the fact out."""
    facts = {f"{arch}.{key}": value for key, value in FACTS.items()}
    for name, value in given.items():
        key = name.replace("__", ".")
        facts[key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}"] = value
    writer = gguf.GGUFWriter(path / "m.gguf", arch)
    for key, value in facts.items():
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((50, 16), np.float32))
    for name in tensors:
        writer.add_tensor(name, np.zeros(2, np.float32))
    return _close(writer, path)


def _close(writer: gguf.GGUFWriter, path: Path) -> ModelInfo:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_model_info(GgufFile(path / "m.gguf"))


def test_the_default_model(default_model: LocatedModel) -> None:
    found = gguf_model_info(GgufFile(default_model.path))
    assert found.architecture == "LlamaForCausalLM"
    assert (found.vocab_size, found.hidden_size, found.ffn_size, found.num_layers) == (49152, 576, 1536, 30)
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.max_positions) == (9, 3, 64, 8192)
    assert (found.rope.kind, found.rope.theta, found.tied_embeddings) == ("default", 100_000.0, True)
    assert (found.eos_token_ids, found.bos_token_id) == ((2,), 1)
    assert found.norm_eps == pytest.approx(1e-5)
    assert found.extra["llama.vocab_size"] == 49152 and "tokenizer.ggml.tokens" not in found.extra


def test_what_a_file_leaves_out_has_the_usual_value(tmp_path: Path) -> None:
    found = info(tmp_path)
    assert (found.vocab_size, found.head_dim, found.num_kv_heads) == (50, 4, 4)
    assert (found.rope.theta, found.tied_embeddings, found.eos_token_ids) == (10_000.0, True, ())
    assert (found.attention_bias, found.mlp_bias, found.bos_token_id) == (False, False, None)


def test_what_a_file_says_is_taken(tmp_path: Path) -> None:
    found = info(
        tmp_path,
        arch="qwen3",
        tensors=("output.weight", "blk.0.attn_q.bias"),
        attention__key_length=8,
        attention__head_count_kv=[2, 2],
        rope__freq_base=1e6,
        rope__dimension_count=8,
        tokenizer__ggml__eos_token_id=7,
        tokenizer__ggml__eot_token_id=9,
        tokenizer__ggml__bos_token_id=1,
    )
    assert (found.architecture, found.head_dim, found.num_kv_heads) == ("Qwen3ForCausalLM", 8, 2)
    assert (found.tied_embeddings, found.attention_bias) == (False, True)
    assert (found.eos_token_ids, found.bos_token_id, found.rope.theta) == ((7, 9), 1, 1e6)


def test_scaled_positions(tmp_path: Path) -> None:
    linear = info(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0).rope
    assert (linear.kind, linear.factors) == ("linear", {"factor": 4.0})
    assert info(tmp_path, rope__scale_linear=2.0).rope.factors == {"factor": 2.0}
    assert info(tmp_path, rope__scaling__type="none").rope.kind == "default"
    yarn = info(
        tmp_path,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32,
        rope__scaling__yarn_beta_fast=16.0,
    ).rope
    expected = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
    assert (yarn.kind, yarn.factors) == ("yarn", expected)


def llama3(path: Path, divisors: list[float]) -> ModelInfo:
    writer = gguf.GGUFWriter(path / "m.gguf", "llama")
    for key, value in {**FACTS, "embedding_length": 256, "attention.head_count": 2}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 500_000.0)
    writer.add_tensor("token_embd.weight", np.zeros((5, 256), np.float32))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    return _close(writer, path)


def test_the_scaling_of_llama_3_is_recognised_by_its_numbers(tmp_path: Path) -> None:
    """The divisors as the Llama 3 paper's rule gives them, one frequency at a time."""
    divisors = []
    for place in range(64):
        wave = 2 * np.pi * 500_000.0 ** (place / 64)
        if wave < 8192 / 4:
            divisors.append(1.0)
        elif wave > 8192 / 1:
            divisors.append(32.0)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 32.0 + smooth))
    assert len(set(divisors)) > 5
    rope = llama3(tmp_path, divisors).rope
    assert (rope.kind, rope.theta) == ("llama3", 500_000.0)
    assert rope.factors == {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(UnsupportedModel, match="not Llama 3's"):
        llama3(tmp_path, [2.0, *divisors[1:]])
    with pytest.raises(BadCheckpoint, match=r"F32 \[64\]"):
        llama3(tmp_path, divisors[:5])


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(arch="mamba"), "architecture 'mamba'; .* run in GGUF files.*similar names are.*docs/models.md"),
        (dict(expert_count=8), "mixture of 8 experts"),
        (dict(arch="nomic-bert"), "architecture 'nomic-bert'; .* from folders with safetensors"),
        (dict(attention__causal=False), "lets every token see the whole text"),
        (dict(arch="qwen2", attention__sliding_window=32), "window of 32"),
        (dict(rope__dimension_count=2), "rotates 2 of 4"),
        (dict(feed_forward_length=[24, 48]), "layers that differ in llama.feed_forward_length"),
        (dict(rope__scaling__type="longrope"), "'longrope'"),
    ],
)
def test_what_we_do_not_run_is_named(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        info(tmp_path, **given)


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(block_count=None), "llama.block_count is None"),
        (dict(block_count=0), "llama.block_count is 0"),
        (dict(context_length="long"), "llama.context_length is 'long'"),
        (dict(embedding_length=32), r"shape \[50, 16\], it must be \[vocabulary, 32\]"),
        (dict(rope__freq_base=float("nan")), "llama.rope.freq_base is nan"),
    ],
)
def test_facts_that_cannot_be_are_named(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        info(tmp_path, **given)


def test_a_vocabulary_alone_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in FACTS.items():
        writer.add_uint32(f"llama.{key}", value)
    with pytest.raises(BadCheckpoint, match="no tensor token_embd.weight"):
        _close(writer, tmp_path)
