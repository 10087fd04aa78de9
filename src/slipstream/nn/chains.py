"""CudaChain: the layers of a decoder as a chain of products that add the residual themselves, on CUDA.

In small steps on Hopper the norms have no kernel of their own either: see `ops/gemm/linear/tiles.py`. One kernel may
have all GEMMs of a single row from one attention to the next: see `ops/gemm/quantized/layer.py`. Steps for which no
chain is faster, and large steps with adapters, run by the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from slipstream.nn.block import DecoderBlock, SublayerParts
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import ResidualLayerNorm, RMSNorm
from slipstream.nn.sdpa import SdpaMetadata
from slipstream.nn.shapes import AttentionShape, MlpShape, has_only, tail_of
from slipstream.ops.decode_layers import (
    DecoderSpec,
    LayerWeights,
    ProductWeights,
    build_layers,
    decode_layers,
    max_rows,
)
from slipstream.ops.elementwise import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.gemm.chains import Chain, Unnormalized
from slipstream.ops.gemm.description import Activation, AddTo
from slipstream.ops.gemm.linear.dispatch import MAX_STREAMING_ROWS_OF_LARGE_WEIGHT
from slipstream.ops.gemm.quantized.layer import claim_barrier, joins_gemms, multiply_layer
from slipstream.ops.gemm.quantized.matrix import LayerGemms, QuantizedMatrix
from slipstream.ops.gemm.table import add_product, choose_chain, native_rows
from slipstream.ops.platform import native


class CudaChain:
    def __init__(
        self, parts: Sequence[Sequence[SublayerParts]], norm: RMSNorm, has_tail: bool, taps: Sequence[int] = ()
    ) -> None:
        """`parts`: of each block; `norm`: of the last hidden states; `has_tail`: trailing blocks store nothing, so the
        reference runs them for last tokens only; `taps`: blocks whose inputs are returned too."""
        self.parts = [part for block in parts for part in block]
        self.last_block = len(self.parts) - len(parts[-1])  # its first sublayer
        self.norm = norm
        self.has_tail = has_tail
        self.taps = [sum(map(len, parts[:block])) for block in taps]  # the first sublayers of these blocks
        # weights of equal shape use the same kernel: check one per shape
        linears = [linear for part in self.parts for linear in (part.products.first, part.products.last)]
        self.linears = list({(linear.num_outputs, linear.num_inputs): linear for linear in linears}.values())
        layers = filter(None, map(self.layer_gemms, range(len(self.parts))))
        has_layers = any(gemms.fits and gemms.are_fp8 for gemms, _ in layers)
        # None too if another model of this device has it
        self.barrier = claim_barrier(norm.weight.device, norm) if has_layers else None

    @classmethod
    def of(cls, blocks: Sequence[DecoderBlock], norm: RMSNorm, taps: Sequence[int] = ()) -> CudaChain | None:
        """None if a block has a part that chains do not run."""
        parts = [block.chain_parts() for block in blocks]
        found = [block for block in parts if block is not None and all(map(_is_plain, block))]
        if not found or len(found) != len(parts):
            return None
        return cls(found, norm, tail_of([block.shape for block in blocks]) < len(blocks), taps)

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        """x [T, hidden], which is overwritten, to the normed hidden states; None: the reference is faster."""
        is_streaming = context.batch.lora is not None or (context.only_last and self.has_tail)  # or not a chain at all
        chain = choose_chain(x, [linear.weight.matrix for linear in self.linears], is_streaming)
        if not chain or (chain == "library" and is_streaming):
            return None
        last = self.last_tokens(chain, context)
        part = self.parts[0]
        inputs = {0: x.clone()} if 0 in self.taps else {}
        made, total = part.products.first.after_norm(part.norm, x, None, context, part.products.activation)
        index = 0
        gate = None
        while True:
            if part.products.mix is not None:
                made = part.products.mix(made, context, last if index >= self.last_block else None)
            if last is not None and index == self.last_block:
                total = last.of(total)
            if index + 1 == len(self.parts):
                break
            joined = self.join(index, made, context)
            if joined is not None:
                assert self.barrier is not None
                made, total = multiply_layer(made, total, *joined, self.barrier)
                index += 2
                if index == len(self.parts):
                    break
                part = self.parts[index]
            else:
                index += 1
                sums = self.add(part.products.last, total, made, self.parts[index].norm, chain, context, gate)
                part, total = self.parts[index], sums.total
            if index in self.taps:
                inputs[index] = total.clone()  # the next sum may be written to the same memory
            if joined is None:
                split = gate = None
                if last is not None and index == self.last_block and part.products.split is not None:
                    split = part.products.split(sums.rows_normed(), context, last)
                if split is None:
                    gate = self.last_gate(part, total, chain, context)
                    activation = part.products.activation if gate is None else None
                    made = part.products.first(sums, context, activation)
                else:
                    made = split
        # the kernel of a whole last layer has normed the hidden states
        out = made if index == len(self.parts) else self.end(part, made, total, chain, context, gate)
        if self.taps:
            assert not context.only_last, "a model with taps returns all tokens"
            return torch.cat([out, *(inputs[index] for index in self.taps)], 1)
        return out.index_select(0, context.last_indices()) if context.only_last and last is None else out

    def end(
        self,
        part: SublayerParts,
        made: torch.Tensor,
        total: torch.Tensor,
        chain: Chain,
        context: ForwardContext,
        gate: Activation | None,
    ) -> torch.Tensor:
        """The last product of the last sublayer, the sum, and the norm of the hidden states."""
        last = part.products.last
        if len(made) <= MAX_STREAMING_ROWS_OF_LARGE_WEIGHT:
            return self.norm(last(made, context, None, gate), total)[0]
        # other kernels than those of chains do not stream large weights
        sums = self.add(last, total, made, self.norm, chain, context, gate)
        return self.norm(sums.total)[0] if sums.normed is None else sums.normed

    @staticmethod
    def add(
        linear: Linear,
        residual: torch.Tensor,
        x: torch.Tensor,
        norm: RMSNorm,
        chain: Chain,
        context: ForwardContext,
        gate: Activation | None,
    ) -> Unnormalized:
        return add_product(linear.gemm(x, context, gate=gate, add=AddTo(residual, norm.weight, norm.eps, chain)))

    def last_tokens(self, chain: Chain, context: ForwardContext) -> LastTokens | None:
        """The tokens of which the mixer of the last block returns outputs; None: all, or there is no mixer."""
        has_mixer = self.parts[self.last_block].products.mix is not None
        # the library's products take any number of rows
        return context.last_tokens() if has_mixer and context.only_last and chain == "library" else None

    def last_gate(
        self, part: SublayerParts, x: torch.Tensor, chain: Chain, context: ForwardContext
    ) -> Activation | None:
        """The gated activation of a sublayer, if it is faster in its last GEMM than in its first."""
        activation, last = part.products.activation, part.products.last
        is_gated_last = chain == "library" and activation is not None and last.takes_gate(x, activation, context)
        return activation if is_gated_last else None

    def join(self, index: int, x: torch.Tensor, context: ForwardContext) -> tuple[LayerGemms, Activation] | None:
        """`layer_gemms`, if one kernel computes them for x."""
        found = None if self.barrier is None or context.batch.lora is not None else self.layer_gemms(index)
        return found if found is not None and joins_gemms(x, *found) else None

    def layer_gemms(self, index: int) -> tuple[LayerGemms, Activation] | None:
        """The last GEMM of an attention, the next sublayer's two, and the first of the attention after it, if there is
        one, with the activation between; None if these sublayers are others, or weights have kernels of their own
        only."""
        if index + 2 > len(self.parts):
            return None
        own, feed = self.parts[index : index + 2]
        is_layer = own.products.mix is not None and feed.products.mix is None and feed.products.first.bias is None
        norm, next_qkv = self.norm, None
        if index + 2 < len(self.parts):
            following = self.parts[index + 2]
            norm, next_qkv = following.norm, quantized_matrix(following.products.first)
            has_bias = following.products.first.bias is not None
            is_layer = is_layer and following.products.mix is not None and not has_bias and next_qkv is not None
        activation = feed.products.activation
        linears = (own.products.last, feed.products.first, feed.products.last)
        o, gate_up, down = map(quantized_matrix, linears)
        if not is_layer or activation is None or o is None or gate_up is None or down is None:
            return None
        norms = (feed.norm.weight, feed.norm.eps, norm.weight, norm.eps)
        return LayerGemms(o, gate_up, down, next_qkv, *norms), activation


def quantized_matrix(linear: Linear) -> QuantizedMatrix | None:
    """The matrix that a kernel of several GEMMs reads; None: this weight has its own kernels only."""
    matrix = linear.weight.matrix
    return matrix if isinstance(matrix, QuantizedMatrix) and linear.can_chain else None


def _is_plain(part: SublayerParts) -> bool:
    """No norm after, no bias where a residual is added, and weights that add to a residual."""
    first, last = part.products.first, part.products.last
    return part.norm_after is None and last.bias is None and first.can_chain and last.can_chain


# FusedCpu: the layers of a decoder as one C call, for steps in which every row has one token.
#
# It runs float32 decoders on the CPU whose layers are attention and a gated feed-forward of one size, with weights that
# the C kernels read. All other steps run by the reference.

# fields of shapes that the C code implements, or the loaders of the weights that it reads
_KNOWN_OF_ATTENTION = {
    "name",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "scale",
    "qk_norm",
    "window",
    "soft_cap",
    "rope",
}
_KNOWN_OF_ATTENTION |= {"qkv_bias", "output_bias", "fused", "by_head", "rotary_pairs"}
_KNOWN_OF_MLP = {"name", "size", "activation", "gated", "bias", "down_bias", "fused", "up_first"}

Pair = tuple[SublayerParts, SublayerParts]
"""Attention and feed-forward of a block."""


class FusedCpu:
    def __init__(self, pairs: Sequence[Pair], norm: RMSNorm) -> None:
        self.pairs = pairs
        self.norm = norm
        # collected at the first step: low-bit weights are packed when they are filled. Empty: a weight has no C form
        self._weights: list[LayerWeights] | None = None
        self._max_rows = 0
        self._caches: Any = None  # those that `_native` points at
        self._native: Any = None

    @classmethod
    def of(cls, blocks: Sequence[DecoderBlock], norm: RMSNorm) -> FusedCpu | None:
        """None if a block has a part that the C code does not know, or another size than the first block; or
        if norms have several eps."""
        pairs = [_pair(block) for block in blocks]
        found = [pair for pair in pairs if pair is not None]
        if not found or len(found) != len(pairs) or len({_sizes(pair) for pair in found}) > 1:
            return None
        if any(part.norm.eps != norm.eps for pair in found for part in pair):
            return None
        return cls(found, norm)

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        """x [B, hidden] to the normed hidden states; None: the step has chunks, adapters or too many rows, or there are
        no kernels yet."""
        metadata, lora = context.metadata, context.batch.lora
        if lora is not None or type(metadata) is not SdpaMetadata or not metadata.is_decode or not native.serves(x):
            return None
        if self._weights is None:
            self._weights = _collect(self.pairs, context)
            self._max_rows = max_rows([p for layer in self._weights for p in (layer.qkv, layer.down)])
        if not self._weights or len(x) > self._max_rows:
            return None
        if self._caches is not context.caches:
            caches = [context.caches[_site(pair)] for pair in self.pairs]
            self._native = build_layers(_decoder_spec(self.pairs[0], context), self._weights, self.norm.weight, caches)
            self._caches = context.caches
        batch = context.batch
        return decode_layers(self._native, x, context.rotary, batch.slots, batch.page_tables, batch.lengths)


def _pair(block: DecoderBlock) -> Pair | None:
    parts = block.chain_parts()
    if parts is None or len(parts) != 2:
        return None
    attention, feed = parts
    if not isinstance(attention.products.shape, AttentionShape) or not isinstance(feed.products.shape, MlpShape):
        return None
    shape = attention.products.shape
    knows_norm = shape.qk_norm == "none" or (shape.qk_norm == "heads" and attention.products.head_norm is not None)
    knows_activation = feed.products.activation in (silu_and_mul, gelu_tanh_and_mul)
    knows_shapes = has_only(shape, _KNOWN_OF_ATTENTION) and has_only(feed.products.shape, _KNOWN_OF_MLP)
    return (attention, feed) if knows_norm and knows_activation and knows_shapes else None


def _site(pair: Pair) -> int:
    site = pair[0].products.site
    assert site is not None, "attention without a cache"
    return site


def _sizes(pair: Pair) -> tuple[Any, ...]:
    """Sizes that the C code has once for all layers."""
    attention, feed = pair[0].products.shape, pair[1].products.shape
    assert isinstance(attention, AttentionShape) and isinstance(feed, MlpShape)
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale, attention.soft_cap)
    return *heads, feed.size, feed.activation


def _decoder_spec(pair: Pair, context: ForwardContext) -> DecoderSpec:
    attention, feed = pair[0].products.shape, pair[1].products.shape
    assert isinstance(attention, AttentionShape) and isinstance(feed, MlpShape)
    return DecoderSpec(
        hidden_size=pair[0].products.first.num_inputs,
        ffn_size=feed.size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=context.rotary[0].shape[-1],
        is_gelu=pair[1].products.activation is gelu_tanh_and_mul,
        norm_eps=pair[0].norm.eps,
        scale=attention.scale,
        score_cap=attention.soft_cap,
    )


def _collect(pairs: Sequence[Pair], context: ForwardContext) -> list[LayerWeights]:
    """Empty if a weight has no form that the C code reads, or if ropes have several sizes."""
    if len({rows.shape[1:] for rows in context.rotary}) > 1:
        return []
    found = [_layer(pair, context.group_of_site[_site(pair)]) for pair in pairs]
    layers = [layer for layer in found if layer is not None]
    return layers if len(layers) == len(found) else []


def _layer(pair: Pair, group: int) -> LayerWeights | None:
    attention, feed = pair
    shape = attention.products.shape
    assert isinstance(shape, AttentionShape)
    qkv, output = _product(attention.products.first), _product(attention.products.last)
    gate_up, down = _product(feed.products.first), _product(feed.products.last)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    head_norm = attention.products.head_norm
    return LayerWeights(
        attention_norm=attention.norm.weight,
        attention_out_norm=None if attention.norm_after is None else attention.norm_after.weight,
        mlp_norm=feed.norm.weight,
        mlp_out_norm=None if feed.norm_after is None else feed.norm_after.weight,
        head_norm=None if head_norm is None else head_norm.weight,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        group=group,
        rope=shape.rope,
        window=shape.window,
    )


def _product(linear: Linear) -> ProductWeights | None:
    runs = native_rows(linear.weight.matrix)
    return None if runs is None else ProductWeights(runs, linear.num_outputs, linear.num_inputs, linear.bias)


# Which implementations of its blocks a decoder has on a device.


class Implementation(Protocol):
    """Another way to run all blocks of a decoder and its last norm. `tests/nn/test_contract.py` holds what each
    must do: write keys and values before any row reads them, rows in any order, with any number of threads."""

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        """Embedded tokens [T, hidden] to normed hidden states, as the blocks one by one give them; [B, hidden] if the
        context says `only_last`. x may be overwritten. None: not for this step, and x is unchanged."""


def choose_implementations(
    blocks: Sequence[DecoderBlock], norm: RMSNorm | ResidualLayerNorm, taps: Sequence[int] = ()
) -> tuple[Implementation, ...]:
    """The implementations that can run these blocks, by the parts that the blocks declare. The reference, which runs
    the blocks one by one, takes every step that no implementation takes. `taps`: blocks whose inputs are returned."""
    if not isinstance(norm, RMSNorm):
        return ()
    weight = norm.weight
    found: Implementation | None
    if weight.is_cuda:
        found = CudaChain.of(blocks, norm, taps) if weight.element_size() == 2 else None
    else:
        found = FusedCpu.of(blocks, norm) if weight.dtype is torch.float32 and not taps else None
    return () if found is None else (found,)
