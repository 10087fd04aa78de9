"""The layers of a model as plain data: sizes and options, no tensors.

A layer is a tuple of mixers, which exchange information between tokens, and an optional feed, which treats each token
by itself. Shapes are frozen and comparable: two layers of equal shape launch the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec

from slipstream.checkpoint.model_info import ModelSizes
from slipstream.contracts.cache_spec import (
    DEFER_PERIOD,
    STATE_CHUNK,
    StateField,
    replay_columns,
    ring_columns,
)
from slipstream.ops.gemm.moe.reference import Gate, RouterRule


def has_only(shape: Any, known: set[str]) -> bool:
    """Whether all fields of a shape or cache spec but the `known` ones have their defaults. Code that implements some
    of the fields asks it before it runs, so that a new field never reaches code that ignores it."""
    stated = msgspec.structs.fields(shape) if isinstance(shape, msgspec.Struct) else fields(shape)
    return all(field.name in known or getattr(shape, field.name) == field.default for field in stated)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    eps: float
    offset: float = 0.0  # added to the checkpoint's weights: some families store weight - 1
    kind: Literal["rms", "layer"] = "rms"  # a layer norm subtracts the mean first
    bias: bool = False  # of a layer norm


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of several ranks a part of a model is for (tensor parallelism)."""

    rank: int
    size: int  # number of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention: sizes of the latents and of the heads that are made of them."""

    kv_rank: int  # of the latent that is cached
    q_rank: int  # of the latent of queries; 0: they are projected at once
    nope_dim: int  # of a head's queries and keys, without position
    rope_dim: int  # of a head's queries and of the key that all heads share, rotated by position
    value_dim: int  # of a head's values
    interleaved: bool  # the checkpoint rotates adjacent elements together, not those of two halves


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / length)) (Ministral 3)."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerShape:
    """The declarations of every mixer. A new kind is a subclass and an entry in `MIXERS` of `nn/block.py`."""

    name: str  # of the module inside its block, which the checkpoint rules refer to
    causal: bool = True
    output_scale: float = 1.0  # multiplies its output
    shard: Shard | None = None  # the sizes are those of one rank; None: of the whole mixer

    @property
    def has_own_site(self) -> bool:
        """Whether it writes keys and values to a cache site."""
        return False

    def state_fields(self, dtype: str, num_drafts: int = 0) -> tuple[StateField, ...]:
        """The recurrent state of one row, for a model of this dtype and up to `num_drafts` drafts per row and step;
        empty if it has none."""
        return ()

    @property
    def chunk_rounding(self) -> str:
        """As in `StateSpec`."""
        return ""

    def deferred_fields(self, dtype: str) -> tuple[StateField, ...]:
        """Fields for the last tokens of a row: with them kernels need not store the state in every step. Not used on
        the CPU, nor with drafts."""
        return ()

    def elements_per_token(self, on_cpu: bool) -> int:
        """Upper bound of the elements that it allocates per token besides hidden states, in the model's dtype: a wider
        element counts as several."""
        raise NotImplementedError

    def elements_per_step(self, on_cpu: bool) -> int:
        """Upper bound of the elements that it allocates per step, however few tokens it has; at least float32."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape(MixerShape):
    """Attention over keys and values, its own or those of another layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # attention scores are multiplied by this
    name: str = "attention"
    qkv_bias: bool = False
    output_bias: bool = False
    fused: bool = False  # the checkpoint stores q, k and v as one tensor
    by_head: bool = False  # and in it q, k and v of a head are neighbours (GPT-NeoX)
    # norm of queries and keys, of the layer's kind: per head, over all heads, or per head with weights for each head,
    # which the checkpoint stores as one tensor or as one per head
    qk_norm: Literal["none", "heads", "whole", "each", "each apart"] = "none"
    norm_after_rope: bool = False  # queries and keys are rotated first, then normed
    rotary_pairs: int = 0  # the first numbers of a head that the checkpoint rotates in neighbouring pairs; 0: in halves
    query_scale: QueryScale | None = None
    window: int = 0  # causal: positions that a token sees, itself included; otherwise tokens to each side. 0: all
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they stay as they are
    sinks: bool = False  # each head has a learned score that takes part in the softmax, without a value (gpt-oss)
    rope: int = 0  # index into the model's ropes
    value_norm: bool = False  # values are normed per head, without weights
    key_is_value: bool = False  # the projection of keys, before their norm, gives the values too
    latent: LatentShape | None = None  # MLA: one kv head of kv_rank + rope_dim elements; None: usual heads
    kv_source: int | None = None  # the layer whose keys and values are read, from its first mixer; None: its own
    gated: bool = False  # a sigmoid gate scales each output; the checkpoint stores it with the query of its head
    num_kv_heads_of_all: int = 0  # with a shard: key heads of the whole model

    @property
    def has_own_site(self) -> bool:
        """Whether it writes keys and values to a cache site."""
        return self.causal and self.kv_source is None

    def elements_per_token(self, on_cpu: bool) -> int:
        """Projections of a token, their copies after norm and rope, and the output; the gate and its product; copies of
        queries that are scaled, and of queries and keys between rope and norm."""
        more = 3 * self.num_heads * self.head_dim if self.gated else 0
        more += self.num_heads * self.head_dim if self.query_scale is not None else 0
        more += (self.num_heads + self.num_kv_heads) * self.head_dim if self.norm_after_rope else 0
        if self.latent is not None:
            heads = 2 * (self.latent.nope_dim + self.latent.rope_dim) + 2 * self.latent.value_dim
            return self.num_heads * (heads + 4 * self.head_dim) + 5 * self.head_dim + 2 * self.latent.q_rank
        return 4 * self.num_heads * self.head_dim + 5 * self.num_kv_heads * self.head_dim + more


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape(MixerShape):
    """Linear attention by the gated delta rule. A key head serves num_value_heads / num_key_heads value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    name: str = "delta_net"
    interleaved: bool = False  # the checkpoint groups its projections by key head

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def chunk_rounding(self) -> str:
        return "delta nets"

    def state_fields(self, dtype: str, num_drafts: int = 0) -> tuple[StateField, ...]:
        """A replay computes q, k and v again from the ring of the convolution; its gates are kept apart."""
        wide = "float64" if dtype == "float64" else "float32"
        fields = (
            StateField("conv", (self.num_channels, ring_columns(self.conv_width, num_drafts)), dtype),
            StateField("delta", (self.num_value_heads, self.key_dim, self.value_dim), wide),
        )
        gates = (replay_columns(num_drafts), 2 * self.num_value_heads)
        return (*fields, StateField("replay", gates, dtype, is_saved=False)) if num_drafts else fields

    def deferred_fields(self, dtype: str) -> tuple[StateField, ...]:
        """A token's update of a head: key, correction, sum of log decays, and padding to 16 bytes."""
        wide = "float64" if dtype == "float64" else "float32"
        entries = (self.num_value_heads, DEFER_PERIOD - 1, self.key_dim + self.value_dim + 4)
        return (StateField("deferred", entries, wide, is_saved=False),)

    def elements_per_token(self, on_cpu: bool) -> int:
        """Projections, the convolution's output, factors of chunks, and the output before and after its norm."""
        heads = self.num_value_heads
        made = self.num_channels + self.value_size + 2 * heads + self.num_channels + 3 * self.value_size
        if on_cpu:  # the taps of the convolution; queries and keys normed and repeated for value heads; the output
            return made + 4 * self.num_channels + heads * (6 * self.key_dim + 3 * self.value_dim)
        return made + heads * (self.key_dim + self.value_dim + STATE_CHUNK + 4)

    def elements_per_step(self, on_cpu: bool) -> int:
        """On the CPU: copies of the states of 4 rows, and factors of 4 chunks, which are padded. Kernels need none."""
        chunks = 4 * STATE_CHUNK * (6 * (self.key_dim + self.value_dim) + 5 * STATE_CHUNK)
        return self.num_value_heads * (12 * self.key_dim * self.value_dim + chunks) if on_cpu else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpShape:
    """A feed-forward: down(activation(gate) * up), or without a gate down(activation(up))."""

    size: int
    activation: str
    name: str = "mlp"
    gated: bool = True
    bias: bool = False
    down_bias: bool = False
    sparsity: float = 0.0  # the share of gates that become 0, as if they were spread normally (Gemma 3n); 0: none
    fused: bool = False  # the checkpoint stores gate and up as one tensor
    up_first: bool = False  # with up in its first half
    gate_scale: float = 1.0  # multiplies the gate before its activation
    output_scale: float = 1.0  # multiplies the output
    shard: Shard | None = None  # the size is that of one rank; None: of the whole MLP


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The part of all experts that one rank has.

    "inner": a part of each expert's inner size; "experts": some whole experts; the ranks have the same tokens.
    "exchanged": some whole experts, and every rank has tokens of its own.
    """

    rank: int
    size: int
    kind: Literal["inner", "experts", "exchanged"]

    def range_of(self, num_experts: int) -> tuple[int, int]:
        """The first expert of this rank, and how many it has."""
        if self.kind == "inner":
            return 0, num_experts
        count = num_experts // self.size
        return self.rank * count, count


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A feed of gated MLPs, of which a router chooses some for each token."""

    num_experts: int
    size: int  # of one expert
    router: RouterRule
    name: str = "mlp"
    gate: Gate = "silu"  # how gate and up are combined
    bias: bool = False  # of each expert's gate, up and down
    router_bias: bool = False
    correction_bias: bool = False  # the checkpoint has a bias that changes which experts are chosen
    shared: MlpShape | None = None  # an MLP that every token passes
    shared_gate: bool = False  # a sigmoid gate scales its output
    latent_size: int = 0  # the routed experts read and write so many values per token, between two projections; 0: none
    latent_bias: bool = False  # of these projections
    shard: ExpertShard | None = None  # the part of the experts that this rank has; None: all. Sizes are of the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAndExpertsShape:
    """A feed of an MLP beside experts (Gemma 4)."""

    mlp: MlpShape
    experts: ExpertShape
    norm: NormShape  # before and after the experts, and after the MLP
    name: str = "mlp"


FeedShape = MlpShape | ExpertShape | DenseAndExpertsShape
"""Any feed. A new kind joins this union and `new_feed` of `nn/block.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsShape:
    """Vectors per token and layer, beside the hidden states (Gemma 3n, Gemma 4)."""

    vocab_size: int
    num_layers: int
    size: int
    shard: Shard | None = None  # the rank that has a part of the vocabulary; None: it is whole
    rounded: bool = False  # the factor 1 / sqrt(2) is rounded to the weights' dtype, as in training


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputShape:
    """A sublayer that adds the layer's own input to the hidden state."""

    size: int
    activation: str
    name: str = "layer_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpShape:
    """Several hidden states per token, of which a layer computes one (Gemma 3n)."""

    num_copies: int
    active: int  # the one that is computed
    scaled: bool  # a learned scale before the layer's own input is added
    laurel_rank: int


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
    layer_input: LayerInputShape | None = None
    altup: AltUpShape | None = None
    output_scale: bool = False  # a learned number multiplies the layer's output
    branch_scale: float = 1.0  # multiplies what each sublayer adds to the residual
    learned_scale: bool = False  # and so does a learned factor for each number
    # "one norm", "two norms": the feed reads the layer's input beside the mixer, after the mixer's norm or its own
    parallel: Literal["no", "one norm", "two norms"] = "no"

    @property
    def stores_nothing(self) -> bool:
        """Whether no later step reads what this layer computes: its mixers only read cache sites of earlier layers."""
        return all(isinstance(mixer, AttentionShape) and mixer.kv_source is not None for mixer in self.mixers)

    def __post_init__(self) -> None:
        assert not self.learned_scale or (self.parallel == "no" and not self.norm_after), "of plain layers only"
        assert self.mixers or self.feed is not None, "a layer has a mixer or a feed"
        if self.parallel != "no":
            two = bool(self.mixers) and self.feed is not None and self.layer_input is None
            plain = self.norm_before and not self.norm_after and self.branch_scale == 1.0
            assert two and plain, "a parallel layer has a mixer and a feed, norms before them only and no branch scale"


def tail_of(layers: Sequence[LayerShape]) -> int:
    """The first of the trailing layers that store nothing; `len(layers)` if the last one stores something."""
    tail = len(layers)
    while tail > 0 and layers[tail - 1].stores_nothing:
        tail -= 1
    return tail


def bidirectional_head_dims(layers: tuple[LayerShape, ...]) -> tuple[int, ...]:
    """The head sizes of mixers that see the whole row, each once."""
    mixers = (mixer for layer in layers for mixer in layer.mixers)
    return tuple({m.head_dim: None for m in mixers if isinstance(m, AttentionShape) and not m.causal})


# Upper bounds of the memory that the layers of a model allocate in a step, from their shapes.


def sizes_of(layers: tuple[LayerShape, ...], hidden_size: int, on_cpu: bool) -> ModelSizes:
    """An upper bound of what these layers take beside the hidden states."""
    mixers = [mixer for layer in layers for mixer in layer.mixers if isinstance(mixer, AttentionShape)]
    feeds = [feed for layer in layers for feed in _feeds(layer.feed)]
    # mixers side by side hold their projections at once
    widths = [sum(mixer.elements_per_token(on_cpu) for mixer in layer.mixers) for layer in layers]
    # gate and up, and their product; a sparse gate has copies of its own
    widths += [(7 if feed.sparsity else 3) * feed.size for feed in feeds if isinstance(feed, MlpShape)]
    experts = [_expert_elements(feed, hidden_size, on_cpu) for feed in feeds if isinstance(feed, ExpertShape)]
    groups = {
        (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window, mixer.soft_cap, mixer.sinks)
        for mixer in mixers
        if mixer.has_own_site
    }
    return ModelSizes(
        widest=max(widths, default=0) + max(experts, default=0) + _beside(layers, hidden_size),
        per_step=max((sum(mixer.elements_per_step(on_cpu) for mixer in layer.mixers) for layer in layers), default=0),
        rotary=3 * sum({mixer.rope: mixer.head_dim for mixer in mixers}.values()),
        split_sums=sum(num_heads * head_dim + 2 * num_heads for num_heads, _, head_dim, *_ in groups),
        keys=max((mixer.num_kv_heads * mixer.head_dim for mixer in mixers), default=0),
        scored_heads=max(
            (mixer.num_heads for mixer in mixers if mixer.soft_cap or mixer.sinks or mixer.latent), default=0
        ),
    )


def _feeds(feed: FeedShape | None) -> tuple[MlpShape | ExpertShape, ...]:
    if isinstance(feed, DenseAndExpertsShape):
        return (feed.mlp, feed.experts)
    return () if feed is None else (feed,)


def _beside(layers: tuple[LayerShape, ...], hidden_size: int) -> int:
    """Elements of a token that stay while all layers run: its inputs of each layer, and its other copies."""
    inputs = sum(layer.layer_input.size for layer in layers if layer.layer_input is not None)
    copies = max((layer.altup.num_copies for layer in layers if layer.altup is not None), default=0)
    # the output of a mixer is held while the feed beside it runs
    parallel = hidden_size if any(layer.parallel != "no" for layer in layers) else 0
    # inputs are a sum of two, of which each has a copy; copies are predicted, corrected and held
    return 4 * inputs + 5 * copies * hidden_size + parallel


def _expert_elements(feed: ExpertShape, hidden_size: int, on_cpu: bool) -> int:
    """Router scores of a token and the rows of its chosen experts, and the shared expert's."""
    router = 8 * feed.num_experts  # logits, float32 scores, their sum with a bias, and groups
    shared = 0 if feed.shared is None else 3 * feed.shared.size
    latent = 2 * feed.latent_size  # the inputs of the experts, and their sum
    hidden_size = feed.latent_size or hidden_size
    if on_cpu:  # sorted inputs, outputs in both orders, weighted in float32; gate, up and product of one expert
        return router + shared + latent + feed.router.top_k * 6 * hidden_size + 3 * feed.size
    return router + shared + latent + feed.router.top_k * (2 * hidden_size + feed.size)
