"""ChainedLayers: the layers of a decoder as a chain of products, each adding the residual itself, on CUDA.

In steps of few tokens on Hopper norms have no kernel of their own either: see `ops/linear/unnormalized.py`. Other steps
and models run layer by layer, which is also the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import RMSNorm
from slipstream.nn.weight_format import UnquantizedWeight
from slipstream.ops.linear import Activation, add_product, choose_chain, normed_product
from slipstream.ops.linear.unnormalized import Chain, Unnormalized

if TYPE_CHECKING:
    from slipstream.nn.models.decoder import Decoder


class ChainedLayers:
    def __init__(self) -> None:
        self._asked: Any = None  # of which layers,
        self._is_able = False  # and the answer

    def run(
        self, decoder: Decoder, x: torch.Tensor, rotary: torch.Tensor, local: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor | None:
        """x [T, hidden], which is used up, to what the last norm gives; or None where this does not serve."""
        blocks: list[Any] = list(decoder.layers)
        if self._asked is not decoder.layers:
            self._asked, self._is_able = decoder.layers, all(_is_plain(block) for block in blocks)
        chain = choose_chain(x, [product.weight.data for product in _products(blocks[0])]) if self._is_able else ""
        if not chain:
            return None
        last = None
        qkv, total = blocks[0].attention_norm.then(blocks[0].attention.qkv, x, None)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if following is None and context.only_last and chain == "library":  # which takes any number of rows
                last = context.last_tokens()
            mixed = block.attention.mix(qkv, local if block.window else rotary, context, last=last)
            if last is not None:
                total = last.of(total)
            sums = _add(chain, block.attention.output, mixed, total, block.mlp_norm)
            hidden = _multiply(block.mlp.gate_up, sums, block.mlp.activation)
            if following is None:
                break
            sums = _add(chain, block.mlp.down, hidden, sums.total, following.attention_norm)
            qkv, total = _multiply(following.attention.qkv, sums), sums.total
        out: torch.Tensor = decoder.norm(block.mlp.down(hidden), sums.total)[0]
        return out.index_select(0, context.last_places()) if context.only_last and last is None else out


def _add(chain: Chain, product: Linear, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Unnormalized:
    weight: Any = product.weight
    return add_product(chain, x, weight.data, residual, norm.weight, norm.eps)


def _multiply(product: Linear, x: Unnormalized, activation: Activation | None = None) -> torch.Tensor:
    weight: Any = product.weight
    return normed_product(x, weight.data, product.bias, activation)


def _is_plain(block: Any) -> bool:
    """Norms before and none after, weights that are numbers, and no bias where a residual is added."""
    if block.attention_out_norm is not None or block.mlp_out_norm is not None:
        return False
    if type(block.attention_norm) is not RMSNorm or type(block.mlp_norm) is not RMSNorm:
        return False
    if block.attention.output.bias is not None or block.mlp.down.bias is not None:
        return False
    return all(type(product.weight) is UnquantizedWeight for product in _products(block))


def _products(block: Any) -> tuple[Linear, ...]:
    return block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down
