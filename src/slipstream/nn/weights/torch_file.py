"""Weights of files that torch.save wrote, read without executing code in them.

Such a file is a zip with a pickle, which could call any function. Here the pickle is read as data (`pickle_data.py`):
it may name only what tensors consist of, and a tensor is read when it is needed. Files from before torch 1.6 are not
zips and are refused.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import BadCheckpoint
from slipstream.nn.weights.pickle_data import NotPlain, read_pickle, value_of
from slipstream.nn.weights.source import SourceTensor

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class TorchFileSource:
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __iter__(self) -> Iterator[SourceTensor]:
        for path in self.paths:
            for name, tensor in _open(path).items():
                kind = str(tensor.storage.dtype).removeprefix("torch.")
                yield SourceTensor(name, tensor.shape, kind, partial(_read, path, tensor))


@dataclass(frozen=True, slots=True)
class _Storage:
    entry: str  # name in the zip
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The location of a tensor in its storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _open(path: Path) -> dict[str, _Tensor]:
    """The tensors of a file by name, without reading them."""
    hint = "convert it to safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            load = partial(_storage, pickled.removesuffix("data.pkl"))
            found = read_pickle(archive.read(pickled), _NAMES, load)
    except zipfile.BadZipFile:
        raise BadCheckpoint(f"{path} is not a zip file: it is corrupt, or older than torch 1.6; {hint}") from None
    except NotPlain as error:
        raise BadCheckpoint(
            f"{path} contains {error}, not only tensors; Slipstream does not execute code of checkpoints; {hint}"
        ) from None
    except (OSError, StopIteration, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(tensor, _Tensor) for tensor in found.values()):
        raise BadCheckpoint(f"{path} is not a dictionary of tensors; {hint}")
    return {str(name): tensor for name, tensor in found.items()}


def _read(path: Path, tensor: _Tensor) -> torch.Tensor:
    try:
        with zipfile.ZipFile(path) as archive:
            values = torch.frombuffer(bytearray(archive.read(tensor.storage.entry)), dtype=tensor.storage.dtype)
    except (OSError, KeyError, ValueError, NotImplementedError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise BadCheckpoint(f"{path}: {tensor.storage.entry} cannot be read: {error}; download it again") from None
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if math.prod(tensor.shape) and last >= len(values):
        raise BadCheckpoint(f"{path} is truncated; download it again")
    return values.as_strided(tensor.shape, tensor.strides, tensor.offset)


def _storage(prefix: str, pid: Any) -> _Storage:
    """Resolves a persistent id of the pickle: an entry of the zip with values of one dtype."""
    kind, dtype, key, *_ = map(value_of, pid)
    if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
        raise NotPlain(f"a {kind if isinstance(kind, str) else type(kind).__name__} that is not a tensor storage")
    return _Storage(f"{prefix}data/{key}", dtype)


def _tensor(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *others: Any) -> _Tensor:
    sizes = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("offset, shape and strides of a tensor must be integers >= 0")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of {len(shape)} dimensions has {len(strides)} strides")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _parameter(tensor: _Tensor, *others: Any) -> _Tensor:
    if not isinstance(tensor, _Tensor):
        raise ValueError("a parameter is not a tensor")
    return tensor


def _ordered_dict() -> dict[str, Any]:
    """Empty; the pickle sets its items one by one, which are checked."""
    return {}


_NAMES: dict[str, Any] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
}
