"""DecoderBlock: one layer of a decoder as a list of sublayers, run one after another.

This is the reference that the other implementations in this package are compared with. The residual is passed beside x
and added inside the norm of the next sublayer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.embedding import LayerInput
from slipstream.nn.layers.experts import DenseAndExperts, Experts
from slipstream.nn.layers.latent_attention import LatentAttention
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Products
from slipstream.nn.layers.mlp import Mlp, PlainMlp
from slipstream.nn.layers.norm import AppliedNorm, NoNorm, Norm, ResidualLayerNorm, RMSNorm, new_norm
from slipstream.nn.layers.recurrent import DeltaNet, Mamba1, Mamba2, ShortConv
from slipstream.nn.shapes import (
    AttentionShape,
    DeltaShape,
    DenseAndExpertsShape,
    ExpertShape,
    FeedShape,
    LayerShape,
    MixerShape,
    MlpShape,
    NormShape,
    has_only,
)
from slipstream.nn.ssm_shapes import Mamba1Shape, Mamba2Shape, ShortConvShape
from slipstream.nn.weights.weight_format import CheckpointTensor, WeightTarget, new_parameter
from slipstream.ops.gemm.moe import UnsummedExperts


class SublayerModule(Protocol):
    """The computation of a sublayer between its norms."""

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output for norm(x + residual), and x + residual; for all tokens, or for the `last` only. A
        recurrent mixer computes all tokens in either case, since its state needs them."""

    def products(self) -> Products | None:
        """The module as two products; None if it computes anything else."""


class Mixer(SublayerModule, Protocol):
    def __call__(self, x: torch.Tensor, context: ForwardContext, last: LastTokens | None) -> torch.Tensor:
        """The output for a normed input x, for all tokens or for the `last` only."""


_APPLIED = AppliedNorm()


@dataclass(frozen=True, slots=True)
class Sublayer:
    norm: Norm
    module: SublayerModule
    norm_after: RMSNorm | ResidualLayerNorm | None

    def run(
        self,
        x: torch.Tensor | UnsummedExperts,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self.norm
        if isinstance(x, UnsummedExperts):
            assert residual is not None and type(norm) is RMSNorm
            (x, residual), norm = x.add_and_norm(residual, norm.weight, norm.eps), _APPLIED
        x, residual = self.module.after_norm(norm, x, residual, context, last)
        if self.norm_after is not None:
            x, _ = self.norm_after(x)
        return x, residual

    def parts(self) -> SublayerParts | None:
        """None: only the reference can run this sublayer."""
        products = self.module.products()
        norm, after = self.norm, self.norm_after
        if products is None or type(norm) is not RMSNorm or (after is not None and type(after) is not RMSNorm):
            return None
        return SublayerParts(norm, products, after)


@dataclass(frozen=True, slots=True)
class SublayerParts:
    """A sublayer as the chains run it: a norm, two products with a mix or an activation between, and maybe a norm."""

    norm: RMSNorm
    products: Products
    norm_after: RMSNorm | None


class DecoderBlock(Layer):
    """Modules are registered under the names of their shapes: `attention`, `attention_norm`, `mlp`, `mlp_out_norm`."""

    def __init__(
        self,
        number: int,
        shape: LayerShape,
        sites: Sequence[int | None],
        state_sites: Sequence[int | None],
        layout: Layout,
    ) -> None:
        """`number` of the layer; `sites`, `state_sites`: the cache site and the state site of each mixer; None: it has
        none."""
        super().__init__()
        self.shape = shape
        name = f"layers.{number}"
        sublayers = []
        if shape.mixers:
            mixers = [
                new_mixer(name, mixer, shape, site, state_site, layout)
                for mixer, site, state_site in zip(shape.mixers, sites, state_sites, strict=True)
            ]
            for mixer, module in zip(shape.mixers, mixers, strict=True):
                self.add_module(mixer.name, module)
            scaled = [
                with_scale(module, mixer.output_scale * shape.branch_scale)
                for mixer, module in zip(shape.mixers, mixers, strict=True)
            ]
            mixed = scaled[0] if len(scaled) == 1 else Parallel(scaled)
            mixed = self._with_learned_scale(shape.mixers[0].name, mixed, layout)
            sublayers.append(self._sublayer(shape.mixers[0].name, mixed, layout))
        if shape.feed is not None:
            feed = new_feed(name, shape.feed, layout)
            self.add_module(shape.feed.name, feed)
            own_scale = shape.feed.output_scale if isinstance(shape.feed, MlpShape) else 1.0
            scaled_feed = with_scale(feed, own_scale * shape.branch_scale)
            scaled_feed = self._with_learned_scale(shape.feed.name, scaled_feed, layout)
            sublayers.append(self._sublayer(shape.feed.name, scaled_feed, layout, shape.parallel != "one norm"))
        if shape.layer_input is not None:
            own = LayerInput(f"{name}.{shape.layer_input.name}", shape.layer_input, number, layout)
            self.add_module(shape.layer_input.name, own)
            sublayers.append(self._sublayer(shape.layer_input.name, own, layout, norm_before=False))
        self.sublayers = tuple(sublayers)
        self.output_scale = new_parameter(1, dtype=layout.dtype) if shape.output_scale else None

    def _with_learned_scale(self, name: str, module: Any, layout: Layout) -> Any:
        if not self.shape.learned_scale:
            return module
        factors = Factors(layout.hidden_size, layout.dtype)
        self.add_module(f"{name}_scale", factors)
        return Scaled(module, factors)

    def _sublayer(self, name: str, module: SublayerModule, layout: Layout, norm_before: bool = True) -> Sublayer:
        shape = self.shape

        def own_norm() -> RMSNorm | ResidualLayerNorm:
            return new_norm(layout.hidden_size, shape.norm, layout.dtype)

        before = own_norm() if shape.norm_before and norm_before else NoNorm()
        after = own_norm() if shape.norm_after else None
        self.add_module(f"{name}_norm", before)
        if after is not None:
            self.add_module(f"{name}_out_norm", after)
        return Sublayer(before, module, after)

    def forward(
        self,
        x: torch.Tensor | UnsummedExperts,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x and residual [T, hidden]; with `last` the results are those of the last tokens, [B, hidden]. x may be
        `UnsummedExperts` of the block before, see `leave_sum_to`."""
        for sublayer in self.sublayers:
            x, residual = sublayer.run(x, residual, context, last)
            if last is not None:  # the first sublayer has selected them
                context, last = last.context, None
        if self.output_scale is not None:
            x, residual = x * self.output_scale, None if residual is None else residual * self.output_scale
        return x, residual

    def leave_sum_to(self, following: nn.Module | None) -> None:
        """From now on, experts at the end of this block may leave the sum over a token's experts to the first norm of
        the block that follows, if it takes them. None: this block returns sums."""
        end = self.sublayers[-1]
        if isinstance(end.module, Experts):
            takes = type(following) is DecoderBlock and type(following.sublayers[0].norm) is RMSNorm
            end.module.leaves_sum = takes and end.norm_after is None and self.output_scale is None

    def chain_parts(self) -> tuple[SublayerParts, ...] | None:
        """The parts of all sublayers, for implementations other than this reference; None: there is no other."""
        if not has_only(self.shape, {"mixers", "feed", "norm", "norm_before", "norm_after"}):
            return None
        parts = [sublayer.parts() for sublayer in self.sublayers]
        found = tuple(part for part in parts if part is not None)
        return found if len(found) == len(parts) else None

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The output scale; the targets of the layers are yielded by the layers."""
        if self.output_scale is not None:
            yield "output_scale", WeightTarget((1,), self._fill_scale)

    def _fill_scale(self, piece: CheckpointTensor) -> None:
        assert self.output_scale is not None
        piece.write_to(self.output_scale)


class Parallel:
    """Several mixers on the same normed input; their outputs are summed."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self.mixers = mixers

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = norm(x, residual)
        out: torch.Tensor = self.mixers[0](normed, context, last)
        for mixer in self.mixers[1:]:
            out = out + mixer(normed, context, last)
        return out, total if last is None else last.of(total)

    def products(self) -> None:
        return None


class Factors(Layer):
    """A learned factor for each number of a hidden state."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(size, dtype=dtype)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget(tuple(self.weight.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        piece.write_to(self.weight)


class Scaled:
    """A sublayer's module whose output is multiplied by a constant, or by a learned factor for each number."""

    def __init__(self, module: Any, scale: float | Factors) -> None:
        self.module, self.scale = module, scale

    def __call__(self, x: torch.Tensor, context: ForwardContext, last: LastTokens | None) -> torch.Tensor:
        return self._scaled(self.module(x, context, last))

    def _scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out * (self.scale.weight if isinstance(self.scale, Factors) else self.scale)

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = self.module.after_norm(norm, x, residual, context, last)
        return self._scaled(out), total

    def products(self) -> None:
        return None


def with_scale(module: Any, scale: float) -> Any:
    return module if scale == 1.0 else Scaled(module, scale)


def new_attention(
    name: str, shape: AttentionShape, norm: NormShape, site: int | None, layout: Layout
) -> Attention | LatentAttention:
    if shape.latent is not None:
        return LatentAttention(name, shape, site, layout)
    return Attention(name, shape, norm, site, layout)


MIXERS: dict[type[MixerShape], Callable[..., Any]] = {
    AttentionShape: new_attention,
    DeltaShape: DeltaNet,
    Mamba1Shape: Mamba1,
    Mamba2Shape: Mamba2,
    ShortConvShape: ShortConv,
}
"""The layer of each kind of mixer. It is called with the mixer's full name, its shape, the layer's norm, its site (a
cache site, or a state site if it has a recurrent state) and the layout."""


def new_mixer(
    name: str, mixer: MixerShape, layer: LayerShape, site: int | None, state_site: int | None, layout: Layout
) -> Any:
    """A module that is a `Mixer`."""
    assert site is None or state_site is None, f"{name}.{mixer.name} has a cache site and a state site"
    own_site = site if state_site is None else state_site
    return MIXERS[type(mixer)](f"{name}.{mixer.name}", mixer, layer.norm, own_site, layout)


def new_feed(name: str, feed: FeedShape, layout: Layout) -> Mlp | PlainMlp | Experts | DenseAndExperts:
    if isinstance(feed, DenseAndExpertsShape):
        return DenseAndExperts(f"{name}.{feed.name}", feed, layout)
    if isinstance(feed, ExpertShape):
        return Experts(f"{name}.{feed.name}", feed, layout)
    kind = Mlp if feed.gated else PlainMlp
    return kind(f"{name}.{feed.name}", feed, layout)


# ParallelBlock: a layer whose feed-forward reads the layer's input, beside the mixer and not after it.


class ParallelBlock(DecoderBlock):
    """x + mixer(norm(x)) + feed(norm(x)), where the feed has a norm of its own or shares the mixer's."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `DecoderBlock.forward`."""
        mixer, feed = self.sublayers
        mix: Any = mixer.module
        mlp: Any = feed.module
        normed, total = mixer.norm(x, residual)
        mixed = mix(normed, context, last)
        if last is not None:
            normed, total, context = last.of(normed), last.of(total), last.context
        if self.shape.parallel == "two norms":
            normed, _ = feed.norm(total)
        return mixed + mlp(normed, context), total
