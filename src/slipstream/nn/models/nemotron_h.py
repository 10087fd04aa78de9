"""Nemotron-H and Nemotron 3: layers of one sublayer each, which is Mamba-2, attention without rope, an MLP with squared
ReLU, or experts with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo
from slipstream.nn.models.decoder_shape import DecoderShape, RopeShape
from slipstream.nn.models.llama import llama_attention, llama_rules, llama_shape
from slipstream.nn.models.mamba import check_activation, mamba_names, read_mamba2
from slipstream.nn.models.moe import expert_shape, needed_number, sigmoid_rule
from slipstream.nn.shapes import ExpertShape, LayerShape, MlpShape, NormShape
from slipstream.nn.weights.rules import Rules

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_FIELDS = {
    "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "num_groups": "n_groups",
    "state_size": "ssm_state_size", "conv_width": "conv_kernel",
}  # fmt: skip


def nemotron_h_shape(info: ModelInfo) -> DecoderShape:
    extra = info.extra
    check_activation(info, str(extra.get("mamba_hidden_act", "silu")))
    size = needed_number(info, "mamba_num_heads") * needed_number(info, "mamba_head_dim")
    bias = bool(extra.get("use_bias", False))
    mixer = read_mamba2(info, _FIELDS, size)
    mixer = replace(
        mixer,
        conv_bias=bool(extra.get("use_conv_bias", True)),
        input_bias=bias,
        output_bias=bias,
        dt_min=float(extra.get("time_step_min", 0.001)),  # the smallest step size, and no largest one
        dt_max=float("inf"),
        norm_groups=mixer.num_groups,
    )
    attention = replace(llama_attention(info), qkv_bias=False, output_bias=False)
    mlp = MlpShape(
        size=info.ffn_size,
        activation=str(extra.get("mlp_hidden_act", "relu2")),
        gated=False,
        bias=info.mlp_bias,
        down_bias=info.mlp_bias,
    )
    norm = NormShape(eps=info.norm_eps)
    layers = {
        "mamba": LayerShape(mixers=(mixer,), feed=None, norm=norm),
        "attention": LayerShape(mixers=(attention,), feed=None, norm=norm),
        "mlp": LayerShape(mixers=(), feed=mlp, norm=norm),
    }
    kinds = _layer_kinds(info)
    if "moe" in kinds:
        layers["moe"] = LayerShape(mixers=(), feed=_experts(info, mlp), norm=norm)
    return replace(
        llama_shape(info),
        layers=tuple(layers[kind] for kind in kinds),
        ropes=(RopeShape(RopeInfo(kind="none"), info.head_dim),) if "attention" in kinds else (),
    )


def _experts(info: ModelInfo, mlp: MlpShape) -> ExpertShape:
    extra = info.extra
    if mlp.activation != "relu2":
        raise UnsupportedModel(f"{info.architecture} has experts with {mlp.activation}; only relu2 is built")
    experts = expert_shape(info, needed_number(info, "moe_intermediate_size"), sigmoid_rule(info))
    shared = replace(mlp, size=needed_number(info, "moe_shared_expert_intermediate_size"))
    latent = 0 if extra.get("moe_latent_size") is None else needed_number(info, "moe_latent_size")
    return replace(
        experts,
        gate="relu2",
        correction_bias=True,
        shared=shared,
        latent_size=latent,
        latent_bias=bool(latent) and info.mlp_bias,
    )


def _layer_kinds(info: ModelInfo) -> list[str]:
    kinds: Any = info.extra.get("layers_block_type") or info.extra.get("layer_types")
    if kinds is None:
        kinds = [_PATTERN.get(sign, sign) for sign in info.extra.get("hybrid_override_pattern") or ""]
    kinds = [_KINDS.get(kind, kind) for kind in kinds]
    if not kinds:
        raise BadCheckpoint(
            f"config.json of {info.architecture} has neither layers_block_type nor hybrid_override_pattern; one must "
            "say what each layer is"
        )
    if unknown := {*kinds} - {*_PATTERN.values()}:
        raise BadCheckpoint(
            f"config.json of {info.architecture} has layers of kind {unknown!r}; layers_block_type or "
            "hybrid_override_pattern must list mamba, attention, mlp or moe"
        )
    return kinds


def nemotron_h_rules(shape: DecoderShape) -> Rules:
    names: dict[str, str | None] = {}
    for number, layer in enumerate(shape.layers):
        part = layer.mixers[0].name if layer.mixers else "mlp"
        names[f"model.layers.{number}.norm.weight"] = f"layers.{number}.{part}_norm.weight"
    mixer = "model.layers.{n}.mixer"
    names |= {
        "model.embeddings.weight": "embedding.weight",
        "model.norm_f.weight": "norm.weight",
        f"{mixer}.o_proj.{{kind}}": "layers.{n}.attention.output.{kind}",
        f"{mixer}.gate.weight": "layers.{n}.mlp.router.weight",
        f"{mixer}.gate.e_score_correction_bias": "layers.{n}.mlp.correction_bias",
        f"{mixer}.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}",
        f"{mixer}.fc1_latent_proj.{{kind}}": "layers.{n}.mlp.into_latent.{kind}",
        f"{mixer}.fc2_latent_proj.{{kind}}": "layers.{n}.mlp.from_latent.{kind}",
        f"{mixer}.shared_experts.{{part}}_proj.{{kind}}": "layers.{n}.mlp.shared.{part}.{kind}",
        f"{mixer}.up_proj.{{kind}}": "layers.{n}.mlp.up.{kind}",
        f"{mixer}.down_proj.{{kind}}": "layers.{n}.mlp.down.{kind}",
        **{f"{mixer}.{part}_proj.{{kind}}": f"layers.{{n}}.attention.qkv.{part}.{{kind}}" for part in "qkv"},
        **mamba_names(mixer),
    }
    left_out = dict.fromkeys(("mtp.*", "model.mtp.*", "backbone.mtp.*"))
    return Rules(left_out) | llama_rules(shape, names, ("backbone", "model", ""))
