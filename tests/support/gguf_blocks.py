"""GGUF blocks of any kind from float32 weights, by the gguf library. It only reads K-quants, so a simple quantiser here
writes them."""

from __future__ import annotations

import gguf
import numpy as np

K_KINDS = ("Q4_K", "Q5_K", "Q6_K")


def quantize(weights: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """[rows, columns] to [rows, bytes per row] uint8. K-quants: columns are a multiple of 256."""
    if kind.name not in K_KINDS:
        return gguf.quants.quantize(weights, kind)
    blocks = weights.astype(np.float32).reshape(len(weights), -1, 256)
    return (_q6(blocks) if kind.name == "Q6_K" else _q45(blocks, kind.name == "Q5_K")).reshape(len(weights), -1)


def _q45(superblocks: np.ndarray, has_high_bit: bool) -> np.ndarray:
    blocks = superblocks.reshape(*superblocks.shape[:2], 8, 32)
    largest_q = 31 if has_high_bit else 15
    low = np.minimum(blocks.min(-1), 0)
    d, scale = _in_steps((blocks.max(-1) - low) / largest_q, 63)
    dmin, minimum = _in_steps(-low, 63)
    step, shift = d.astype(np.float32) * scale, dmin.astype(np.float32) * minimum
    q = np.clip(np.rint((blocks + shift[..., None]) / np.maximum(step, 1e-30)[..., None]), 0, largest_q).astype(
        np.uint8
    )
    # 6 bits each: blocks 0 to 3 in one byte, the others in a half byte and two top bits
    scale, minimum = scale.astype(np.uint8), minimum.astype(np.uint8)
    packed = np.concatenate(
        (
            scale[..., :4] | scale[..., 4:] >> 4 << 6,
            minimum[..., :4] | minimum[..., 4:] >> 4 << 6,
            scale[..., 4:] & 15 | (minimum[..., 4:] & 15) << 4,
        ),
        -1,
    )
    halves = q & 15
    parts = [_bytes(d), _bytes(dmin), packed]
    if has_high_bit:
        parts.append(np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=-2))
    parts.append((halves[..., 0::2, :] | halves[..., 1::2, :] << 4).reshape(*q.shape[:2], 128))
    return np.concatenate(parts, -1)


def _q6(superblocks: np.ndarray) -> np.ndarray:
    blocks = superblocks.reshape(*superblocks.shape[:2], 16, 16)
    d, scale = _in_steps(np.abs(blocks).max(-1) / 31, 127)
    scale[..., 1::2] *= -1  # the sign of a scale matters
    step = d.astype(np.float32) * scale
    step[step == 0] = 1
    q = np.clip(np.rint(blocks / step[..., None]) + 32, 0, 63).astype(np.uint8)
    halves = q.reshape(
        *q.shape[:2], 2, 2, 64
    )  # of 128 weights: the first 64 in low half bytes, the others in high ones
    low = halves[..., 0, :] & 15 | (halves[..., 1, :] & 15) << 4
    quarters = q.reshape(*q.shape[:2], 2, 4, 32) >> 4
    high = np.bitwise_or.reduce(quarters << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=-2)
    flat = [part.reshape(*q.shape[:2], -1) for part in (low, high)]
    return np.concatenate((*flat, scale.astype(np.int8).view(np.uint8), _bytes(d)), -1)


def _in_steps(values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """A float16 step per superblock and a whole number of steps per value."""
    step = (values.max(-1, keepdims=True) / most).astype(np.float16)
    safe = np.maximum(step.astype(np.float32), 1e-30)
    return step, np.clip(np.rint(values / safe), 0, most)


def _bytes(halves: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(halves).view(np.uint8)
