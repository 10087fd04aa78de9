"""LoRA adapters of single tokens: adds B A x to the output of a product, with the A and B of each token's adapter."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.lora import reference
from slipstream.ops.lora.reference import LoraTiles, LoraWeights

add_lora = by_device(reference.add_lora, "slipstream.ops.lora.triton")
add_lora_embedding = by_device(reference.add_lora_embedding, "slipstream.ops.lora.triton")

__all__ = ["LoraTiles", "LoraWeights", "add_lora", "add_lora_embedding"]
