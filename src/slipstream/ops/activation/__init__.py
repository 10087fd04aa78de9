"""Activations of gated feed-forwards, on a gate and an up projection made by one product."""

from slipstream.ops.activation.reference import gelu_tanh_and_mul, silu_and_mul

__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]
