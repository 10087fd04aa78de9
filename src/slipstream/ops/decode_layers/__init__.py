"""All layers of a decoder in one C call, for steps with one token per row. The reference is the layers themselves."""

from slipstream.ops.decode_layers.native import (
    DecoderSpec,
    LayerWeights,
    ProductWeights,
    build_layers,
    decode_layers,
    max_rows,
)

__all__ = ["LayerWeights", "DecoderSpec", "ProductWeights", "build_layers", "decode_layers", "max_rows"]
