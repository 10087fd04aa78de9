"""Tensors in files that torch.save wrote, located without torch and without executing code in them.

Such a file is a zip with a pickle, which could call any function. Here the pickle is read as data (`pickle_data.py`):
it may name only what dense tensors consist of. Files from before torch 1.6 are not zips.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.config.pickle_data import NotPlain, read_pickle, value_of

_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}

_MAX_PICKLE = 2**24  # bytes; a tensor takes about 150, and reading takes some 20 times as much memory


@dataclass(frozen=True, slots=True)
class _Dtype:
    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    entry: str  # name in the zip
    dtype: str  # torch's name


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor in its storage; offset and strides in values."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_needed(self) -> int:
        """Values that the storage has at least."""
        if not math.prod(self.shape):
            return 0
        return self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)) + 1


def read_torch_zip(archive: zipfile.ZipFile) -> Any:
    """The saved value, with a `StoredTensor` for each tensor. Raises NotPlain if it is something other than tensors,
    lists and dictionaries, ValueError if the pickle is invalid, and what zipfile raises."""
    pickled = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
    if pickled is None:
        raise ValueError("there is no data.pkl")
    if (size := archive.getinfo(pickled).file_size) > _MAX_PICKLE:
        raise NotPlain(f"a pickle of {size} bytes (at most {_MAX_PICKLE} are read)")
    return read_pickle(read_entry(archive, pickled), _NAMES, partial(_storage, pickled.removesuffix("data.pkl")))


def read_entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """An entry as torch.save writes it: as it is, so that it is no larger than the file. Raises NotPlain if it is
    compressed, KeyError if there is none."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise NotPlain("compressed data")
    return archive.read(name)


def _storage(prefix: str, pid: Any) -> Storage:
    """Resolves a persistent id of the pickle: an entry of the zip with values of one dtype."""
    kind, dtype, key, *_ = map(value_of, pid)
    if kind != "storage" or not isinstance(dtype, _Dtype) or not isinstance(key, str):
        raise NotPlain(f"a {kind if isinstance(kind, str) else type(kind).__name__} that is not a tensor storage")
    return Storage(f"{prefix}data/{key}", dtype.name)


def _tensor(storage: Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *others: Any) -> StoredTensor:
    sizes = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("offset, shape and strides of a tensor must be integers >= 0")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of {len(shape)} dimensions has {len(strides)} strides")
    return StoredTensor(storage, offset, tuple(shape), tuple(strides))


def _parameter(tensor: StoredTensor, *others: Any) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise ValueError("a parameter is not a tensor")
    return tensor


def _ordered_dict() -> dict[str, Any]:
    """Empty; the pickle sets its items one by one, which are checked."""
    return {}


_NAMES: dict[str, Any] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    **{f"torch.{name}": _Dtype(dtype) for name, dtype in _DTYPES.items()},
}
