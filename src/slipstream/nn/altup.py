"""AltUpBlock: a layer of Gemma 3n, which computes one of a token's copies and corrects the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from slipstream.nn.block import DecoderBlock
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.embedding import LayerInput
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import RMSNorm
from slipstream.nn.shapes import AltUpShape, LayerShape, NormShape
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    UnquantizedWeight,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.gemm.altup import correct_copies, predict_copies, route_copies


class AltUpBlock(DecoderBlock):
    def __init__(
        self,
        number: int,
        shape: LayerShape,
        sites: Sequence[int | None],
        state_sites: Sequence[int | None],
        layout: Layout,
    ) -> None:
        super().__init__(number, shape, sites, state_sites, layout)
        assert shape.altup is not None and len(self.sublayers) == 3, "attention, feed-forward and per-layer input"
        name = f"layers.{number}"
        self.altup = AltUp(f"{name}.altup", shape.altup, shape.norm, layout)
        self.laurel = Laurel(f"{name}.laurel", shape.altup.laurel_rank, shape.norm, layout)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, copies, hidden]; with `last` the result is that of the last tokens. There is no residual."""
        assert residual is None and self.shape.altup is not None
        attention, feed, layer_input = self.sublayers
        assert isinstance(attention.norm, RMSNorm) and isinstance(attention.module, Attention)
        assert isinstance(layer_input.module, LayerInput)
        active = self.shape.altup.active
        predicted = self.altup.predict(x, context)
        normed, _ = attention.norm(predicted[:, active].contiguous())
        mixed = attention.module(normed, context, last)
        if last is not None:
            predicted, normed, context = last.of(predicted), last.of(normed), last.context
        mixed = predicted[:, active] + _normed(attention.norm_after, mixed)
        mixed = (mixed + (normed + self.laurel(normed, context))) * 2**-0.5
        made, _ = feed.module.after_norm(feed.norm, mixed, None, context, None)
        corrected = self.altup.correct(predicted, mixed + _normed(feed.norm_after, made), context)
        added = _normed(layer_input.norm_after, layer_input.module(self.altup.scaled(corrected), context))
        corrected[:, 1:] += added.unsqueeze(1)
        return corrected, None


def _normed(norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
    assert norm is not None, "layers of Gemma 3n norm the outputs of all sublayers"
    normed: torch.Tensor = norm(x)[0]
    return normed


# AltUp of Gemma 3n: a token has several hidden states ("copies"), of which a layer computes one.
#
# Before a layer runs, all copies are predicted from each other; afterwards the difference between the computed copy
# and its prediction corrects all of them. AltupCopies lie token by token: [T, copies, hidden].


class AltUp(Layer):
    """The predictions and corrections around one layer."""

    def __init__(self, name: str, shape: AltUpShape, norm: NormShape, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        num, hidden, dtype, format_of = shape.num_copies, layout.hidden_size, layout.dtype, layout.format_of
        self.router = Linear(hidden, {"": num}, False, format_of(f"{name}.router"), dtype)
        self.norm = RMSNorm(hidden, norm.eps, dtype, norm.offset)
        self.prediction = Linear(num, {"": num * num}, False, format_of(f"{name}.prediction"), dtype)
        self.correction = Linear(num, {"": num}, False, format_of(f"{name}.correction"), dtype)
        self.output_scale = new_parameter(hidden, dtype=dtype)
        self.router_scale = 1.0 / hidden

    def predict(self, copies: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return predict_copies(copies, self._route(copies[:, self.shape.active], self.prediction, context))

    def correct(self, predicted: torch.Tensor, made: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`made` [T, hidden] is what the layer computed."""
        return correct_copies(predicted, made, self._route(made, self.correction, context), self.shape.active)

    def scaled(self, corrected: torch.Tensor) -> torch.Tensor:
        """The active copy, [T, hidden], as per-layer inputs see it."""
        active = corrected[:, self.shape.active]
        return active * self.output_scale if self.shape.scaled else active.contiguous()

    def _route(self, x: torch.Tensor, coefficients: Linear, context: ForwardContext) -> torch.Tensor:
        """The weights of predictions or corrections from a copy [T, hidden]."""
        router, last = self.router.weight, coefficients.weight
        if type(router) is type(last) is UnquantizedWeight and context.batch.lora is None:
            return route_copies(x, self.norm.weight, self.norm.eps, self.router_scale, router.data, last.data)
        routed = self.router(self.norm(x.contiguous())[0] * self.router_scale, context)
        wide = torch.promote_types(x.dtype, torch.float32)
        made: torch.Tensor = coefficients(torch.tanh(routed.to(wide)).to(x.dtype), context)
        return made

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "output_scale", WeightTarget(tuple(self.output_scale.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        piece.write_to(self.output_scale)


class Laurel(Layer):
    """A low-rank addition to the residual: norm(right(left(x)))."""

    def __init__(self, name: str, rank: int, norm: NormShape, layout: Layout) -> None:
        super().__init__()
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        self.left = Linear(hidden, {"": rank}, False, format_of(f"{name}.left"), dtype)
        self.right = Linear(rank, {"": hidden}, False, format_of(f"{name}.right"), dtype)
        self.norm = RMSNorm(hidden, norm.eps, dtype, norm.offset)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.right(self.left(x, context), context))[0]
        return normed


class AltupCopies(Layer):
    """Embeddings to copies, and copies to one hidden state. Projected copies get the length of the first."""

    def __init__(self, name: str, num: int, layout: Layout) -> None:
        super().__init__()
        hidden, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        others = [str(number) for number in range(num - 1)]
        self.into = Linear(hidden, dict.fromkeys(others, hidden), False, format_of(f"{name}.into"), dtype)
        self.out_of = torch.nn.ModuleList(
            Linear(hidden, {"": hidden}, False, format_of(f"{name}.out_of.{number}"), dtype) for number in others
        )

    def split(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [T, hidden] to [T, copies, hidden]."""
        others = self.into(x, context).unflatten(1, (-1, x.shape[1]))
        return torch.cat([x.unsqueeze(1), _of_length(others, x.unsqueeze(1))], 1)

    def join(self, copies: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, copies, hidden] to their mean, [T, hidden]."""
        first = copies[:, :1]
        others = [product(copies[:, 1 + n].contiguous(), context) for n, product in enumerate(self.out_of)]
        return torch.cat([first, _of_length(torch.stack(others, 1), first)], 1).mean(1)


def _of_length(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    wanted, found = like.square().mean(-1, keepdim=True).sqrt(), x.square().mean(-1, keepdim=True)
    return x * wanted / found.clamp(min=1e-5).sqrt()
