"""What a family makes of a config.json: older ways to write it, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo, model_info_from_config
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.encoder import EncoderShape
from slipstream.nn.registry import find_family, find_shape
from tiny import _COMMON, _FAMILIES, write_tiny, write_weights
from tiny_saved import SAVED

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def info(architecture: str, **facts: Any) -> ModelInfo:
    return model_info_from_config({"architectures": [architecture], **SIZES, **facts})


def shape(architecture: str, **facts: Any) -> DecoderShape:
    found = info(architecture, **facts)
    made = find_family(found).shape(found)
    assert isinstance(made, DecoderShape)
    return made


def windows(found: DecoderShape) -> tuple[int, ...]:
    return tuple(mixer.window for mixer in found.mixers)


def test_a_gemma_3_config_of_the_first_releases() -> None:
    found = shape(
        "Gemma3ForCausalLM", sliding_window=16, rope_theta=1e6, rope_local_base_freq=5e3,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, query_pre_attn_scalar=64,
    )  # fmt: skip
    assert windows(found) == (16, 16, 16, 16, 16, 0)
    rope, local_rope = (each.info for each in found.ropes)
    assert (rope.theta, rope.kind, rope.factors) == (1e6, "linear", {"factor": 8.0})
    assert (local_rope.theta, local_rope.kind) == (5e3, "default")
    assert [mixer.rope for mixer in found.mixers] == [1, 1, 1, 1, 1, 0]
    assert found.tied and {(mixer.scale, mixer.head_dim) for mixer in found.mixers} == {(0.125, 256)}
    assert windows(shape("Gemma3ForCausalLM", sliding_window=16, sliding_window_pattern=2)) == (16, 0) * 3


def test_a_gemma_2_config_that_leaves_out_what_is_usual() -> None:
    found = shape("Gemma2ForCausalLM")
    assert windows(found) == (4096, 0) * 3 and {mixer.soft_cap for mixer in found.mixers} == {50.0}
    assert (found.logit_cap, found.tied, found.norm.offset) == (30.0, True, 1.0)
    for layer in found.layers:
        assert layer.feed is not None and layer.feed.activation == "gelu_pytorch_tanh"
        assert layer.norm.offset == 1.0 and layer.norm_before and layer.norm_after


def test_windows_of_qwen_are_on_when_switched_on_and_in_the_upper_layers() -> None:
    assert windows(shape("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=False)) == (0,) * 6
    found = shape("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=True, max_window_layers=4)
    assert windows(found) == (0, 0, 0, 0, 8, 8)
    assert all(mixer.qkv_bias and not mixer.output_bias for mixer in found.mixers)


def test_mistral_has_the_window_of_its_first_release_unless_it_says_null() -> None:
    assert windows(shape("MistralForCausalLM")) == (4096,) * 6
    assert windows(shape("MistralForCausalLM", sliding_window=None)) == (0,) * 6


def test_a_phi_3_config_of_the_first_releases() -> None:
    factors = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    found = shape("Phi3ForCausalLM", rope_scaling=factors, original_max_position_embeddings=64)
    (rope,) = (each.info for each in found.ropes)
    assert rope.kind == "longrope"
    assert rope.factors["original_max_position_embeddings"] == 64
    (rope,) = (each.info for each in shape("Phi3ForCausalLM", partial_rotary_factor=0.75).ropes)
    assert rope.factors["partial_rotary_factor"] == 0.75


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"layer_types": ["full_attention"]}, "6 layers"),
        ({"layer_types": ["chunked_attention"] * 6}, "chunked_attention"),
        ({"sliding_window": 0}, "sliding_window of config.json is 0"),
    ],
)
def test_windows_that_cannot_be_are_named(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        shape("Gemma2ForCausalLM", **facts)


def test_a_gemma_that_sees_both_ways_has_half_its_window_to_each_side() -> None:
    found = find_shape(info("Gemma3TextModel", sliding_window=16, use_bidirectional_attention=True))
    assert isinstance(found, DecoderShape) and not found.causal and found.headless
    assert windows(found) == (8, 8, 8, 8, 8, 0) and found.cache_specs(16, "bfloat16") == []


def test_facts_of_encoders_that_configs_leave_out() -> None:
    found = info("RobertaModel", max_position_embeddings=514)
    assert (found.max_positions, found.position_offset, found.norm_eps, found.num_types) == (512, 2, 1e-5, 2)
    assert not found.is_causal and found.activation == "gelu"
    assert info("MPNetModel", type_vocab_size=2).num_types == 0  # which it has no table for
    distil = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 9, "activation": "relu"}
    found = model_info_from_config({"architectures": ["DistilBertModel"], **distil})
    assert (found.hidden_size, found.ffn_size, found.num_layers, found.num_heads) == (64, 128, 2, 4)
    assert (found.activation, found.max_positions, found.norm_eps) == ("relu", 512, 1e-12)


def test_windows_of_modernbert_as_its_first_releases_write_them() -> None:
    found = find_shape(
        info("ModernBertModel", local_attention=32, global_attn_every_n_layers=2, global_rope_theta=5.0, norm_eps=1e-5)
    )
    assert isinstance(found, EncoderShape)
    assert found.reaches == (0, 16, 0, 16, 0, 16)
    assert found.rope is not None and found.local_rope is not None
    assert (found.rope.theta, found.local_rope.theta) == (5.0, 10_000.0)


@pytest.mark.parametrize("buckets", [-1, 0, 3, "x"])
def test_distances_of_mpnet_that_cannot_be_are_named(buckets: Any) -> None:
    with pytest.raises(BadCheckpoint, match="relative_attention_num_buckets|wrong value"):
        find_shape(info("MPNetModel", relative_attention_num_buckets=buckets))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe", "nemotron_h"])
@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"n_group": 3, "topk_group": 2}, r"8 experts into 3 groups \(n_group\)"),
        ({"n_group": -2, "topk_group": 1}, r"8 experts into -2 groups|no n_group"),
        ({"n_group": 2, "topk_group": 3}, r"3 \(topk_group\) of 2 groups"),
        ({"n_group": 1, "topk_group": 2}, r"2 \(topk_group\) of 1 groups"),
        ({"n_group": 4, "topk_group": 1}, r"3 experts a token \(num_experts_per_tok\) from 1 groups"),
    ],
)
def test_groups_of_experts_that_do_not_fit_are_named(family: str, facts: dict[str, Any], words: str) -> None:
    experts = {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "layers_block_type": ["moe", "attention"], "moe_shared_expert_intermediate_size": 40,
    }  # fmt: skip
    config = {**_COMMON, **(_FAMILIES | SAVED)[family], **experts, "n_group": 4, "topk_group": 2}
    find_shape(model_info_from_config(config))  # as it is, it passes
    with pytest.raises(BadCheckpoint, match=words):
        find_shape(model_info_from_config(config | facts))


def test_groups_of_one_expert_have_no_best_two() -> None:
    config = {**_COMMON, **_FAMILIES["deepseek_v3"], "n_group": 8, "topk_group": 4}
    with pytest.raises(BadCheckpoint, match="scored by its best two"):
        find_shape(model_info_from_config(config))
    by_best = {**_COMMON, **_FAMILIES["deepseek_v2"], "n_group": 8, "topk_group": 4}
    find_shape(model_info_from_config(by_best))  # scored by its best one


def test_layers_of_gemma_4_are_numbered_with_leading_zeros_if_there_are_more_than_ten(tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    folder = write_tiny(tmp_path, "gemma4", num_hidden_layers=12, layer_types=kinds)
    config = json.loads((folder / "config.json").read_text())
    assert set(config["per_layer_config"]) == {"05", "11"}
    found = find_shape(model_info_from_config(config))
    assert [mixer.head_dim for mixer in found.attentions] == [16, 16, 16, 16, 16, 32] * 2
    with pytest.raises(UnsupportedModel, match="other layers than those"):
        find_shape(model_info_from_config(config | {"per_layer_config": {"04": {"head_dim": 32}}}))


def test_the_last_layer_of_gemma_4_has_no_window_whatever_the_config_says(tmp_path: Path) -> None:
    """As in transformers."""
    folder = write_tiny(tmp_path, "gemma4")
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_types"][-1] == "full_attention"
    with_window = config | {"layer_types": [*config["layer_types"][:-1], "sliding_attention"]}
    (folder / "config.json").write_text(json.dumps(with_window))
    assert transformers.AutoConfig.from_pretrained(folder).layer_types == config["layer_types"]
    assert find_shape(model_info_from_config(with_window)) == find_shape(model_info_from_config(config))


def test_a_gemma_3n_that_shares_all_layers_is_named() -> None:
    config = {**_COMMON, **_FAMILIES["gemma3n"], "num_kv_shared_layers": 15}
    with pytest.raises(BadCheckpoint, match="shares the KV cache of 15 .* of 5 layers"):
        find_shape(model_info_from_config(config))


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ({"altup_num_inputs": 1}, UnsupportedModel, "altup_num_inputs is 1"),
        ({"altup_active_idx": 3}, BadCheckpoint, "altup_active_idx is 3, and there are 3 copies"),
        ({"altup_active_idx": -1}, BadCheckpoint, "altup_active_idx is -1"),
    ],
)
def test_streams_of_gemma_3n_that_cannot_be_are_named(
    facts: dict[str, Any], error: type[Exception], words: str
) -> None:
    config = {**_COMMON, **_FAMILIES["gemma3n"], "model_type": "gemma3n_text"}
    find_shape(model_info_from_config(config | {"altup_active_idx": 2}))
    with pytest.raises(error, match=words):
        find_shape(model_info_from_config(config | facts))


def test_what_we_do_not_run_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="^RwkvForCausalLM is not an architecture we run; .{,200}$"):
        shape("RwkvForCausalLM")
    with pytest.raises(UnsupportedModel, match="lacks 'hidden_size'"):
        model_info_from_config({"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}})


@pytest.mark.parametrize(
    ("family", "root"),
    [
        ("gemma3", "language_model.model"),
        ("gemma3", "model.language_model"),
        ("gemma3n", "model.language_model"),
        ("gemma4", "model.language_model"),
    ],
)
def test_the_text_of_a_gemma_that_sees_pictures(family: str, root: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    text = {"a": list(range(3, 40))}
    expected = HandRunner(load(folder)).run(text)["a"]
    config = json.loads((folder / "config.json").read_text())
    name = f"{family.title().replace('N', 'n')}ForConditionalGeneration"
    whole = {"architectures": [name], "text_config": config, "vision_config": {}, "audio_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    weights = {name.replace("model", root, 1): x for name, x in load_file(folder / "model.safetensors").items()}
    prefix = "" if root.startswith("language") else "model."
    pictures = ["vision_tower.vision_model.embeddings.patch_embedding.weight", "multi_modal_projector.mm_soft_emb_norm"]
    if family != "gemma3":
        pictures += [
            "audio_tower.layers.0.norm.weight",
            "embed_vision.embedding.weight",
            "embed_audio.embedding.weight",
        ]
        # as published: keys and values also in layers that share those of others
        for part in ("k_proj", "v_proj", "k_norm"):
            weights[f"{root}.layers.4.self_attn.{part}.weight"] = torch.zeros(3)
    write_weights(folder, weights | {prefix + name: torch.zeros(3) for name in pictures})
    assert HandRunner(load(folder)).run(text)["a"].equal(expected)
