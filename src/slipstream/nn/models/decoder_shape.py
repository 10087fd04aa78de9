"""DecoderShape: the facts by which one decoder differs from another, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from slipstream.cache_spec import CacheSpec, PagedSpec, WindowSpec
from slipstream.config.rope_info import RopeInfo
from slipstream.nn.shapes import LayerShape, MixerShape, NormShape


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
    ropes: tuple[RopeShape, ...]  # mixers refer to them by index
    norm: NormShape  # of the last hidden states
    max_positions: int  # that the model was trained for
    tied: bool  # the embedding is also the projection to tokens
    logit_cap: float = 0.0  # logits become logit_cap * tanh(logit / logit_cap); 0: they stay as they are
    embedding_scale: float = 1.0
    headless: bool = False  # the checkpoint has no projection to tokens: it gives vectors or scores

    @property
    def mixers(self) -> tuple[MixerShape, ...]:
        """The mixers of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def causal(self) -> bool:
        """False: every token sees its whole text. Texts are then computed in one step and nothing is cached."""
        return all(mixer.causal for mixer in self.mixers)

    def map_mixers(self, change: Callable[[MixerShape], MixerShape]) -> DecoderShape:
        layers = (replace(layer, mixers=tuple(change(mixer) for mixer in layer.mixers)) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def sites(self) -> tuple[tuple[int | None, ...], ...]:
        """Per layer and mixer, the number of its cache site; None: it has no cache."""
        numbers = count()
        return tuple(tuple(next(numbers) if mixer.causal else None for mixer in layer.mixers) for layer in self.layers)

    def cache_specs(self, page_size: int, itemsize: int) -> list[CacheSpec]:
        """In layer order."""
        return [_cache_spec(mixer, page_size, itemsize) for mixer in self.mixers if mixer.causal]


def _cache_spec(mixer: MixerShape, page_size: int, itemsize: int) -> CacheSpec:
    sizes = (mixer.num_kv_heads, mixer.head_dim, itemsize, page_size)
    return WindowSpec(*sizes, mixer.window) if mixer.window else PagedSpec(*sizes)
