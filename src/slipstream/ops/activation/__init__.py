"""Activations with kernels: gated ones, activation(gate) * up, of a merged gate and up projection, relu2, and gates."""

from slipstream.ops.activation import native, reference
from slipstream.ops.dispatch import by_device

silu_and_mul = by_device(native.silu_and_mul, "slipstream.ops.activation.triton")
gelu_tanh_and_mul = by_device(native.gelu_tanh_and_mul, "slipstream.ops.activation.triton")
gelu_and_mul = by_device(reference.gelu_and_mul, "slipstream.ops.activation.triton")
quick_gelu_and_mul = by_device(reference.quick_gelu_and_mul, "slipstream.ops.activation.triton")
relu_and_mul = by_device(reference.relu_and_mul, "slipstream.ops.activation.triton")
sparse_gelu_tanh_and_mul = by_device(reference.sparse_gelu_tanh_and_mul, "slipstream.ops.activation.triton")
relu2 = by_device(reference.relu2, "slipstream.ops.activation.triton")
sigmoid_gate_ = by_device(reference.sigmoid_gate_, "slipstream.ops.activation.triton")

__all__ = [
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "quick_gelu_and_mul",
    "relu2",
    "relu_and_mul",
    "sigmoid_gate_",
    "silu_and_mul",
    "sparse_gelu_tanh_and_mul",
]
