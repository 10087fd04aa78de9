"""The towers of all families: the shape by config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.image_info import ImageInfo
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.shapes import AttentionShape, MlpShape, NormShape
from slipstream.nn.towers.shapes import (
    AxialRope,
    JoinPatches,
    PatchShape,
    PositionTable,
    ProjectorNorm,
    ProjectorProduct,
    Tap,
    TowerShape,
)
from slipstream.nn.weights.source import Rules


@dataclass(frozen=True, slots=True)
class TowerFamily:
    shape: Callable[[ModelInfo, ImageInfo, dict[str, Any]], TowerShape]  # the last argument is vision_config
    names: dict[str, str]  # of the checkpoint's tensors and ours, without the roots
    roots: tuple[str, ...]  # what the checkpoint's names begin with


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
    return shape, Rules(
        {f"{root}{theirs}": f"tower.{ours}" for root in family.roots for theirs, ours in family.names.items()}
    )


_EPS = 1e-6
_LAYER_NORM = NormShape(eps=_EPS, kind="layer", bias=True)
_BLOCKS = {
    "blocks.{n}.norm1.{kind}": "layers.{n}.attention_norm.{kind}",
    "blocks.{n}.norm2.{kind}": "layers.{n}.mlp_norm.{kind}",
    "blocks.{n}.attn.qkv.{kind}": "layers.{n}.attention.qkv.{kind}",
    "blocks.{n}.attn.proj.{kind}": "layers.{n}.attention.output.{kind}",
    "patch_embed.proj.{kind}": "patch.{kind}",
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
    table = PositionTable(side=int(int(vision["num_position_embeddings"]) ** 0.5), aligned=True)
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


_QWEN2_ROOTS = ("visual.", "model.visual.")
_QWEN2_NAMES = {
    **_BLOCKS,
    "blocks.{n}.mlp.fc1.{kind}": "layers.{n}.mlp.up.{kind}",
    "blocks.{n}.mlp.fc2.{kind}": "layers.{n}.mlp.down.{kind}",
    "merger.ln_q.{kind}": "projector.norm.{kind}",
    "merger.mlp.0.{kind}": "projector.up.{kind}",
    "merger.mlp.2.{kind}": "projector.down.{kind}",
}
_QWEN2_5_NAMES = {
    **_QWEN2_NAMES,
    "blocks.{n}.mlp.down_proj.{kind}": "layers.{n}.mlp.down.{kind}",
    "blocks.{n}.mlp.{part}_proj.{kind}": "layers.{n}.mlp.gate_up.{part}.{kind}",
}
_QWEN3_NAMES = {
    **_BLOCKS,
    "pos_embed.{kind}": "table.{kind}",
    "blocks.{n}.mlp.linear_fc1.{kind}": "layers.{n}.mlp.up.{kind}",
    "blocks.{n}.mlp.linear_fc2.{kind}": "layers.{n}.mlp.down.{kind}",
    "merger.norm.{kind}": "projector.norm.{kind}",
    "merger.linear_fc1.{kind}": "projector.up.{kind}",
    "merger.linear_fc2.{kind}": "projector.down.{kind}",
    "deepstack_merger_list.{n}.norm.{kind}": "levels.{n}.norm.{kind}",
    "deepstack_merger_list.{n}.linear_fc1.{kind}": "levels.{n}.up.{kind}",
    "deepstack_merger_list.{n}.linear_fc2.{kind}": "levels.{n}.down.{kind}",
}

_QWEN3_5 = TowerFamily(_qwen3, _QWEN3_NAMES, ("model.visual.", "visual."))
_QWEN3_VL = TowerFamily(_qwen3_vl, _QWEN3_NAMES, ("model.visual.", "visual."))
_FAMILIES = {
    "qwen2_vl": TowerFamily(_qwen2, _QWEN2_NAMES, _QWEN2_ROOTS),
    "qwen2_5_vl": TowerFamily(_qwen2_5, _QWEN2_5_NAMES, _QWEN2_ROOTS),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
}
"""By model_type of config.json."""
