"""Linear: one product, whose parts the checkpoint may store as separate tensors.

Every form of the product takes the step's context, which says which tokens have an adapter (`ops/lora`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from slipstream.device.streams import execute_in_parallel
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.norm import Norm, RMSNorm
from slipstream.nn.weight_format import CheckpointTensor, StoredPart, WeightFormat, WeightTarget, new_parameter
from slipstream.ops.linear import Activation
from slipstream.ops.linear.dispatch import FUSED_ACTIVATIONS
from slipstream.ops.linear.unnormalized import Chain, Unnormalized
from slipstream.ops.lora import (
    LoraTiles,
    LoraWeights,
    expand_lora,
    finish_lora,
    finish_lora_add,
    lora_delta,
    shrink_lora,
)
from slipstream.ops.lora.tiles import FEW_TOKENS, has_paired_blocks


class Linear(Layer):
    """Several named projections of the same input in one product; their outputs lie side by side.

    A single unnamed projection is `{"": size}`.
    """

    stored_parts: Mapping[str, StoredPart] | None = None  # of a rank that has some outputs; None: it has all
    input_part: StoredPart | None = None  # of a rank that has some inputs; None: it has all
    lora: LoraWeights | None = None  # adapters by slot, set by `nn/models/adapter_layout.py`; None: it has none

    def __init__(
        self, num_inputs: int, outputs: Mapping[str, int], bias: bool, format: WeightFormat, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.outputs = dict(outputs)
        self.num_outputs = sum(self.outputs.values())
        self.weight = format.new_weight(self.num_outputs, num_inputs)
        self.bias = new_parameter(self.num_outputs, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor, context: ForwardContext | None = None) -> torch.Tensor:
        """x [T, inputs] to [T, outputs]. `context` is None for heads, which run outside the network."""
        return self._multiply(x, self.bias, context)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, context: ForwardContext | None) -> torch.Tensor:
        """The product with the adapters of the step."""
        tiles = self._tiles(context)
        if tiles is None or self.lora is None:
            return self.weight.multiply(x, bias)
        product, shrink = partial(self.weight.multiply, x, bias), partial(shrink_lora, x, self.lora, tiles)
        # many tokens fill the device with either
        out, inner = execute_in_parallel(product, shrink) if len(x) <= FEW_TOKENS else (product(), shrink())
        return expand_lora(out, inner, self.lora, tiles)

    def _tiles(self, context: ForwardContext | None) -> LoraTiles | None:
        """The tokens of the step whose adapter may change this product."""
        return None if context is None or self.lora is None else context.batch.lora

    def activated(self, x: torch.Tensor, activation: Activation, context: ForwardContext | None = None) -> torch.Tensor:
        """activation(product), elementwise."""
        if self._tiles(context) is not None:
            return activation(self.forward(x, context))
        return self.weight.multiply_activated(x, self.bias, activation)

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product with norm(x + residual), in one pass where the weight has one; and x + residual."""
        if isinstance(norm, RMSNorm) and self._tiles(context) is None:
            return self.weight.multiply_normed(x, residual, norm.weight, norm.eps, self.bias, activation)
        normed, total = norm(x, residual)
        out = self.forward(normed, context)
        return out if activation is None else activation(out), total

    def takes_gated(self, x: torch.Tensor, activation: Activation, context: ForwardContext) -> bool:
        """Whether `after_gate` is faster than the activation in the product before. x: the input of that product."""
        return self._tiles(context) is None and self.weight.takes_gated(x, activation)

    def after_gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The product with a gated activation, in one pass where the weight has one. Not for steps with adapters."""
        return self.weight.multiply_gated(gate_up, activation, self.bias)

    @property
    def can_chain(self) -> bool:
        """Whether chains may use `add_to` and `after_unnormalized`."""
        return self.weight.can_chain

    def chain_for(self, x: torch.Tensor) -> Chain:
        """The fastest kind of chain for inputs of as many rows as x has; "": none."""
        return self.weight.chain_for(x)

    @property
    def can_stream(self) -> bool:
        """Whether the product can be streamed where `chain_for` says "library", if rows are few."""
        return self.weight.can_stream

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        norm: RMSNorm,
        chain: Chain,
        context: ForwardContext,
        gate: Activation | None = None,
    ) -> Unnormalized:
        """residual + product, in the residual's memory, on its way through the norm. Not for a product with a bias.
        `gate`: a gated activation of x, if `takes_gated`."""
        if gate is not None:
            return self.weight.add_gated_to(residual, x, gate, norm.weight, norm.eps)
        tiles = self._tiles(context)
        if tiles is not None and self.lora is not None:
            if chain == "streamed" and self._appends(x, self.lora):
                sums = self.weight.multiply_with_adapters(x, self.lora.a)
                return finish_lora_add(sums, self.lora, tiles, residual, norm.weight, norm.eps)
            # before the product, whose kernel computes the norm too; its weight is loaded meanwhile
            residual = expand_lora(residual, shrink_lora(x, self.lora, tiles), self.lora, tiles)
        return self.weight.add_to(residual, x, norm.weight, norm.eps, chain)

    def _appends(self, x: torch.Tensor | Unnormalized, lora: LoraWeights) -> bool:
        """Whether one GEMM multiplies x with the weight and with all matrices A."""
        return self.weight.can_append_adapters(x, lora.a)

    def after_unnormalized(
        self, x: Unnormalized, context: ForwardContext, activation: Activation | None = None
    ) -> torch.Tensor:
        """The GEMM with the normed x; the norm is not applied to x yet."""
        tiles = self._tiles(context)
        added = None
        if tiles is not None and self.lora is not None:
            if x.squares is not None and self._finishes(activation) and self._appends(x, self.lora):
                sums = self.weight.multiply_with_adapters(x, self.lora.a)
                return finish_lora(sums, self.lora, tiles, FUSED_ACTIVATIONS[activation])
            # before the product, which adds it before the activation; its weight is loaded meanwhile
            added = lora_delta(shrink_lora(x, self.lora, tiles), self.lora, tiles)
        return self.weight.multiply_unnormalized(x, self.bias, activation, added)

    def _finishes(self, activation: Activation | None) -> bool:
        """Whether `finish_lora` computes what follows the product."""
        assert self.lora is not None
        is_plain = self.bias is None and activation in FUSED_ACTIVATIONS
        return is_plain and (activation is None or has_paired_blocks(self.lora.runs))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Targets of the checkpoint's tensors, by part and kind: "q.weight", "q.bias". The format names the kinds."""
        for part in self.outputs:
            prefix = f"{part}." if part else ""
            for kind, target in self.targets_of(part, part):
                yield f"{prefix}{kind}", target

    def targets_of(self, part: str, stored: str) -> Iterator[tuple[str, WeightTarget]]:
        """Targets of one part, by kind. `stored`: the checkpoint's tensor that has it, by the name of its target."""
        names = list(self.outputs)
        first, size = sum(self.outputs[name] for name in names[: names.index(part)]), self.outputs[part]
        yield from self.weight.targets_in(stored, first, size)
        if self.bias is not None:
            yield "bias", WeightTarget((size,), partial(self._fill_bias, first))

    def _fill_bias(self, first: int, piece: CheckpointTensor) -> None:
        assert self.bias is not None
        self.bias[first : first + piece.shape[0]].copy_(piece.read())
