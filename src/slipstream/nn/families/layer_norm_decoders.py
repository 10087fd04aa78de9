"""Decoders with layer norms: Nemotron, StableLM, StarCoder2, Phi-1 and 2, GPT-NeoX (Pythia) and GPT-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo
from slipstream.nn.decoder import DecoderShape, RopeShape
from slipstream.nn.families.llama import llama_attention, llama_mlp, llama_rules, llama_shape, mistral_windows
from slipstream.nn.families.llama_variants import PLAIN_MLP
from slipstream.nn.shapes import AttentionShape, MlpShape, NormShape
from slipstream.nn.weights.source import Rules

Parallel = Literal["no", "one norm", "two norms"]
_NORMS: dict[str, str | None] = {
    "model.layers.{n}.input_layernorm.bias": "layers.{n}.attention_norm.bias",
    "model.layers.{n}.post_attention_layernorm.bias": "layers.{n}.mlp_norm.bias",
    "model.norm.bias": "norm.bias",
}


def _shape(
    info: ModelInfo,
    attention: AttentionShape,
    mlp: MlpShape,
    parallel: Parallel = "no",
    offset: float = 0.0,
    windows: tuple[int, ...] = (),
) -> DecoderShape:
    norm = NormShape(eps=info.norm_eps, kind="layer", bias=True, offset=offset)
    shape = llama_shape(info, attention, mlp, windows, norm)
    return replace(shape, layers=tuple(replace(layer, parallel=parallel) for layer in shape.layers))


def _biased_mlp(info: ModelInfo, bias: bool = True) -> MlpShape:
    """An MLP without a gate; both of its products have a bias, or none has."""
    return replace(llama_mlp(info), gated=False, bias=bias, down_bias=bias)


def nemotron_shape(info: ModelInfo) -> DecoderShape:
    """An MLP without a gate, of squared relu; norms are stored as weight - 1."""
    return _shape(info, llama_attention(info), replace(llama_mlp(info), gated=False), offset=1.0)


def nemotron_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, PLAIN_MLP | _NORMS)


def stablelm_shape(info: ModelInfo) -> DecoderShape:
    """The 12B model has attention and MLP side by side, and norms queries and keys with weights for each head."""
    extra = info.extra
    attention = replace(llama_attention(info), qkv_bias=bool(extra.get("use_qkv_bias", False)), output_bias=False)
    if extra.get("qk_layernorm"):
        # a GGUF file has one tensor for all heads
        attention = replace(attention, qk_norm="each" if extra.get("qk_layernorm_stacked") else "each apart")
    mlp = replace(llama_mlp(info), bias=False, down_bias=False)
    return _shape(info, attention, mlp, "one norm" if extra.get("use_parallel_residual") else "no")


def stablelm_rules(shape: DecoderShape) -> Rules:
    heads: dict[str, str | None] = {
        f"model.layers.{{n}}.self_attn.{part}_layernorm.norms.{{head}}.weight": (
            f"layers.{{n}}.attention.norm.{part}.{{head}}.weight"
        )
        for part in ("q", "k")
    }
    heads |= {
        f"model.layers.{{n}}.self_attn.{part}_layernorm.weight": f"layers.{{n}}.attention.norm.{part}.weight"
        for part in ("q", "k")
    }
    return llama_rules(shape, _NORMS | heads)


def starcoder2_shape(info: ModelInfo) -> DecoderShape:
    """One switch turns all biases on; a window in every layer, if there is one."""
    bias = bool(info.extra.get("use_bias", True))
    attention = replace(llama_attention(info), qkv_bias=bias, output_bias=bias)
    return _shape(info, attention, _biased_mlp(info, bias), windows=mistral_windows(info))


def starcoder2_rules(shape: DecoderShape) -> Rules:
    mlp: dict[str, str | None] = {
        "model.layers.{n}.mlp.c_fc.{kind}": "layers.{n}.mlp.up.{kind}",
        "model.layers.{n}.mlp.c_proj.{kind}": "layers.{n}.mlp.down.{kind}",
    }
    return llama_rules(shape, _NORMS | mlp)


def phi_shape(info: ModelInfo) -> DecoderShape:
    """Biases everywhere, on the projection to tokens too; attention and MLP side by side."""
    if info.extra.get("qk_layernorm"):
        raise UnsupportedModel(f"{info.architecture} with qk_layernorm is not supported; no published model has it")
    attention = replace(llama_attention(info), qkv_bias=True, output_bias=True)
    return replace(_shape(info, attention, _biased_mlp(info), "one norm"), head_bias=True)


def phi_rules(shape: DecoderShape) -> Rules:
    return llama_rules(
        shape,
        {
            **_NORMS,
            "model.layers.{n}.self_attn.dense.{kind}": "layers.{n}.attention.output.{kind}",
            "model.layers.{n}.mlp.fc1.{kind}": "layers.{n}.mlp.up.{kind}",
            "model.layers.{n}.mlp.fc2.{kind}": "layers.{n}.mlp.down.{kind}",
            "model.final_layernorm.{kind}": "norm.{kind}",
            "lm_head.bias": None if shape.headless else "embedding.bias" if shape.tied else "head.bias",
        },
    )


def gpt_neox_shape(info: ModelInfo) -> DecoderShape:
    """q, k and v of a head are neighbours in one tensor; mostly attention and MLP side by side, each with its norm."""
    by_head = bool(info.extra.get("qkv_by_head", True))  # not in a GGUF file
    attention = replace(llama_attention(info), by_head=by_head, fused=not by_head)
    parallel: Parallel = "two norms" if info.extra.get("use_parallel_residual", True) else "no"
    return _shape(info, attention, _biased_mlp(info), parallel)


def gpt_neox_rules(shape: DecoderShape) -> Rules:
    names: dict[str, str | None] = {
        **_NORMS,
        "model.embed_in.weight": "embedding.weight",
        "model.final_layer_norm.{kind}": "norm.{kind}",
        "model.layers.{n}.attention.query_key_value.{kind}": "layers.{n}.attention.qkv.{kind}",
        "model.layers.{n}.attention.dense.{kind}": "layers.{n}.attention.output.{kind}",
        "model.layers.{n}.mlp.dense_h_to_4h.{kind}": "layers.{n}.mlp.up.{kind}",
        "model.layers.{n}.mlp.dense_4h_to_h.{kind}": "layers.{n}.mlp.down.{kind}",
        # buffers of old checkpoints: the causal mask
        "model.layers.{n}.attention.bias": None,
        "model.layers.{n}.attention.masked_bias": None,
        "model.layers.{n}.attention.rotary_emb.inv_freq": None,
        "embed_out.weight": None if shape.tied or shape.headless else "head.weight",
    }
    return llama_rules(shape, names, ("gpt_neox", ""))


def gpt2_shape(info: ModelInfo) -> DecoderShape:
    """A learned vector per position instead of rope; weights are stored as [inputs, outputs]."""
    extra = info.extra
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if bool(extra.get(name, usual)) is not usual:
            raise UnsupportedModel(f"{info.architecture} with {name} = {extra[name]} is not supported; {usual} is")
    if extra.get("add_cross_attention"):
        raise UnsupportedModel(f"{info.architecture} with cross attention is not supported; a decoder alone is")
    attention = replace(llama_attention(info), fused=True, qkv_bias=True, output_bias=True)
    return replace(
        _shape(info, attention, _biased_mlp(info)),
        ropes=(RopeShape(RopeInfo(kind="none"), info.head_dim, switches=False),),
        num_position_rows=info.max_positions,
        transposed=tuple(f"{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    )


def gpt2_rules(shape: DecoderShape) -> Rules:
    names: dict[str, str | None] = {
        "model.wte.weight": "embedding.weight",
        "model.wpe.weight": "positions.weight",
        "model.ln_f.{kind}": "norm.{kind}",
        "model.h.{n}.ln_1.{kind}": "layers.{n}.attention_norm.{kind}",
        "model.h.{n}.ln_2.{kind}": "layers.{n}.mlp_norm.{kind}",
        "model.h.{n}.attn.c_attn.{kind}": "layers.{n}.attention.qkv.{kind}",
        "model.h.{n}.attn.c_proj.{kind}": "layers.{n}.attention.output.{kind}",
        "model.h.{n}.mlp.c_fc.{kind}": "layers.{n}.mlp.up.{kind}",
        "model.h.{n}.mlp.c_proj.{kind}": "layers.{n}.mlp.down.{kind}",
        # buffers of old checkpoints: the causal mask
        "model.h.{n}.attn.bias": None,
        "model.h.{n}.attn.masked_bias": None,
    }
    return llama_rules(shape, names, ("transformer", ""))
