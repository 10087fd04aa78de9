"""The matrices of quantised experts: one `Weight` whose rows are those of all experts, one below the other."""

from __future__ import annotations

from slipstream.nn.quantized.weight import Quantized, QuantizedWeight
from slipstream.nn.weight_format import UnquantizedWeight, Weight
from slipstream.ops.moe import ExpertMatrices
from slipstream.ops.quantized import QuantizedExperts


def new_expert_weight(format: Quantized, num_experts: int, num_rows: int, num_columns: int) -> Weight:
    """`num_rows`: of one expert."""
    weight = format.new_weight(num_experts * num_rows, num_columns)
    if isinstance(weight, QuantizedWeight):
        weight.words = None  # kernels of experts read scales by rows
        weight.allows_order = False  # each expert would need inputs in an order of its own
    return weight


def expert_matrices(weight: Weight, num_experts: int) -> ExpertMatrices:
    """The form that `expert_mlp` reads."""
    if isinstance(weight, QuantizedWeight):
        quantizes = weight.format.quantization.quantizes_inputs
        return QuantizedExperts(weight.matrix, num_experts, quantizes, weight.input_scale)
    assert isinstance(weight, UnquantizedWeight), "dequantised at load"
    return weight.data.unflatten(0, (num_experts, -1))
