"""RMS norm, optionally fused with the residual add before it."""

from slipstream.ops.elementwise import native, reference
from slipstream.ops.elementwise.reference import MAX_ADVANCED_DRAFTS, KeptTokens, StepInputs, StepRows
from slipstream.ops.platform.dispatch import by_device

rms_norm = by_device(native.rms_norm, "slipstream.ops.elementwise.norm_triton")
add_rms_norm = by_device(native.add_rms_norm, "slipstream.ops.elementwise.norm_triton")
sum_rms_norm = by_device(reference.sum_rms_norm, "slipstream.ops.elementwise.norm_triton")


# Layer norm, optionally fused with the residual add before it.

layer_norm = by_device(reference.layer_norm, "slipstream.ops.elementwise.norm_triton")
layer_norm_of_sum = by_device(reference.layer_norm_of_sum, "slipstream.ops.elementwise.norm_triton")
add_layer_norm = by_device(reference.add_layer_norm, "slipstream.ops.elementwise.norm_triton")


# RMS norm of a mixer's output together with its gate: in groups (Mamba-2), or of each head (gated delta rule).

_KERNELS = "slipstream.ops.elementwise.norm_triton"
gated_group_norm = by_device(reference.gated_group_norm, _KERNELS)
gated_rms_norm = by_device(reference.gated_rms_norm, _KERNELS)


# Activations with kernels: gated ones, activation(gate) * up, of a merged gate and up projection, relu2, and gates.

silu_and_mul = by_device(native.silu_and_mul, "slipstream.ops.elementwise.triton")
gelu_tanh_and_mul = by_device(native.gelu_tanh_and_mul, "slipstream.ops.elementwise.triton")
gelu_and_mul = by_device(reference.gelu_and_mul, "slipstream.ops.elementwise.triton")
quick_gelu_and_mul = by_device(reference.quick_gelu_and_mul, "slipstream.ops.elementwise.triton")
relu_and_mul = by_device(reference.relu_and_mul, "slipstream.ops.elementwise.triton")
sparse_gelu_tanh_and_mul = by_device(reference.sparse_gelu_tanh_and_mul, "slipstream.ops.elementwise.triton")
relu2 = by_device(reference.relu2, "slipstream.ops.elementwise.triton")
sigmoid_gate_ = by_device(reference.sigmoid_gate_, "slipstream.ops.elementwise.triton")


# Builds the inputs of a step from row tables: token ids, positions, lengths, cache slots and page tables.

gather_inputs = by_device(native.gather_inputs, "slipstream.ops.elementwise.step_inputs_triton")


# Embedding lookup of token ids, and RoPE table lookup of their positions.

lookup_embedding_and_rope = by_device(reference.lookup_embedding_and_rope, "slipstream.ops.elementwise.triton")


# Maximum or sum of each column over the tokens of each row, in place: a step's tokens may come in several parts.

segment_add_into = by_device(reference.segment_add_into, "slipstream.ops.elementwise.triton")
segment_max_into = by_device(reference.segment_max_into, "slipstream.ops.elementwise.triton")


# Sum of each row's tokens in float32, for mean pooling. The order of a sum does not depend on the batch.

segment_sum = by_device(reference.segment_sum, "slipstream.ops.elementwise.triton")


__all__ = [
    "KeptTokens",
    "MAX_ADVANCED_DRAFTS",
    "StepInputs",
    "StepRows",
    "add_layer_norm",
    "add_rms_norm",
    "gated_group_norm",
    "gated_rms_norm",
    "gather_inputs",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layer_norm",
    "layer_norm_of_sum",
    "lookup_embedding_and_rope",
    "quick_gelu_and_mul",
    "relu2",
    "relu_and_mul",
    "rms_norm",
    "segment_add_into",
    "segment_max_into",
    "segment_sum",
    "sigmoid_gate_",
    "silu_and_mul",
    "sparse_gelu_tanh_and_mul",
    "sum_rms_norm",
]
