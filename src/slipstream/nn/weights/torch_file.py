"""Weights from files that torch.save wrote, without running what is in them.

Such a file is a zip with a pickle, which could name any function to be called. This reader lets it name what tensors
are made of and nothing else, and a tensor is read when it is needed. Files from before torch 1.6 are no zips and are
refused.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import BadCheckpoint
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
    entry: str  # of the zip
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor's numbers lie."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _open(path: Path) -> dict[str, _Tensor]:
    """The tensors of a file by name, none of them read."""
    way_out = "convert it to safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(pickled) as file:
                found = _Unpickler(file, pickled.removesuffix("data.pkl")).load()
    except zipfile.BadZipFile:
        raise BadCheckpoint(f"{path} is no zip file: it is broken, or older than torch 1.6; {way_out}") from None
    except _Forbidden as forbidden:
        raise BadCheckpoint(
            f"{path} holds {forbidden}, not only tensors; it is not run, as it could do anything; {way_out}"
        ) from None
    except (OSError, StopIteration, pickle.UnpicklingError, EOFError, TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(tensor, _Tensor) for tensor in found.values()):
        raise BadCheckpoint(f"{path} is not a list of named tensors; {way_out}")
    return {str(name): tensor for name, tensor in found.items()}


def _read(path: Path, tensor: _Tensor) -> torch.Tensor:
    with zipfile.ZipFile(path) as archive:
        numbers = torch.frombuffer(bytearray(archive.read(tensor.storage.entry)), dtype=tensor.storage.dtype)
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if math.prod(tensor.shape) and last >= len(numbers):
        raise BadCheckpoint(f"{path} is cut short; download it again")
    return numbers.as_strided(tensor.shape, tensor.strides, tensor.offset)


class _Forbidden(Exception):
    """The name of what a pickle wanted."""


class _Unpickler(pickle.Unpickler):
    """Knows the handful of names that a file of tensors needs."""

    def __init__(self, file: Any, prefix: str) -> None:
        super().__init__(file)
        self.prefix = prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise _Forbidden(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise _Forbidden(f"a {kind} of kind {dtype}")
        return _Storage(f"{self.prefix}data/{key}", dtype)


def _tensor(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *others: Any) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _parameter(tensor: _Tensor, *others: Any) -> _Tensor:
    return tensor


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
