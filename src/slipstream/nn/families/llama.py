"""The Llama family: Llama 2 and 3, SmolLM2, Mistral and others with the same architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.decoder import DecoderShape, RopeShape
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape
from slipstream.nn.weights.source import Rules


def llama_attention(info: ModelInfo) -> AttentionShape:
    return AttentionShape(
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        scale=info.head_dim**-0.5,
        qkv_bias=info.attention_bias,
        output_bias=info.attention_bias,
    )


def llama_mlp(info: ModelInfo) -> MlpShape:
    return MlpShape(size=info.ffn_size, activation=info.activation, bias=info.mlp_bias, down_bias=info.mlp_bias)


def llama_shape(
    info: ModelInfo,
    attention: AttentionShape | None = None,
    mlp: MlpShape | None = None,
    windows: Sequence[int] = (),
    norm: NormShape | None = None,
    *,
    norm_before: bool = True,
    norm_after: bool = False,
) -> DecoderShape:
    """A decoder whose layers are alike but for their windows. Other families begin with it and pass what differs.

    `windows`: per layer, the positions that a token sees, itself included; 0 for all.
    """
    attention = attention or llama_attention(info)
    mlp = mlp or llama_mlp(info)
    norm = norm or NormShape(eps=info.norm_eps)
    return DecoderShape(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        layers=tuple(
            LayerShape(
                mixers=(replace(attention, window=window),),
                feed=mlp,
                norm=norm,
                norm_before=norm_before,
                norm_after=norm_after,
            )
            for window in windows or (0,) * info.num_layers
        ),
        ropes=(RopeShape(info.rope, info.head_dim),),
        norm=norm,
        max_positions=info.max_positions,
        tied=info.tied_embeddings,
    )


def with_local_rope(shape: DecoderShape, info: ModelInfo) -> DecoderShape:
    """The same model, whose layers with a window have a rope of their own if the config says so."""
    if info.local_rope is None:
        return shape
    ropes = (*shape.ropes, RopeShape(info.local_rope, info.head_dim, switches=False))
    return replace(shape.map_attention(lambda mixer: replace(mixer, rope=1 if mixer.window else 0)), ropes=ropes)


def mistral_windows(info: ModelInfo) -> tuple[int, ...]:
    """Early releases have a window in every layer, later ones say null."""
    return (int(info.extra.get("sliding_window") or 0),) * info.num_layers


def mistral_shape(info: ModelInfo) -> DecoderShape:
    return llama_shape(info, windows=mistral_windows(info))


def llama_rules(
    shape: DecoderShape, others: Mapping[str, str | None] | None = None, roots: Sequence[str] = ("model", "")
) -> Rules:
    """Rules for the tensor names that most families share; `others` are a family's own and take precedence.

    `roots` are what checkpoints may write in place of the leading "model"; embedders often leave it out.
    """
    names: dict[str, str | None] = {
        **(others or {}),
        "model.embed_tokens.weight": "embedding.weight",
        "model.norm.weight": "norm.weight",
        # some tied checkpoints store it as well
        "lm_head.{kind}": None if shape.tied or shape.headless else "head.{kind}",
        "score.0.{kind}": "heads.transform.dense.{kind}",
        "score.2.{kind}": "heads.classifier.{kind}",
        "score.{kind}": "heads.classifier.{kind}",
        "model.layers.{n}.input_layernorm.weight": "layers.{n}.attention_norm.weight",
        "model.layers.{n}.post_attention_layernorm.weight": "layers.{n}.mlp_norm.weight",
        "model.layers.{n}.self_attn.o_proj.{kind}": "layers.{n}.attention.output.{kind}",
        "model.layers.{n}.self_attn.{part}_proj.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
        "model.layers.{n}.self_attn.{part}_norm.weight": "layers.{n}.attention.norm.{part}.weight",
        "model.layers.{n}.mlp.down_proj.{kind}": "layers.{n}.mlp.down.{kind}",
        "model.layers.{n}.mlp.{part}_proj.{kind}": "layers.{n}.mlp.gate_up.{part}.{kind}",
        "model.layers.{n}.self_attn.rotary_emb.inv_freq": None,  # of old checkpoints; computed here
    }
    names |= others or {}
    rooted: dict[str, str | None] = {}
    for root in roots:
        for name, parameter in names.items():
            rooted[name.replace("model", root, 1).removeprefix(".")] = parameter
    return Rules(rooted)


# Which layers of a model see a window only, and how wide it is.

LOCAL, FULL = "sliding_attention", "full_attention"


def layer_windows(info: ModelInfo, is_local: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer, 0: none. Newer checkpoints list `layer_types`; for the others `is_local` decides."""
    kinds = info.extra.get("layer_types")
    if kinds is None:
        kinds = [LOCAL if is_local(layer) else FULL for layer in range(info.num_layers)]
    if not isinstance(kinds, list) or len(kinds) != info.num_layers or not {*kinds} <= {LOCAL, FULL}:
        raise BadCheckpoint(
            f"layer_types of config.json is {kinds!r}; "
            f"it must say {LOCAL} or {FULL} for each of {info.num_layers} layers"
        )
    if LOCAL not in kinds:
        return (0,) * info.num_layers
    window = info.extra.get("sliding_window")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise BadCheckpoint(f"sliding_window of config.json is {window!r}; it must be a whole number from 1 up")
    return tuple(window if kind == LOCAL else 0 for kind in kinds)
