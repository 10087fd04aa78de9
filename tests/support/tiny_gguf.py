"""Tiny checkpoints as GGUF files, written by the gguf library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from gguf_blocks import quantize
from tiny import tiny_weights
from tiny_tokenizer import IM_END, SPECIAL_TOKENS, byte_tokenizer

THEIRS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
AROUND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GEMMA = AROUND | {"pre_feedforward_layernorm": "ffn_norm"}
PHI = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
# sizes for which K-quants, with blocks of 256 columns, exist
K_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
OWN_THEIRS = {"gemma2": GEMMA, "gemma3": GEMMA, "olmo2": AROUND, "phi3": PHI}


def write_gguf(
    folder: Path,
    kind: gguf.GGMLQuantizationType,
    extra: dict[str, np.ndarray] | None = None,
    part_tensors: int = 0,
    pre: str | None = None,
    others: dict[str, gguf.GGMLQuantizationType] | None = None,
    fields: dict[str, int | float] | None = None,
) -> Path:
    """Writes the model of a folder as one file, with q and k in rotary pairs as llama.cpp stores them; or as several
    files of `part_tensors` tensors each, named after `path`. With `pre`, adds the byte vocabulary of the folder with
    this pre-tokenizer. `others`: kinds of single matrices, by their name in a block.
    `fields`: more of them."""
    config = json.loads((folder / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM").lower()
    arch = "llama" if family == "mistral" else family
    theirs = THEIRS | (OWN_THEIRS.get(arch) or {})
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    for name, value in (fields or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_family_facts(writer, arch, config, head_dim)
    if pre is not None:
        add_vocabulary(writer, pre, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tiny_weights(folder).items():
        stem, suffix = name.rsplit(".", 1)
        block = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            block = f"blk.{number}."
        stem = theirs[stem]
        if arch.startswith("gemma") and stem.endswith("norm"):
            tensor = tensor + 1
        if arch == "llama" and stem in heads:
            tensor = pairs_from_halves(tensor, heads[stem])
        array = tensor.numpy()
        as_kind = (others or {}).get(stem, kind) if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{block}{stem}.{suffix}", quantize(array, as_kind), raw_dtype=as_kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, pre: str, config: dict[str, Any]) -> None:
    """Byte-level BPE with one merge (two spaces), and a token for each row of the embedding."""
    letters = sorted(byte_tokenizer().get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    tokens = [letter for letter, _ in letters] + list(SPECIAL_TOKENS)
    tokens += ["ĠĠ"] + [f"<|unused_{n}|>" for n in range(len(tokens) + 1, config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1 if n < 256 or token == "ĠĠ" else 3 for n, token in enumerate(tokens)])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(IM_END)


BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def write_bert_gguf(
    folder: Path, words: list[str], kind: gguf.GGMLQuantizationType, pooling: gguf.PoolingType | None = None
) -> Path:
    """Writes the model of a BERT folder as one file, with these words as WordPiece vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    for name, value in bert_vocab(words).items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_array(name, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        block = ""
        if stem.startswith("encoder.layer."):
            _, _, number, stem = stem.split(".", 3)
            block = f"blk.{number}."
        if stem not in BERT:  # the pooler
            continue
        array = tensor.numpy()
        as_kind = (
            kind if array.ndim == 2 and "position" not in stem and "type" not in stem else gguf.GGMLQuantizationType.F32
        )
        writer.add_tensor(f"{block}{BERT[stem]}.{suffix}", gguf.quants.quantize(array, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bert_vocab(words: list[str]) -> dict[str, Any]:
    """The fields of a WordPiece vocabulary; GGUF marks the start of a word instead of its continuation."""
    special = [word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") for word in words]
    pieces = [
        word if own else word[2:] if word.startswith("##") else f"▁{word}"
        for word, own in zip(words, special, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if own else 1 for own in special],
    }


def add_family_facts(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], head_dim: int) -> None:
    """Writes the fields that llama.cpp's converter writes."""
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if arch == "phi3":
        rotated = int(head_dim * rope["partial_rotary_factor"])
        writer.add_rope_dimension_count(rotated)
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
            for which in ("long", "short"):
                writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))


def pairs_from_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders rows so that dimensions i and i + half are adjacent."""
    out = torch.empty_like(rows)
    dim = len(rows) // num_heads
    for head in range(num_heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = rows[head * dim + i]
            out[head * dim + 2 * i + 1] = rows[head * dim + i + dim // 2]
    return out
