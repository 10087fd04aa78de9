"""DecoderShape: the sizes and options by which one decoder differs from another, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelSizes, RopeInfo
from slipstream.contracts.cache_spec import CacheSpec, PagedSpec, StateSpec, WindowSpec
from slipstream.nn.layer_sizes import sizes_of
from slipstream.nn.shapes import (
    AttentionShape,
    LayerInputsShape,
    LayerShape,
    MixerShape,
    NormShape,
    QueryScale,
    Shard,
)

_MANY_DRAFTS = 64  # rings of inputs are larger than without drafts; for few drafts they may have the same size


@dataclass(frozen=True, slots=True)
class RopeShape:
    info: RopeInfo
    head_dim: int
    switches: bool = True  # the batch chooses between two sets of frequencies per token (LongRoPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    ropes: tuple[RopeShape, ...]  # mixers refer to them by index; empty: no mixer is attention
    norm: NormShape  # of the last hidden states
    max_positions: int  # that the model was trained for
    tied: bool  # the embedding is also the projection to tokens
    layer_inputs: LayerInputsShape | None = None
    logit_cap: float = 0.0  # logits become logit_cap * tanh(logit / logit_cap); 0: they stay as they are
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False  # of the projection to tokens
    num_position_rows: int = 0  # of a table whose row for each position is added to the embedding (GPT-2); 0: no table
    # endings of names of weights that the checkpoint stores as [inputs, outputs]
    transposed: tuple[str, ...] = ()
    transposed_experts: bool = False  # stacked experts of the checkpoint are [experts, inputs, outputs]
    shard: Shard | None = None  # the rank that has a part of the vocabulary, whose size stays that of all ranks
    headless: bool = False  # the checkpoint has no projection to tokens: it gives vectors or scores

    @property
    def mixers(self) -> tuple[MixerShape, ...]:
        """The mixers of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def num_streams(self) -> int:
        """Hidden states of a token between layers."""
        return max((layer.altup.num_streams for layer in self.layers if layer.altup is not None), default=1)

    @property
    def causal(self) -> bool:
        """False: every token sees its whole text. Texts are then computed in one step and nothing is cached."""
        return all(mixer.causal for mixer in self.mixers)

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """The mixers that are attention, in order."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, AttentionShape))

    @property
    def query_scale(self) -> QueryScale | None:
        """The scale of the queries of all layers."""
        found = {mixer.query_scale for mixer in self.attentions}
        assert len(found) <= 1, "layers with different query scales are not supported"
        return next(iter(found), None)

    def map_attention(self, change: Callable[[AttentionShape], AttentionShape]) -> DecoderShape:
        """The same model with its attention mixers changed."""

        def changed(mixer: MixerShape) -> MixerShape:
            return change(mixer) if isinstance(mixer, AttentionShape) else mixer

        layers = (replace(layer, mixers=tuple(map(changed, layer.mixers))) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def sites(self) -> tuple[tuple[int | None, ...], ...]:
        """Per layer and mixer, the number of the cache site that it reads; None: it has no cache. Raises
        UnsupportedModel for a `kv_source` whose site it cannot read."""
        next_site = count()
        sites: list[tuple[int | None, ...]] = []
        for number, layer in enumerate(self.layers):
            own = [next(next_site) if mixer.has_own_site else None for mixer in layer.mixers]
            for index, mixer in enumerate(layer.mixers):
                if isinstance(mixer, AttentionShape) and mixer.kv_source is not None:
                    self._check_source(number, mixer)
                    own[index] = sites[mixer.kv_source][0]
            sites.append(tuple(own))
        return tuple(sites)

    def cache_specs(self, page_size: int, dtype: str) -> list[CacheSpec]:
        """A spec per cache site. Keys and values are stored in `dtype`."""
        return [_cache_spec(mixer, page_size, dtype) for mixer in self.attentions if mixer.has_own_site]

    @property
    def state_sites(self) -> tuple[tuple[int | None, ...], ...]:
        """Per layer and mixer, the number of its state site; None: it has no recurrent state."""
        next_site = count()
        # whether a mixer has a state does not depend on the dtype
        return tuple(
            tuple(next(next_site) if mixer.state_fields("float32") else None for mixer in layer.mixers)
            for layer in self.layers
        )

    def state_specs(self, dtype: str, num_drafts: int = 0, on_cpu: bool = True) -> list[StateSpec]:
        """A spec per state site, for a model of this dtype and up to `num_drafts` drafts per row and step."""
        for mixer in self.mixers if num_drafts else ():
            plain = mixer.state_fields(dtype)
            if plain and plain == mixer.state_fields(dtype, _MANY_DRAFTS):
                raise UnsupportedModel(
                    f"{mixer.name} keeps no inputs to undo rejected drafts; remove speculative_config"
                )
        defers = not on_cpu and not num_drafts
        found = ((mixer, mixer.state_fields(dtype, num_drafts)) for mixer in self.mixers)
        return [
            StateSpec((*fields, *mixer.deferred_fields(dtype)) if defers else fields, mixer.chunk_rounding)
            for mixer, fields in found
            if fields
        ]

    def sizes(self, on_cpu: bool) -> ModelSizes:
        return sizes_of(self.layers, self.hidden_size, on_cpu)

    def _check_source(self, number: int, mixer: AttentionShape) -> None:
        source = mixer.kv_source
        assert source is not None
        found = self.layers[source].mixers[:1] if 0 <= source < number else ()
        if not found or not isinstance(found[0], AttentionShape) or not found[0].has_own_site:
            raise UnsupportedModel(
                f"layer {number} reads the keys and values of layer {source}; "
                "it must be an earlier layer that stores its own"
            )
        if _cache_spec(found[0], 1, "float32") != _cache_spec(mixer, 1, "float32"):
            raise UnsupportedModel(
                f"layer {number} reads the keys and values of layer {source}, "
                "which has other heads, another window, another soft cap or other sinks; they must be the same"
            )


def _cache_spec(mixer: AttentionShape, page_size: int, dtype: str) -> CacheSpec:
    spec = PagedSpec(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        dtype=dtype,
        page_size=page_size,
        soft_cap=mixer.soft_cap,
        sinks=mixer.sinks,
        value_dim=0 if mixer.latent is None else mixer.latent.kv_rank,
    )
    return WindowSpec(**msgspec.structs.asdict(spec), window=mixer.window) if mixer.window else spec
