"""Models divided among ranks, each in a thread: the logits of the whole model, or a refusal by name."""

from __future__ import annotations

import gguf
import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from quantized_checkpoint import METHODS, quantize
from slipstream.base.errors import InvalidOption, UnsupportedModel
from slipstream.checkpoint.quantization import ONLINE_FP8
from slipstream.nn import load as loading
from slipstream.nn.layers.layer import connect_ranks
from thread_ranks import run_ranks
from tiny import write_tiny
from tiny_gguf import K_SIZES, write_gguf
from tiny_saved import NEMOTRON_3

STEPS = [{"a": [3, 1, 4, 1, 5, 9, 2], "b": [6, 5, 3, 5]}, {"a": [8], "b": [9]}, {"a": [7], "b": [9, 3, 2]}]


def logits_of(model):
    runner = HandRunner(model, model.norm.weight.dtype)
    with torch.no_grad():
        return torch.cat([logits for step in STEPS for logits in runner.run(step).values()])


@pytest.mark.parametrize(
    ("family", "changes", "num_ranks"),
    [
        ("llama", {}, 2),
        ("llama", {}, 4),  # fewer key heads than ranks
        ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
        ("qwen2", {}, 2),
        ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}, 2),
        ("mistral", {}, 2),
        ("gemma2", {}, 2),
        ("gemma3", {}, 2),
        ("gemma", {}, 2),
        ("smollm3", {}, 2),
        ("granite", {}, 2),
        ("arcee", {}, 2),
        ("seed_oss", {}, 2),
        ("starcoder2", {}, 2),
        ("stablelm", {}, 2),
        ("hunyuan_v1_dense", {}, 2),
        ("mixtral", {}, 2),
        ("qwen2_moe", {}, 2),  # a shared expert with a gate
        ("glm4_moe", {}, 2),  # dense layers, a bias of the choice
        ("gpt_oss", {}, 2),  # sinks; experts with biases, stored as one tensor
        ("phi", {"vocab_size": 307, "tie_word_embeddings": True}, 2),  # a bias of the tied projection to tokens
        ("phi3", {}, 2),  # q, k and v in one tensor, gate and up too
        ("glm", {}, 2),  # rotation in pairs
        ("gpt_neox", {}, 2),  # q, k and v of a head are neighbours
        ("deepseek_v2", {}, 2),  # latents (MLA)
        ("deepseek_v3", {}, 4),
        ("qwen3_next", {}, 2),  # delta nets, interleaved; gates of attention
        ("qwen3_5", {}, 2),  # delta nets
        ("gpt2", {"vocab_size": 307}, 4),  # tied; a vocabulary that ranks do not divide
        ("cohere", {"use_qk_norm": True}, 2),  # norms with weights for each head
        ("stablelm", {"qk_layernorm": True}, 4),  # and stored apart; key heads on several ranks
        ("olmo2", {}, 2),  # norms over all heads
        ("olmo2", {}, 4),
        ("apertus", {}, 2),
        ("gemma3n", {}, 2),  # streams, inputs per layer, sparse gates, shared keys and values
        ("gemma4", {}, 2),
        ("gemma4", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}, 2),
        ("mamba", {}, 2),
        ("mamba2", {}, 2),  # one norm over the channels of all ranks
        ("mamba2", {}, 4),  # fewer groups than ranks
        ("granite_moe_hybrid", {}, 2),
        ("bamba", {}, 2),
        ("falcon_h1", {}, 2),
        ("nemotron_h", {}, 2),  # a norm in groups
        ("nemotron_h", {}, 4),  # groups that span ranks
        ("nemotron_h", {**NEMOTRON_3, "moe_latent_size": 24, "mlp_bias": True}, 2),  # experts between projections
        ("jamba", {}, 2),
        ("lfm2", {}, 2),
        ("lfm2_moe", {}, 2),
    ],
)
def test_ranks_compute_the_logits_of_the_whole_model(tmp_path, family, changes, num_ranks):
    check_ranks(write_tiny(tmp_path, family, **changes), num_ranks)


@pytest.mark.parametrize(
    ("family", "num_ranks"), [("qwen3_moe", 2), ("mixtral", 2), ("glm4_moe", 4), ("nemotron_h", 2)]
)
def test_ranks_with_whole_experts_compute_the_logits_of_the_whole_model(tmp_path, family, num_ranks):
    changes = {**NEMOTRON_3, "moe_latent_size": 24} if family == "nemotron_h" else {}
    check_ranks(write_tiny(tmp_path, family, **changes), num_ranks, by_expert=True)


@pytest.mark.every_second("method", "storage")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", ["dequantised", "quantised"])
def test_ranks_divide_quantised_weights(tmp_path, monkeypatch, method, storage):
    if storage == "quantised":  # in the form that a GPU has, multiplied by the reference
        monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)
    folder = write_tiny(tmp_path, "llama", intermediate_size=128, head_dim=32)
    quantize(folder, method)
    if storage == "quantised" and "act-order" in method:
        with pytest.raises(UnsupportedModel, match="act-order"):
            load(folder, torch.float64, shard=(0, 2), dequantize=False)
        return
    check_ranks(folder, 2, dequantize=False)


@pytest.mark.parametrize("method", ["fp8 block", "gptq 4", "w4a16 channel", "nf4 double"])
def test_ranks_divide_columns_that_are_no_whole_groups(tmp_path, method):
    folder = write_tiny(tmp_path, "llama", intermediate_size=120, head_dim=32)
    quantize(folder, method)
    check_ranks(folder, 2, dequantize=False)


@pytest.mark.every_second("family", "method")
@pytest.mark.parametrize("method", ["fp8 block", "w4a16 zeros"])
@pytest.mark.parametrize("family", ["phi3", "glm", "deepseek_v2", "deepseek_v3", "qwen3_next"])
def test_ranks_divide_quantised_weights_that_are_joined_or_reordered(tmp_path, monkeypatch, family, method):
    monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)
    sizes = dict(kv_lora_rank=64, q_lora_rank=64, v_head_dim=16) if "deepseek" in family else {"head_dim": 32}
    if family == "qwen3_next":
        sizes |= dict(linear_value_head_dim=16, shared_expert_intermediate_size=64)
    folder = write_tiny(tmp_path, family, intermediate_size=128, moe_intermediate_size=64, **sizes)
    quantize(folder, method, skip="in_proj_ba")
    check_ranks(folder, 2, dequantize=False)


@pytest.mark.parametrize("by_expert", [False, True])
def test_ranks_divide_quantised_experts(tmp_path, monkeypatch, by_expert):
    monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)
    folder = write_tiny(tmp_path, "mixtral", intermediate_size=128)
    check_ranks(folder, 2, dequantize=False, by_expert=by_expert, quantization=ONLINE_FP8)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_ranks_divide_low_bit_weights_of_gguf_files(tmp_path, kind):
    """Packed blocks stay packed where a rank has whole blocks. Kernels compute in float32."""
    folder = write_tiny(tmp_path, "llama", **K_SIZES | {"intermediate_size": 512, "num_attention_heads": 8})
    path = write_gguf(folder, getattr(gguf.GGMLQuantizationType, kind))
    check_ranks(path, 2, torch.float32, 2e-3, dequantize=False)


def test_groups_that_ranks_would_cut_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)
    folder = write_tiny(tmp_path, "llama", intermediate_size=96)
    quantize(folder, "w4a16")
    with pytest.raises(InvalidOption, match="whole groups of 32"):
        load(folder, torch.float64, shard=(0, 2), dequantize=False)


def check_ranks(folder, num_ranks, dtype=torch.float64, tolerance=1e-9, by_expert=False, **options):
    wanted = logits_of(load(folder, dtype, **options))

    def run(rank, group):
        model = load(folder, dtype, shard=(rank, num_ranks), by_expert=by_expert, **options)
        connect_ranks(model, group)
        return logits_of(model)

    found = run_ranks(num_ranks, run)
    for logits in found:
        torch.testing.assert_close(logits, wanted, atol=tolerance, rtol=0)


def test_sizes_that_cannot_be_divided_are_refused(tmp_path):
    folder = write_tiny(tmp_path, "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(InvalidOption, match="3 key heads"):
        load(folder, shard=(0, 2))
