"""Mamba and Mamba-2: decoders without attention; and sizes and tensor names of their mixers, which hybrids have too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.families.llama import llama_rules, llama_shape
from slipstream.nn.families.moe import needed_number
from slipstream.nn.shapes import LayerShape, MixerShape, NormShape
from slipstream.nn.ssm_shapes import Mamba1Shape, Mamba2Shape
from slipstream.nn.weights.source import Rules

RECURRENT, FULL = "linear_attention", "full_attention"
_OLD_KINDS = {"mamba": RECURRENT, "attention": FULL}
# the fields of config.json, in families with "mamba_" in their names and in the others
MAMBA2_FIELDS = {
    "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "num_groups": "mamba_n_groups",
    "state_size": "mamba_d_state", "conv_width": "mamba_d_conv",
}  # fmt: skip
_PLAIN_FIELDS = {
    "num_heads": "num_heads", "head_dim": "head_dim", "num_groups": "n_groups", "state_size": "state_size",
    "conv_width": "conv_kernel",
}  # fmt: skip


def mamba2_shape(info: ModelInfo) -> DecoderShape:
    bias = bool(info.extra.get("use_bias", False))
    mixer = read_mamba2(info, _PLAIN_FIELDS, size=int(info.extra.get("expand", 2)) * info.hidden_size)
    return _without_attention(
        info,
        replace(mixer, conv_bias=bool(info.extra.get("use_conv_bias", True)), input_bias=bias, output_bias=bias),
    )


def mamba1_shape(info: ModelInfo) -> DecoderShape:
    mixer = Mamba1Shape(
        size=info.ffn_size or int(info.extra.get("expand", 2)) * info.hidden_size,
        state_size=needed_number(info, "state_size"),
        dt_rank=read_rank(info, "time_step_rank"),
        conv_width=read_conv_width(info, "conv_kernel"),
        conv_bias=bool(info.extra.get("use_conv_bias", True)),
        bias=bool(info.extra.get("use_bias", False)),
    )
    return _without_attention(info, mixer)


def _without_attention(info: ModelInfo, mixer: MixerShape) -> DecoderShape:
    check_activation(info, info.activation)
    norm = NormShape(eps=info.norm_eps)
    layer = LayerShape(mixers=(mixer,), feed=None, norm=norm)
    return replace(llama_shape(info), layers=(layer,) * info.num_layers, ropes=())


def read_mamba2(info: ModelInfo, fields: Mapping[str, str], size: int) -> Mamba2Shape:
    """The sizes and limits of a Mamba-2 mixer. `size` is that of all heads, by the config."""
    num_heads, head_dim = needed_number(info, fields["num_heads"]), fields["head_dim"]
    low, high = map(_limit, info.extra.get("time_step_limit") or (0.0, "inf"))
    shape = Mamba2Shape(
        num_heads=num_heads,
        head_dim=size // num_heads if info.extra.get(head_dim) == "auto" else needed_number(info, head_dim),
        num_groups=needed_number(info, fields["num_groups"]),
        state_size=needed_number(info, fields["state_size"]),
        conv_width=read_conv_width(info, fields["conv_width"]),
        dt_min=low,
        dt_max=high,
    )
    if shape.size != size or shape.num_heads % shape.num_groups:
        raise BadCheckpoint(
            f"config.json of {info.architecture} has {shape.num_heads} heads of {shape.head_dim} values in "
            f"{shape.num_groups} groups for a Mamba size of {size}; they must fit"
        )
    return shape


def _limit(value: Any) -> float:
    """transformers 5 writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def read_conv_width(info: ModelInfo, name: str) -> int:
    width = needed_number(info, name)
    if width < 2:
        raise UnsupportedModel(f"{info.architecture} has a convolution of {width} token ({name}); 2 or more are run")
    return width


def read_rank(info: ModelInfo, name: str) -> int:
    """The rank of the projection to step sizes."""
    return -(-info.hidden_size // 16) if info.extra.get(name, "auto") == "auto" else needed_number(info, name)


def check_activation(info: ModelInfo, activation: str) -> None:
    """Checks the activation of the convolution, which is also that of gates."""
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{info.architecture} has {activation} behind its convolution; only silu is run")


def read_kinds(info: ModelInfo, kinds: Any) -> list[str]:
    """The kind of each layer, `RECURRENT` or `FULL`, from a list of config.json."""
    if not isinstance(kinds, list) or len(kinds) != info.num_layers:
        raise BadCheckpoint(
            f"config.json of {info.architecture} must list the kinds of its {info.num_layers} layers; it has {kinds!r}"
        )
    found: list[str] = [_OLD_KINDS.get(kind) or str(kind) for kind in kinds]
    if unknown := {*found} - {RECURRENT, FULL}:
        raise UnsupportedModel(
            f"{info.architecture} has layers of kind {', '.join(map(str, unknown))}, which are not supported"
        )
    return found


def mamba_rules(shape: DecoderShape) -> Rules:
    names = {
        "model.embeddings.weight": "embedding.weight",
        "model.embedding.weight": "embedding.weight",
        "model.norm_f.weight": "norm.weight",
        "model.layers.{n}.norm.weight": "layers.{n}.mamba_norm.weight",
        **mamba_names("model.layers.{n}.mixer"),
    }
    return llama_rules(shape, names, ("backbone", "model", ""))


def mamba_names(prefix: str) -> dict[str, str | None]:
    """Tensor names of a Mamba-1 or Mamba-2 mixer; `prefix` is that of the checkpoint."""
    ours = "layers.{n}.mamba"
    return {
        f"{prefix}.in_proj.{{kind}}": f"{ours}.input.{{kind}}",
        f"{prefix}.out_proj.{{kind}}": f"{ours}.output.{{kind}}",
        f"{prefix}.conv1d.{{kind}}": f"{ours}.conv.{{kind}}",
        f"{prefix}.A_log": f"{ours}.a_log",
        f"{prefix}.D": f"{ours}.d",
        f"{prefix}.dt_bias": f"{ours}.dt_bias",
        f"{prefix}.norm.weight": f"{ours}.norm.weight",
        f"{prefix}.x_proj.weight": f"{ours}.selected.weight",
        f"{prefix}.dt_proj.bias": f"{ours}.dt_bias",
        f"{prefix}.dt_proj.weight": f"{ours}.dt.weight",
        f"{prefix}.{{part}}_layernorm.weight": f"{ours}.norms.{{part}}.weight",
    }
