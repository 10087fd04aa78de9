"""GEMM with quantised weights: x [rows, in] times the transpose of a `QuantizedMatrix` [out, in].

`dispatch.py` lists the kernels.
"""

from slipstream.ops.gemm.quantized.dispatch import supports_kernels
from slipstream.ops.gemm.quantized.matrix import (
    MAX_FP8,
    QuantizedExperts,
    QuantizedMatrix,
    dequantize,
    half_of,
    pack_4_bit,
    unpack_4_bit,
    words_of,
)

__all__ = [
    "MAX_FP8",
    "QuantizedExperts",
    "QuantizedMatrix",
    "dequantize",
    "half_of",
    "pack_4_bit",
    "supports_kernels",
    "unpack_4_bit",
    "words_of",
]
