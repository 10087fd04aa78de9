"""Dequantization of GGUF blocks: 32 weights of a row share a scale and, in some kinds, a minimum."""

from slipstream.ops.dequant.k_quants import K_KINDS, SUPERBLOCK, KBlocks, split_k
from slipstream.ops.dequant.reference import BLOCK, BLOCK_KINDS, KINDS, Blocks, dequantize, split

__all__ = [
    "BLOCK",
    "BLOCK_KINDS",
    "KINDS",
    "K_KINDS",
    "SUPERBLOCK",
    "Blocks",
    "KBlocks",
    "dequantize",
    "split",
    "split_k",
]
