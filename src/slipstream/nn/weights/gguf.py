"""Weights of a GGUF file, with the names and the row order of the Hugging Face layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.gguf_file import GgufFile, GgufTensor
from slipstream.nn.weights.source import Rules, SourceTensor, WeightSource
from slipstream.ops.gemm.dequant import KINDS, dequantize

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

NAMES = Rules(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "rope_freqs.weight": None,  # read into ModelInfo.rope
        "blk.{n}.attn_norm.weight": "model.layers.{n}.input_layernorm.weight",
        "blk.{n}.ffn_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
        "blk.{n}.attn_q_norm.weight": "model.layers.{n}.self_attn.q_norm.weight",
        "blk.{n}.attn_k_norm.weight": "model.layers.{n}.self_attn.k_norm.weight",
        "blk.{n}.attn_output.{kind}": "model.layers.{n}.self_attn.o_proj.{kind}",
        "blk.{n}.attn_{part}.{kind}": "model.layers.{n}.self_attn.{part}_proj.{kind}",
        "blk.{n}.ffn_{part}.{kind}": "model.layers.{n}.mlp.{part}_proj.{kind}",
    }
)

_NORMS_AROUND: dict[str, str | None] = {
    "blk.{n}.post_attention_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "blk.{n}.ffn_norm.weight": "model.layers.{n}.pre_feedforward_layernorm.weight",
    "blk.{n}.post_ffw_norm.weight": "model.layers.{n}.post_feedforward_layernorm.weight",
}
_NORM_BIASES: dict[str, str | None] = {
    "output_norm.bias": "model.norm.bias",
    "blk.{n}.attn_norm.bias": "model.layers.{n}.input_layernorm.bias",
    "blk.{n}.ffn_norm.bias": "model.layers.{n}.post_attention_layernorm.bias",
}
_BERT: dict[str, str | None] = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm.{kind}": "embeddings.LayerNorm.{kind}",
    "blk.{n}.attn_q.{kind}": "encoder.layer.{n}.attention.self.query.{kind}",
    "blk.{n}.attn_k.{kind}": "encoder.layer.{n}.attention.self.key.{kind}",
    "blk.{n}.attn_v.{kind}": "encoder.layer.{n}.attention.self.value.{kind}",
    "blk.{n}.attn_output.{kind}": "encoder.layer.{n}.attention.output.dense.{kind}",
    "blk.{n}.attn_output_norm.{kind}": "encoder.layer.{n}.attention.output.LayerNorm.{kind}",
    "blk.{n}.ffn_up.{kind}": "encoder.layer.{n}.intermediate.dense.{kind}",
    "blk.{n}.ffn_down.{kind}": "encoder.layer.{n}.output.dense.{kind}",
    "blk.{n}.layer_output_norm.{kind}": "encoder.layer.{n}.output.LayerNorm.{kind}",
}
_JINA_BERT: dict[str, str | None] = {
    **_BERT,
    "blk.{n}.attn_q_norm.{kind}": "encoder.layer.{n}.attention.self.layer_norm_q.{kind}",
    "blk.{n}.attn_k_norm.{kind}": "encoder.layer.{n}.attention.self.layer_norm_k.{kind}",
    "blk.{n}.attn_norm_2.{kind}": "encoder.layer.{n}.layer_norm_1.{kind}",
    "blk.{n}.ffn_up.{kind}": "encoder.layer.{n}.mlp.gated_layers.{kind}",  # with the gate, but for older files
    "blk.{n}.ffn_gate.weight": "encoder.layer.{n}.mlp.gate.weight",
    "blk.{n}.ffn_down.{kind}": "encoder.layer.{n}.mlp.wo.{kind}",
    "blk.{n}.layer_output_norm.{kind}": "encoder.layer.{n}.mlp.layernorm.{kind}",
}
_T5: dict[str, str | None] = {
    "token_embd.weight": "shared.weight",
    "output.weight": None,  # of the decoder
    "enc.output_norm.weight": "encoder.final_layer_norm.weight",
    "enc.blk.{n}.attn_norm.weight": "encoder.block.{n}.layer.0.layer_norm.weight",
    "enc.blk.{n}.attn_rel_b.weight": "encoder.block.{n}.layer.0.SelfAttention.relative_attention_bias.weight",
    "enc.blk.{n}.attn_{part}.weight": "encoder.block.{n}.layer.0.SelfAttention.{part}.weight",
    "enc.blk.{n}.ffn_norm.weight": "encoder.block.{n}.layer.1.layer_norm.weight",
    "enc.blk.{n}.ffn_down.weight": "encoder.block.{n}.layer.1.DenseReluDense.wo.weight",
}
_T5_GATED = _T5 | {
    "enc.blk.{n}.ffn_gate.weight": "encoder.block.{n}.layer.1.DenseReluDense.wi_0.weight",
    "enc.blk.{n}.ffn_up.weight": "encoder.block.{n}.layer.1.DenseReluDense.wi_1.weight",
}
_T5_PLAIN = _T5 | {"enc.blk.{n}.ffn_up.weight": "encoder.block.{n}.layer.1.DenseReluDense.wi.weight"}
# by general.architecture: names with another meaning in these files
_OWN_NAMES: dict[str, dict[str, str | None]] = {
    "gemma2": _NORMS_AROUND,
    "gemma3": _NORMS_AROUND,
    "olmo2": _NORMS_AROUND,
    "bert": _BERT,
    "jina-bert-v2": _JINA_BERT,
    "phi3": {
        "rope_factors_{which}.weight": None,  # read into ModelInfo.rope
        "blk.{n}.attn_qkv.weight": "model.layers.{n}.self_attn.qkv_proj.weight",
        "blk.{n}.ffn_up.weight": "model.layers.{n}.mlp.gate_up_proj.weight",
    },
}


_OWN_NAMES |= {
    "seed_oss": {"blk.{n}.post_attention_norm.weight": "model.layers.{n}.post_attention_layernorm.weight"},
    "exaone4": _NORMS_AROUND,
    "apertus": {
        "blk.{n}.attn_norm.weight": "model.layers.{n}.attention_layernorm.weight",
        "blk.{n}.ffn_norm.weight": "model.layers.{n}.feedforward_layernorm.weight",
    },
    "hunyuan-dense": {
        "blk.{n}.attn_q_norm.weight": "model.layers.{n}.self_attn.query_layernorm.weight",
        "blk.{n}.attn_k_norm.weight": "model.layers.{n}.self_attn.key_layernorm.weight",
    },
    "glm4": {
        "blk.{n}.post_attention_norm.weight": "model.layers.{n}.post_self_attn_layernorm.weight",
        "blk.{n}.post_ffw_norm.weight": "model.layers.{n}.post_mlp_layernorm.weight",
        "blk.{n}.ffn_up.weight": "model.layers.{n}.mlp.gate_up_proj.weight",
    },
    "nemotron": _NORM_BIASES,
    "stablelm": {
        **_NORM_BIASES,
        "blk.{n}.attn_q_norm.weight": "model.layers.{n}.self_attn.q_layernorm.weight",
        "blk.{n}.attn_k_norm.weight": "model.layers.{n}.self_attn.k_layernorm.weight",
    },
    "starcoder2": {
        **_NORM_BIASES,
        "blk.{n}.ffn_up.{kind}": "model.layers.{n}.mlp.c_fc.{kind}",
        "blk.{n}.ffn_down.{kind}": "model.layers.{n}.mlp.c_proj.{kind}",
    },
    "phi2": {
        **_NORM_BIASES,
        "output_norm.{kind}": "model.final_layernorm.{kind}",
        "output.bias": "lm_head.bias",
        "blk.{n}.attn_output.{kind}": "model.layers.{n}.self_attn.dense.{kind}",
        "blk.{n}.ffn_up.{kind}": "model.layers.{n}.mlp.fc1.{kind}",
        "blk.{n}.ffn_down.{kind}": "model.layers.{n}.mlp.fc2.{kind}",
    },
    "gpt2": {
        "token_embd.weight": "transformer.wte.weight",
        "position_embd.weight": "transformer.wpe.weight",
        "output_norm.{kind}": "transformer.ln_f.{kind}",
        "blk.{n}.attn_norm.{kind}": "transformer.h.{n}.ln_1.{kind}",
        "blk.{n}.ffn_norm.{kind}": "transformer.h.{n}.ln_2.{kind}",
        "blk.{n}.attn_qkv.{kind}": "transformer.h.{n}.attn.c_attn.{kind}",
        "blk.{n}.attn_output.{kind}": "transformer.h.{n}.attn.c_proj.{kind}",
        "blk.{n}.ffn_up.{kind}": "transformer.h.{n}.mlp.c_fc.{kind}",
        "blk.{n}.ffn_down.{kind}": "transformer.h.{n}.mlp.c_proj.{kind}",
    },
    "gptneox": {
        "token_embd.weight": "gpt_neox.embed_in.weight",
        "output_norm.{kind}": "gpt_neox.final_layer_norm.{kind}",
        "output.weight": "embed_out.weight",
        "blk.{n}.attn_norm.{kind}": "gpt_neox.layers.{n}.input_layernorm.{kind}",
        "blk.{n}.ffn_norm.{kind}": "gpt_neox.layers.{n}.post_attention_layernorm.{kind}",
        "blk.{n}.attn_qkv.{kind}": "gpt_neox.layers.{n}.attention.query_key_value.{kind}",
        "blk.{n}.attn_output.{kind}": "gpt_neox.layers.{n}.attention.dense.{kind}",
        "blk.{n}.ffn_up.{kind}": "gpt_neox.layers.{n}.mlp.dense_h_to_4h.{kind}",
        "blk.{n}.ffn_down.{kind}": "gpt_neox.layers.{n}.mlp.dense_4h_to_h.{kind}",
    },
}
# converted by llama's rule: rows of q and k are interleaved by rotary pairs
_PAIRED = ("llama", "arcee", "smollm3", "granite", "mistral3")
# fields with a number for each layer that checkpoints have as tensors
_NUMBERS = {f"xielu.alpha_{which}": f"model.layers.{{n}}.mlp.act_fn.alpha_{which}" for which in ("p", "n")}
# files store 1 + weight of a norm, checkpoints store weight
_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron")


class GgufSource:
    def __init__(self, file: GgufFile, num_heads: int, num_kv_heads: int) -> None:
        self.file = file
        architecture = str(file.fields.get("general.architecture"))
        own = _OWN_NAMES.get(architecture, {})
        if architecture == "t5encoder":
            own = _T5_GATED if "enc.blk.0.ffn_gate.weight" in file.tensors else _T5_PLAIN
        self.names = Rules(own) | NAMES
        self.paired_heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if architecture in _PAIRED else {}
        self.norm_offset = 1.0 if architecture in _SHIFTED else 0.0

    def __iter__(self) -> Iterator[SourceTensor]:
        for tensor in self.file.tensors.values():
            try:
                name = self.names.rename(tensor.name)
            except KeyError:
                name = tensor.name  # the loader reports the name as unexpected
            if name is not None:
                blocks = partial(self._blocks, tensor) if tensor.kind in KINDS else None
                yield SourceTensor(name, tensor.shape, tensor.kind, partial(self._read, tensor), blocks)

        for field, name in _NUMBERS.items():
            values = self.file.fields.get(field)
            for layer, value in enumerate(values if isinstance(values, list) else ()):
                yield SourceTensor(name.format(n=layer), (1,), "F32", partial(torch.tensor, [value]))

    def _read(self, tensor: GgufTensor) -> torch.Tensor:
        values = self._in_our_order(tensor, read_values(tensor))
        if self.norm_offset and tensor.name.endswith("norm.weight"):
            return values - self.norm_offset
        return values

    def _blocks(self, tensor: GgufTensor) -> torch.Tensor:
        return self._in_our_order(tensor, _raw_rows(tensor))

    def _in_our_order(self, tensor: GgufTensor, rows: torch.Tensor) -> torch.Tensor:
        for part, num_heads in self.paired_heads.items():
            if f".{part}." in tensor.name:
                return halves_from_pairs(rows, num_heads)
        return rows


def read_values(tensor: GgufTensor) -> torch.Tensor:
    """Dequantizes any kind: common ones with torch, the others with the `gguf` library, which is slow but complete."""
    if tensor.kind in _PLAIN:
        return torch.from_numpy(tensor.raw).view(_PLAIN[tensor.kind]).view(tensor.shape)
    if tensor.kind in KINDS:
        return dequantize(_raw_rows(tensor), tensor.kind).view(tensor.shape)
    from gguf import GGMLQuantizationType  # imported only for such files
    from gguf.quants import dequantize as to_float32

    try:
        values = to_float32(tensor.raw.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType[tensor.kind])
    except (KeyError, NotImplementedError):
        raise UnsupportedModel(
            f"{tensor.name} is stored as {tensor.kind}, which is not supported; "
            "use a file quantized as Q4_0, Q4_1, Q8_0, a K-quant, F16 or F32"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values)).view(tensor.shape)


def _raw_rows(tensor: GgufTensor) -> torch.Tensor:
    """[rows, bytes per row] uint8, a view of the file."""
    return torch.from_numpy(tensor.raw).view(math.prod(tensor.shape[:-1]), -1)


def halves_from_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of each head from 0, half, 1, half + 1 ... to 0, 1 ... half, half + 1 ..."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# Reads weights that a checkpoint stores as [inputs, outputs] (GPT-2) as [outputs, inputs].


class TransposedSource:
    def __init__(self, source: WeightSource, endings: tuple[str, ...]) -> None:
        """`endings`: how the names of such weights end."""
        self.source, self.endings = source, endings

    def __iter__(self) -> Iterator[SourceTensor]:
        for tensor in self.source:
            is_weight = tensor.name.endswith(self.endings) and len(tensor.shape) == 2
            yield _transposed(tensor) if is_weight else tensor


def _transposed(tensor: SourceTensor) -> SourceTensor:
    num_inputs, num_outputs = tensor.shape
    return replace(tensor, shape=(num_outputs, num_inputs), read=partial(_read, tensor.read))


def _read(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read().t()
