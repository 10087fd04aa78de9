"""The towers of all families: the shape by config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.image_info import ImageInfo, PinpointSize
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.shapes import AttentionShape, MlpShape, NormShape
from slipstream.nn.towers.shapes import (
    AxialRope,
    JoinedTiles,
    JoinPatches,
    MeanPatches,
    PatchShape,
    PositionTable,
    ProjectorNorm,
    ProjectorProduct,
    Step,
    Tap,
    TowerShape,
)
from slipstream.nn.weights.source import Rules


@dataclass(frozen=True, slots=True)
class TowerFamily:
    shape: Callable[[ModelInfo, ImageInfo, dict[str, Any]], TowerShape]  # the last argument is vision_config
    names: dict[str, str | None]  # of the checkpoint's tensors and ours; those that begin with "tower." have a root
    roots: tuple[str, ...]  # which the checkpoint writes for it


def find_tower(info: ModelInfo, images: ImageInfo) -> tuple[TowerShape, Rules]:
    """Raises UnsupportedModel for a family whose pictures do not run, BadCheckpoint for a wrong vision_config."""
    family = _FAMILIES.get(images.family)
    if family is None:
        raise UnsupportedModel(
            f"pictures of the family {images.family} are not supported; those of {', '.join(_FAMILIES)} are"
        )
    try:
        shape = family.shape(info, images, info.extra["vision_config"])
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadCheckpoint(
            f"vision_config of {info.architecture} lacks a field or has a wrong one: {error!r}"
        ) from None
    rooted = {
        theirs.replace("tower.", root, 1) if theirs.startswith("tower.") else theirs: ours
        for root in family.roots
        for theirs, ours in family.names.items()
    }
    names = {
        f"{model}{theirs}": ours and f"tower.{ours}" for model in ("", "model.") for theirs, ours in rooted.items()
    }
    return shape, Rules(names)


_EPS = 1e-6
_LAYER_NORM = NormShape(eps=_EPS, kind="layer", bias=True)
_BLOCKS: dict[str, str | None] = {
    "tower.blocks.{n}.norm1.{kind}": "layers.{n}.attention_norm.{kind}",
    "tower.blocks.{n}.norm2.{kind}": "layers.{n}.mlp_norm.{kind}",
    "tower.blocks.{n}.attn.qkv.{kind}": "layers.{n}.attention.qkv.{kind}",
    "tower.blocks.{n}.attn.proj.{kind}": "layers.{n}.attention.output.{kind}",
    "tower.patch_embed.proj.{kind}": "patch.{kind}",
}


def _filled(vision: dict[str, Any], **usual: Any) -> dict[str, Any]:
    """vision_config with what it leaves out."""
    return usual | {name: value for name, value in vision.items() if value is not None}


def _patch(images: ImageInfo, *, bias: bool) -> PatchShape:
    return PatchShape(
        side=images.patch,
        frames=images.frames,
        channels_last=images.channels_last,
        rescale=images.rescale,
        mean=images.mean,
        std=images.std,
        bias=bias,
    )


def _attention(hidden_size: int, num_heads: int, *, bias: bool = True) -> AttentionShape:
    head_dim = hidden_size // num_heads
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        causal=False,
        qkv_bias=bias,
        output_bias=bias,
    )


# Qwen.


def _qwen_projector(hidden_size: int, output_size: int) -> tuple[ProjectorProduct, ...]:
    """Without its norm, which is before or behind the join."""
    return (
        ProjectorProduct(name="up", size=hidden_size, activation="gelu"),
        ProjectorProduct(name="down", size=output_size),
    )


def _qwen(
    images: ImageInfo, vision: dict[str, Any], hidden_size: int, output_size: int, mlp: MlpShape, *, patch_bias: bool
) -> TowerShape:
    attention = replace(_attention(hidden_size, int(vision["num_heads"])), fused=True)
    joined = hidden_size * images.merge**2
    return TowerShape(
        hidden_size=hidden_size,
        output_size=output_size,
        patch=_patch(images, bias=patch_bias),
        merge=images.merge,
        in_blocks=images.in_blocks,
        attention=attention,
        feed=mlp,
        norm=_LAYER_NORM,
        num_layers=int(vision["depth"]),
        rope=AxialRope(head_dim=attention.head_dim),
        projector=(ProjectorNorm(norm=_LAYER_NORM), JoinPatches(), *_qwen_projector(joined, output_size)),
    )


def _qwen2(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    vision = _filled(vision, depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, hidden_act="quick_gelu")
    size = int(vision["embed_dim"])
    mlp = MlpShape(
        size=int(size * vision["mlp_ratio"]), activation=vision["hidden_act"], gated=False, bias=True, down_bias=True
    )
    # vision_config's hidden_size is that of the text model
    return _qwen(images, vision, size, info.hidden_size, mlp, patch_bias=False)


def _qwen2_5(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    vision = _filled(
        vision, depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, hidden_act="silu", window_size=112,
        fullatt_block_indexes=(7, 15, 23, 31),
    )  # fmt: skip
    mlp = MlpShape(size=int(vision["intermediate_size"]), activation=vision["hidden_act"], bias=True, down_bias=True)
    shape = _qwen(images, vision, int(vision["hidden_size"]), info.hidden_size, mlp, patch_bias=False)
    norm = NormShape(eps=_EPS)
    return replace(
        shape,
        norm=norm,
        projector=(ProjectorNorm(norm=norm), *shape.projector[1:]),
        window=int(vision["window_size"]) // images.merge // images.patch,
        full_layers=tuple(map(int, vision["fullatt_block_indexes"])),
    )


def _qwen3(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    vision = _filled(
        vision, depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304, hidden_act="gelu_pytorch_tanh",
        num_position_embeddings=2304,
    )  # fmt: skip
    mlp = MlpShape(
        size=int(vision["intermediate_size"]), activation=vision["hidden_act"], gated=False, bias=True, down_bias=True
    )
    shape = _qwen(images, vision, int(vision["hidden_size"]), info.hidden_size, mlp, patch_bias=True)
    table = PositionTable(side=int(int(vision["num_position_embeddings"]) ** 0.5), kind="aligned")
    return replace(shape, table=table)


def _qwen3_vl(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    shape = _qwen3(info, images, vision)
    behind = (JoinPatches(), ProjectorNorm(norm=_LAYER_NORM), *shape.projector[2:])
    layers = vision.get("deepstack_visual_indexes", (8, 16, 24))
    if len(layers) >= info.num_layers:
        raise UnsupportedModel(
            f"{info.architecture} adds features of pictures behind {len(layers)} layers and has {info.num_layers}; "
            "such a model needs a layer behind them"
        )
    return replace(shape, taps=tuple(Tap(int(layer), behind) for layer in layers))


_QWEN2_NAMES: dict[str, str | None] = {
    **_BLOCKS,
    "tower.blocks.{n}.mlp.fc1.{kind}": "layers.{n}.mlp.up.{kind}",
    "tower.blocks.{n}.mlp.fc2.{kind}": "layers.{n}.mlp.down.{kind}",
    "tower.merger.ln_q.{kind}": "projector.norm.{kind}",
    "tower.merger.mlp.0.{kind}": "projector.up.{kind}",
    "tower.merger.mlp.2.{kind}": "projector.down.{kind}",
}
_QWEN2_5_NAMES: dict[str, str | None] = {
    **_QWEN2_NAMES,
    "tower.blocks.{n}.mlp.down_proj.{kind}": "layers.{n}.mlp.down.{kind}",
    "tower.blocks.{n}.mlp.{part}_proj.{kind}": "layers.{n}.mlp.gate_up.{part}.{kind}",
}
_QWEN3_NAMES: dict[str, str | None] = {
    **_BLOCKS,
    "tower.pos_embed.{kind}": "table.{kind}",
    "tower.blocks.{n}.mlp.linear_fc1.{kind}": "layers.{n}.mlp.up.{kind}",
    "tower.blocks.{n}.mlp.linear_fc2.{kind}": "layers.{n}.mlp.down.{kind}",
    "tower.merger.norm.{kind}": "projector.norm.{kind}",
    "tower.merger.linear_fc1.{kind}": "projector.up.{kind}",
    "tower.merger.linear_fc2.{kind}": "projector.down.{kind}",
    "tower.deepstack_merger_list.{n}.norm.{kind}": "levels.{n}.norm.{kind}",
    "tower.deepstack_merger_list.{n}.linear_fc1.{kind}": "levels.{n}.up.{kind}",
    "tower.deepstack_merger_list.{n}.linear_fc2.{kind}": "levels.{n}.down.{kind}",
}


# SigLIP, CLIP and InternViT: a table of positions; q, k and v apart.


def _projected(shape: TowerShape, *steps: Step) -> TowerShape:
    return replace(shape, projector=steps)


def _siglip(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    """Without a projector."""
    vision = _filled(
        vision, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
        patch_size=16, layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    size = int(vision["hidden_size"])
    return TowerShape(
        hidden_size=size,
        output_size=info.hidden_size,
        patch=_patch(images, bias=True),
        merge=images.merge,
        in_blocks=images.in_blocks,
        attention=_attention(size, int(vision["num_attention_heads"])),
        feed=MlpShape(
            size=int(vision["intermediate_size"]), activation=vision["hidden_act"], gated=False, bias=True,
            down_bias=True,
        ),
        norm=NormShape(eps=float(vision["layer_norm_eps"]), kind="layer", bias=True),
        num_layers=int(vision["num_hidden_layers"]),
        table=PositionTable(side=_side(vision["image_size"]) // images.patch),
        projector=(),
    )  # fmt: skip


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, list) else size)


def _gemma3(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    shape = replace(_siglip(info, images, vision), transposed=("mm_input_projection_weight",))
    norm = NormShape(eps=shape.norm.eps, offset=1.0)
    return _projected(
        shape,
        ProjectorNorm(norm=shape.norm, name="last_norm"),
        MeanPatches(),
        ProjectorNorm(norm=norm),
        ProjectorProduct(name="product", size=info.hidden_size, bias=False),
    )


def _idefics3(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    shape = _siglip(info, images, _filled(vision, hidden_size=1152, num_attention_heads=16, patch_size=32))
    return _projected(
        shape,
        ProjectorNorm(norm=shape.norm),
        JoinPatches(),
        ProjectorProduct(name="product", size=info.hidden_size, bias=False),
    )


def _clip(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    """Without a projector."""
    vision = _filled(vision, layer_norm_eps=1e-5, hidden_act="quick_gelu", patch_size=32)
    shape = _siglip(info, images, vision)
    return replace(shape, patch=_patch(images, bias=False), class_token=True, first_norm=shape.norm)


def _internvl(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    vision = _filled(
        vision, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        hidden_act="gelu", image_size=448, patch_size=14,
    )  # fmt: skip
    choices = (
        vision.get("use_qk_norm", False), vision.get("norm_type", "layer_norm"), vision.get("use_mean_pooling", True),
        vision.get("use_absolute_position_embeddings", True),
        info.extra.get("vision_feature_layer", -1), info.extra.get("vision_feature_select_strategy", "default"),
    )  # fmt: skip
    if choices != (False, "layer_norm", True, True, -1, "default"):
        raise UnsupportedModel(
            f"{info.architecture} has a tower with norms of queries and keys, RMS norms, a last norm, no positions, or "
            "another layer than its last one; only that of InternViT-300M runs"
        )
    shape = _siglip(info, images, vision)
    return _projected(
        replace(
            shape,
            attention=replace(shape.attention, qkv_bias=bool(vision.get("attention_bias", False))),
            class_token=True,
            is_batched=True,
            learned_scale=True,
        ),
        JoinPatches(),
        ProjectorNorm(norm=NormShape(eps=1e-5, kind="layer", bias=True)),
        *_up_and_down(info),
    )


def _lfm2_vl(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    shape = _siglip(info, images, vision)
    extra = info.extra
    bias, size = bool(extra.get("projector_bias", True)), int(extra.get("projector_hidden_size") or 2560)
    activation = str(extra.get("projector_hidden_act") or "gelu")
    norm = (ProjectorNorm(norm=NormShape(eps=1e-5, kind="layer", bias=True)),)
    return _projected(
        replace(
            shape,
            patch=replace(shape.patch, is_matrix=True),
            table=PositionTable(side=int(int(vision.get("num_patches") or 256) ** 0.5), kind="resized"),
        ),
        ProjectorNorm(norm=shape.norm, name="last_norm"),
        JoinPatches(),
        *(norm if extra.get("projector_use_layernorm", True) else ()),
        ProjectorProduct(name="up", size=size, bias=bias, activation=activation),
        ProjectorProduct(name="down", size=info.hidden_size, bias=bias),
    )


def _pixtral(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    """Without a projector."""
    vision = _filled(
        vision, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        hidden_act="gelu", rope_theta=10_000.0,
    )  # fmt: skip
    size, norm = int(vision["hidden_size"]), NormShape(eps=1e-5)
    attention = _attention(size, int(vision["num_attention_heads"]), bias=False)
    theta = float((vision.get("rope_parameters") or vision)["rope_theta"])
    return TowerShape(
        hidden_size=size,
        output_size=info.hidden_size,
        patch=_patch(images, bias=False),
        merge=images.merge,
        in_blocks=images.in_blocks,
        attention=attention,
        feed=MlpShape(size=int(vision["intermediate_size"]), activation=vision["hidden_act"]),
        norm=norm,
        first_norm=norm,
        num_layers=int(vision["num_hidden_layers"]),
        rope=AxialRope(head_dim=attention.head_dim, theta=theta, in_turn=True),
        projector=(),
    )


def _up_and_down(info: ModelInfo, *, bias: bool = True) -> tuple[ProjectorProduct, ...]:
    activation = str(info.extra.get("projector_hidden_act") or "gelu")
    up = ProjectorProduct(name="up", size=info.hidden_size, bias=bias, activation=activation)
    return up, ProjectorProduct(name="down", size=info.hidden_size, bias=bias)


def _mistral3(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    shape = _pixtral(info, images, vision)
    return _projected(
        shape,
        ProjectorNorm(norm=NormShape(eps=info.norm_eps)),
        JoinPatches(by_number=True),
        ProjectorProduct(name="merger", size=shape.hidden_size, bias=False),
        *_up_and_down(info, bias=bool(info.extra.get("multimodal_projector_bias", False))),
    )


def _llava(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    """Its vision_config says which tower it has. The last layers may be left out."""
    kind = vision.get("model_type", "clip_vision_model")
    kinds = {"clip_vision_model": _clip, "siglip_vision_model": _siglip, "pixtral": _pixtral}
    if kind not in kinds:
        raise UnsupportedModel(f"{info.architecture} has a tower of type {kind}; those of type {', '.join(kinds)} run")
    shape = kinds[kind](info, images, vision)
    strategy = info.extra.get("vision_feature_select_strategy") or "default"
    if shape.class_token != (strategy == "default"):
        raise UnsupportedModel(
            f"{info.architecture} has vision_feature_select_strategy {strategy} and a tower of type {kind}; default "
            "runs with towers that have a class token, full with others"
        )
    layer = info.extra.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{info.architecture} reads several layers of its tower, {layer!r:.50}; one layer runs")
    count = shape.num_layers + 1 + layer if layer < 0 else layer
    if not 0 < count <= shape.num_layers:
        raise ValueError(f"vision_feature_layer is {layer} of {shape.num_layers} layers")
    return _projected(
        replace(shape, num_layers=count),
        *_up_and_down(info, bias=bool(info.extra.get("multimodal_projector_bias", True))),
    )


def _llava_onevision(info: ModelInfo, images: ImageInfo, vision: dict[str, Any]) -> TowerShape:
    extra = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} | info.extra
    shape = _llava(msgspec.structs.replace(info, extra=extra), images, {"model_type": "siglip_vision_model"} | vision)
    assert isinstance(images.size, PinpointSize)
    return replace(shape, tiles=JoinedTiles(images.size.most))


_SIGLIP_BLOCKS: dict[str, str | None] = {
    "tower.embeddings.patch_embedding.{kind}": "patch.{kind}",
    "tower.embeddings.position_embedding.weight": "table.weight",
    "tower.embeddings.position_ids": None,
    "tower.encoder.layers.{n}.layer_norm1.{kind}": "layers.{n}.attention_norm.{kind}",
    "tower.encoder.layers.{n}.layer_norm2.{kind}": "layers.{n}.mlp_norm.{kind}",
    "tower.encoder.layers.{n}.self_attn.out_proj.{kind}": "layers.{n}.attention.output.{kind}",
    "tower.encoder.layers.{n}.self_attn.{part}_proj.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
    "tower.encoder.layers.{n}.mlp.fc1.{kind}": "layers.{n}.mlp.up.{kind}",
    "tower.encoder.layers.{n}.mlp.fc2.{kind}": "layers.{n}.mlp.down.{kind}",
    "tower.head.*": None,
}
_PIXTRAL_BLOCKS: dict[str, str | None] = {
    "tower.patch_conv.{kind}": "patch.{kind}",
    "tower.ln_pre.{kind}": "first_norm.{kind}",
    "tower.transformer.layers.{n}.attention_norm.{kind}": "layers.{n}.attention_norm.{kind}",
    "tower.transformer.layers.{n}.ffn_norm.{kind}": "layers.{n}.mlp_norm.{kind}",
    "tower.transformer.layers.{n}.attention.o_proj.{kind}": "layers.{n}.attention.output.{kind}",
    "tower.transformer.layers.{n}.attention.{part}_proj.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
    "tower.transformer.layers.{n}.feed_forward.down_proj.{kind}": "layers.{n}.mlp.down.{kind}",
    "tower.transformer.layers.{n}.feed_forward.{part}_proj.{kind}": "layers.{n}.mlp.gate_up.{part}.{kind}",
}
_UP_AND_DOWN: dict[str, str | None] = {
    "multi_modal_projector.linear_1.{kind}": "projector.up.{kind}",
    "multi_modal_projector.linear_2.{kind}": "projector.down.{kind}",
}
_GEMMA3_NAMES = {
    **_SIGLIP_BLOCKS,
    "tower.post_layernorm.{kind}": "projector.last_norm.{kind}",
    "multi_modal_projector.mm_soft_emb_norm.weight": "projector.norm.weight",
    "multi_modal_projector.mm_input_projection_weight": "projector.product.weight",
}
_IDEFICS3_NAMES = {
    **_SIGLIP_BLOCKS,
    "tower.post_layernorm.{kind}": "projector.norm.{kind}",
    "connector.modality_projection.proj.{kind}": "projector.product.{kind}",
}
_MISTRAL3_NAMES = {
    **_PIXTRAL_BLOCKS,
    **_UP_AND_DOWN,
    "multi_modal_projector.norm.{kind}": "projector.norm.{kind}",
    "multi_modal_projector.patch_merger.merging_layer.{kind}": "projector.merger.{kind}",
}
_LLAVA_NAMES = {
    "tower.embeddings.class_embedding": "class_token.weight",
    "tower.pre_layrnorm.{kind}": "first_norm.{kind}",
    "tower.post_layernorm.{kind}": None,
    **_SIGLIP_BLOCKS,
    **_PIXTRAL_BLOCKS,
    **_UP_AND_DOWN,
}
_INTERNVL_NAMES: dict[str, str | None] = {
    "tower.embeddings.cls_token": "class_token.weight",
    "tower.embeddings.mask_token": None,
    "tower.embeddings.position_embeddings": "table.weight",
    "tower.embeddings.patch_embeddings.projection.{kind}": "patch.{kind}",
    "tower.encoder.layer.{n}.layernorm_before.{kind}": "layers.{n}.attention_norm.{kind}",
    "tower.encoder.layer.{n}.layernorm_after.{kind}": "layers.{n}.mlp_norm.{kind}",
    "tower.encoder.layer.{n}.lambda_1": "layers.{n}.attention_scale.weight",
    "tower.encoder.layer.{n}.lambda_2": "layers.{n}.mlp_scale.weight",
    "tower.encoder.layer.{n}.attention.projection_layer.{kind}": "layers.{n}.attention.output.{kind}",
    "tower.encoder.layer.{n}.attention.{part}_proj.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
    "tower.encoder.layer.{n}.mlp.fc1.{kind}": "layers.{n}.mlp.up.{kind}",
    "tower.encoder.layer.{n}.mlp.fc2.{kind}": "layers.{n}.mlp.down.{kind}",
    "multi_modal_projector.layer_norm.{kind}": "projector.norm.{kind}",
    **_UP_AND_DOWN,
}
_LFM2_NAMES: dict[str, str | None] = {
    **_SIGLIP_BLOCKS,
    "tower.post_layernorm.{kind}": "projector.last_norm.{kind}",
    "multi_modal_projector.layer_norm.{kind}": "projector.norm.{kind}",
    **_UP_AND_DOWN,
}
_ONEVISION_NAMES = {"image_newline": "newline.weight", **_LLAVA_NAMES}

_VISUAL = ("visual.",)
_TOWER = ("vision_tower.vision_model.", "vision_tower.")
_QWEN3_5 = TowerFamily(_qwen3, _QWEN3_NAMES, _VISUAL)
_QWEN3_VL = TowerFamily(_qwen3_vl, _QWEN3_NAMES, _VISUAL)
_IDEFICS3 = TowerFamily(_idefics3, _IDEFICS3_NAMES, ("vision_model.",))
_FAMILIES = {
    "qwen2_vl": TowerFamily(_qwen2, _QWEN2_NAMES, _VISUAL),
    "qwen2_5_vl": TowerFamily(_qwen2_5, _QWEN2_5_NAMES, _VISUAL),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "gemma3": TowerFamily(_gemma3, _GEMMA3_NAMES, _TOWER),
    "mistral3": TowerFamily(_mistral3, _MISTRAL3_NAMES, _TOWER),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "llava": TowerFamily(_llava, _LLAVA_NAMES, _TOWER),
    "llava_onevision": TowerFamily(_llava_onevision, _ONEVISION_NAMES, _TOWER),
    "internvl": TowerFamily(_internvl, _INTERNVL_NAMES, _TOWER),
    "lfm2_vl": TowerFamily(_lfm2_vl, _LFM2_NAMES, _TOWER),
}
"""By model_type of config.json."""
