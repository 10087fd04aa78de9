"""LoRA adapters of single tokens: adds B A x to the output of a product, with the A and B of each token's adapter."""

import torch

from slipstream.ops.gemm.lora import reference
from slipstream.ops.gemm.lora.reference import LoraTiles, LoraWeights
from slipstream.ops.platform.dispatch import by_device

shrink_lora = by_device(reference.shrink_lora, "slipstream.ops.gemm.lora.triton")
expand_lora = by_device(reference.expand_lora, "slipstream.ops.gemm.lora.triton")
lora_delta = by_device(reference.lora_delta, "slipstream.ops.gemm.lora.triton")
finish_lora = by_device(reference.finish_lora, "slipstream.ops.gemm.lora.after_gemm")
finish_lora_add = by_device(reference.finish_lora_add, "slipstream.ops.gemm.lora.after_gemm")
add_lora_embedding = by_device(reference.add_lora_embedding, "slipstream.ops.gemm.lora.triton")


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """out [T, outputs] += B A x of the adapter of each token, in place. x [T, inputs]. Returns `out`."""
    return expand_lora(out, shrink_lora(x, weights, tiles), weights, tiles)


__all__ = [
    "LoraTiles",
    "LoraWeights",
    "add_lora",
    "add_lora_embedding",
    "expand_lora",
    "finish_lora",
    "finish_lora_add",
    "lora_delta",
    "shrink_lora",
]
