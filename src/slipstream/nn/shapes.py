"""The layers of a model as plain data: sizes and facts, no tensors.

A layer is a tuple of mixers, which exchange information between tokens, and an optional feed, which treats each token
by itself. Shapes are frozen and comparable: two layers of equal shape launch the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.ops.moe.reference import RouterRule


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    eps: float
    offset: float = 0.0  # added to the checkpoint's weights: some families store weight - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """A mixer. `name` is the module's name inside its block, which the checkpoint rules refer to."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # attention scores are multiplied by this
    name: str = "attention"
    qkv_bias: bool = False
    output_bias: bool = False
    fused: bool = False  # the checkpoint stores q, k and v as one tensor
    qk_norm: Literal["none", "heads", "whole"] = "none"  # RMS norm of queries and keys: per head, or over all heads
    causal: bool = True
    window: int = 0  # causal: positions that a token sees, itself included; otherwise tokens to each side. 0: all
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they stay as they are
    rope: int = 0  # index into the model's ropes
    kv_source: int | None = None  # the layer whose keys and values are read, from its first mixer; None: its own

    @property
    def has_own_site(self) -> bool:
        """Whether it writes keys and values to a cache site."""
        return self.causal and self.kv_source is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpShape:
    """A feed-forward: down(activation(gate) * up), or without a gate down(activation(up))."""

    size: int
    activation: str
    name: str = "mlp"
    gated: bool = True
    bias: bool = False
    down_bias: bool = False
    fused: bool = False  # the checkpoint stores gate and up as one tensor
    up_first: bool = False  # with up in its first half


MixerShape = AttentionShape
"""Any mixer. A new kind (delta net, state space model) joins this union and `new_mixer` of `nn/blocks/block.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A feed of gated MLPs with SiLU, of which a router chooses some for each token."""

    num_experts: int
    size: int  # of one expert
    router: RouterRule
    name: str = "mlp"
    correction_bias: bool = False  # the checkpoint has a bias that changes which experts are chosen
    shared: MlpShape | None = None  # an MLP that every token passes
    shared_gate: bool = False  # a sigmoid gate scales its output


FeedShape = MlpShape | ExpertShape
"""Any feed. A new kind joins this union and `new_feed` of `nn/blocks/block.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Several mixers run side by side on the same normed input, and their outputs are summed.

    A layer may lack mixers or the feed, not both.
    """

    mixers: tuple[MixerShape, ...]
    feed: FeedShape | None
    norm: NormShape
    norm_before: bool = True  # of the input of mixers and feed
    norm_after: bool = False  # of the output of mixers and feed

    def __post_init__(self) -> None:
        assert self.mixers or self.feed is not None, "a layer has a mixer or a feed"


def bidirectional_head_dims(layers: tuple[LayerShape, ...]) -> tuple[int, ...]:
    """The head sizes of mixers that see the whole row, each once."""
    return tuple({mixer.head_dim: None for layer in layers for mixer in layer.mixers if not mixer.causal})
