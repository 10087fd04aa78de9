"""Plans, and other values with arrays, as msgpack, for other processes and for files. Decoding gives values of known
types and runs no code."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

_USUAL = np.dtype("<i4")  # of nearly all arrays of a plan


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        data = value.tobytes()
        return data if value.ndim == 1 and value.dtype == _USUAL else (value.dtype.str, value.shape, data)
    if isinstance(value, np.generic):
        item: object = value.item()
        return item
    raise TypeError(f"{type(value).__name__} is no part of a plan")


def _decode_array(kind: type, value: object) -> object:
    if value is None:  # for code, which is not sent
        return _not_here
    if isinstance(value, bytes):
        return np.frombuffer(value, _USUAL)
    dtype, shape, data = msgspec.convert(value, tuple[str, list[int], bytes])
    real = np.dtype(dtype)
    if real.kind not in "iufb":
        raise ValueError(f"{dtype} is not a type of numbers")
    return np.frombuffer(data, real).reshape(shape)


def _not_here(value: object) -> object:
    raise AssertionError("code that edits logits runs on rank 0 only")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode


@functools.cache
def decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    """Raises MsgspecError for other bytes. It takes milliseconds to make; arrays are views of what it decodes."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
