"""GgufFile: the fields and tensors of a .gguf file, read from a memory map. No torch, no dequantisation.

Every number in the file is checked against the bytes that exist: a broken file raises BadCheckpoint, and never causes a
long loop or a large allocation.
"""

from __future__ import annotations

import math
import mmap
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.base.files import open_regular
from slipstream.checkpoint.locate import part_paths


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # outermost first, as in numpy and torch; the file has the reverse order
    kind: str  # F32, Q4_1 ...
    raw: NDArray[np.uint8]  # [bytes], a view of the file; a write changes this process's private copy only


class GgufFile:
    """An open model: one file, or the first of several, with the tensors of all. The views in `tensors` keep the memory
    maps alive, so there is nothing to close."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.fields: Mapping[str, Any]
        self.tensors: dict[str, GgufTensor]
        self.version, self.fields, self.tensors = _read_file(self.path)
        if (count := _number(self.fields, "split.count")) > 1:
            self._add_parts(count)

    def _add_parts(self, count: int) -> None:
        """Add the tensors of the other files. The first file has all fields except the part numbers."""
        paths = part_paths(self.path)
        if len(paths) != count or self.path != paths[0] or _number(self.fields, "split.no"):
            raise BadCheckpoint(
                f"{self.path.name} is part {_number(self.fields, 'split.no') + 1} of {count}; give the first, with the "
                f"others beside it, named ...-00001-of-{count:05}.gguf and so on"
            )
        if missing := [path.name for path in paths if not path.is_file()]:
            raise BadCheckpoint(
                f"{self.path.name} lacks {len(missing)} of its {count} parts, {missing[0]} first; download them again"
            )
        for number, path in enumerate(paths[1:], 1):
            _, fields, tensors = _read_file(path)
            found = _number(fields, "split.no"), _number(fields, "split.count")
            if found != (number, count):
                raise BadCheckpoint(f"{path.name} says that it is part {found[0] + 1} of {found[1]}; download it again")
            if twice := self.tensors.keys() & tensors.keys():
                raise BadCheckpoint(f"{path.name} has {min(twice)}, which another part has too; download it again")
            self.tensors |= tensors
        total = _number(self.fields, "split.tensors.count")
        if total and total != len(self.tensors):
            raise BadCheckpoint(
                f"{self.path.name} and its parts have {len(self.tensors)} tensors, there should be {total}; "
                "download them again"
            )

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """The file, from a cache of open files unless it has changed: its header takes time to read."""
        try:
            status = Path(path).stat()
        except OSError:
            return cls(path)  # raises the right error
        key = (str(path), status.st_mtime_ns, status.st_size)
        file = _open_files.get(key)
        if file is None:
            file = _open_files[key] = cls(path)
        return file


_open_files: weakref.WeakValueDictionary[tuple[str, int, int], GgufFile] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _Kind:
    """Packing of a tensor type: `num_bytes` hold `block` weights."""

    name: str
    block: int
    num_bytes: int


_KINDS = {
    number: _Kind(name, block, num_bytes)
    for number, name, block, num_bytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip

_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8", 6: "<f4", 12: "<f8", 7: "?",
}  # fmt: skip
_DTYPES: dict[int, np.dtype[Any]] = {kind: np.dtype(code) for kind, code in _NUMBERS.items()}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4  # arrays inside arrays
_MAX_NAME = 65_535  # bytes; the format's own limit for keys
_MIN_FIELD = 13  # bytes of the smallest field: an empty key, a type, one byte
_MIN_TENSOR = 24  # bytes of the smallest tensor entry: an empty name, no dims, a type, an offset


class _Reader:
    """A position in the memory map that only moves forward and never past the end."""

    def __init__(self, name: str, data: mmap.mmap) -> None:
        self.name = name
        self.data = data
        self.size = len(data)
        self.offset = 0

    def broken(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.name} is not a sound GGUF file: {what}; download it again")

    def skip(self, num_bytes: int, what: str) -> int:
        """The position before the skipped bytes."""
        start = self.offset
        if num_bytes > self.size - start:
            raise self.broken(f"it ends at byte {self.size:,}, within {what}, which needs {num_bytes:,} bytes more")
        self.offset = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.skip(8, what))[0])

    def text(self, what: str, limit: int | None = None) -> str:
        num_bytes = self.u64(what)
        if limit is not None and num_bytes > limit:
            raise self.broken(f"{what} claims {num_bytes:,} bytes, at most {limit:,} are allowed")
        start = self.skip(num_bytes, what)
        return self.decode(start, self.offset, what)

    def decode(self, start: int, end: int, what: str) -> str:
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError:
            raise self.broken(f"{what} is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that was skipped and is not decoded yet."""

    kind: int
    count: int
    start: int
    offsets: StringOffsets | None = None  # of strings


class _Fields(Mapping[str, Any]):
    """The file's metadata. Numbers and strings are decoded; an array is decoded at its first use."""

    def __init__(self, reader: _Reader, num_fields: int) -> None:
        self._reader = reader
        self._values: dict[str, Any] = {}
        for index in range(num_fields):
            key = reader.text(f"the name of field {index}", _MAX_NAME)
            if key in self._values:
                raise reader.broken(f"field {key} is there twice")
            self._values[key] = _read_value(reader, reader.u32(f"field {key}"), f"field {key}")

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = _decode_array(self._reader, value, f"field {key}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _read_file(path: Path) -> tuple[int, Mapping[str, Any], dict[str, GgufTensor]]:
    """Version, fields and tensors of one file."""
    reader = _Reader(path.name, _map(path))
    version, num_tensors, num_fields = _read_header(reader)
    fields = _Fields(reader, num_fields)
    return version, fields, _read_tensors(reader, num_tensors, fields)


def _number(fields: Mapping[str, Any], key: str) -> int:
    """0 if the file has no such field."""
    value = fields.get(key, 0)
    return value if isinstance(value, int) else 0


def _map(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            # a private map: tensors made of it are writable without a warning, and the file does not change
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise BadCheckpoint(f"{path.name} is empty; download it again") from None
    except OSError as error:
        reason = error.strerror or error
        raise BadCheckpoint(f"{path} cannot be read: {reason}; check the path and its rights") from None


def _read_header(reader: _Reader) -> tuple[int, int, int]:
    if reader.data[:4] != b"GGUF":
        raise reader.broken(f"it begins with {reader.data[:4]!r}, not with b'GGUF'")
    reader.skip(4, "the header")
    version = reader.u32("the header")
    if version not in (2, 3):
        kind = "a big-endian one" if version & 0xFFFF == 0 else f"version {version}"
        raise BadCheckpoint(f"{reader.name} is a GGUF file, but {kind}; convert it to little-endian version 3")
    num_tensors = reader.u64("the header")
    num_fields = reader.u64("the header")
    left = reader.size - reader.offset
    if num_fields * _MIN_FIELD + num_tensors * _MIN_TENSOR > left:
        raise reader.broken(f"it claims {num_fields:,} fields and {num_tensors:,} tensors in {left:,} bytes")
    return version, num_tensors, num_fields


def _read_value(reader: _Reader, kind: int, what: str) -> Any:
    if kind in _DTYPES:
        dtype = _DTYPES[kind]
        return np.frombuffer(reader.data, dtype, 1, reader.skip(dtype.itemsize, what)).item()
    if kind == _STRING:
        return reader.text(what)
    if kind == _ARRAY:
        return _walk_array(reader, what, depth=1)
    raise reader.broken(f"{what} has the unknown type {kind}")


def _walk_array(reader: _Reader, what: str, depth: int) -> _Array:
    """Skip an array without decoding it. Afterwards it is known to lie inside the file."""
    if depth > _MAX_NESTING:
        raise reader.broken(f"{what} nests arrays more than {_MAX_NESTING} deep")
    kind = reader.u32(what)
    count = reader.u64(what)
    start, offsets = reader.offset, None
    if kind in _DTYPES:
        reader.skip(count * _DTYPES[kind].itemsize, what)
    elif kind in (_STRING, _ARRAY):
        least = 8 if kind == _STRING else 12
        if count * least > reader.size - reader.offset:
            raise reader.broken(f"{what} claims {count:,} values in {reader.size - reader.offset:,} bytes")
        if kind == _STRING:
            offsets = _walk_strings(reader, count, what)
        else:
            for _ in range(count):
                _walk_array(reader, what, depth + 1)
    else:
        raise reader.broken(f"{what} is an array of the unknown type {kind}")
    return _Array(kind, count, start, offsets)


def _walk_strings(reader: _Reader, count: int, what: str) -> StringOffsets:
    offsets = find_strings(reader.data, reader.offset, count)
    if offsets is None:
        raise reader.broken(f"it ends at byte {reader.size:,}, within the {count:,} strings of {what}")
    if count:
        reader.offset = int(offsets.ends[-1])
    return offsets


def _decode_array(reader: _Reader, array: _Array, what: str) -> list[Any]:
    if array.count == 0:
        return []
    if array.kind in _DTYPES:
        values: list[Any] = np.frombuffer(reader.data, _DTYPES[array.kind], array.count, array.start).tolist()
        return values
    if array.offsets is not None:
        return _decode_strings(reader, array.offsets, what)
    nested = _Reader(reader.name, reader.data)  # the outer reader keeps its position
    nested.offset = array.start
    return [_decode_array(nested, _walk_array(nested, what, depth=1), what) for _ in range(array.count)]


def _decode_strings(reader: _Reader, offsets: StringOffsets, what: str) -> list[str]:
    try:
        return decode_strings(reader.data, offsets)
    except UnicodeDecodeError:
        index = first_bad_string(reader.data, offsets)
        raise reader.broken(f"string {index} of {what} is not UTF-8") from None


def _read_tensors(reader: _Reader, num_tensors: int, fields: Mapping[str, Any]) -> dict[str, GgufTensor]:
    entries = [_read_entry(reader, index) for index in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.broken(f"general.alignment is {alignment}, not a power of two")
    base = -(-reader.offset // alignment) * alignment
    data = np.frombuffer(reader.data, np.uint8)
    tensors: dict[str, GgufTensor] = {}
    for name, dims, kind, offset in entries:
        if name in tensors:
            raise reader.broken(f"tensor {name} is there twice")
        if dims and dims[0] % kind.block:
            raise reader.broken(f"tensor {name} has rows of {dims[0]} values, {kind.name} packs them by {kind.block}")
        num_bytes = math.prod(dims) // kind.block * kind.num_bytes
        start = base + offset
        if start + num_bytes > reader.size:
            raise reader.broken(
                f"tensor {name} ends at byte {start + num_bytes:,}, the file at {reader.size:,}, so it was cut short"
            )
        tensors[name] = GgufTensor(name, tuple(reversed(dims)), kind.name, data[start : start + num_bytes])
    return tensors


def _read_entry(reader: _Reader, index: int) -> tuple[str, tuple[int, ...], _Kind, int]:
    name = reader.text(f"the name of tensor {index}", _MAX_NAME)
    what = f"the entry of tensor {name}"
    num_dims = reader.u32(what)
    if num_dims > _MAX_DIMS:
        raise reader.broken(f"tensor {name} has {num_dims} dimensions, at most {_MAX_DIMS} are allowed")
    dims = tuple(reader.u64(what) for _ in range(num_dims))
    number = reader.u32(what)
    offset = reader.u64(what)
    kind = _KINDS.get(number)
    if kind is None:
        raise UnsupportedModel(
            f"{reader.name}: tensor {name} has the type number {number}, which we do not know; "
            "use a file quantised as Q4_0, Q4_1, Q8_0, a K-quant, F16 or F32"
        )
    return name, dims, kind, offset


# Arrays of strings in a GGUF file. A string is its length, 8 bytes, and then its text in UTF-8.
#
# A vocabulary has hundreds of thousands of strings, so numpy finds and decodes them together. A length from 1 to 255 is
# a byte and seven zeros, and a text rarely has zeros: the zeros in a part of the file give the offsets of all its
# strings. Each offset is checked against the end of the string before it. Where that fails, strings are read one by
# one.

_WINDOW = 1 << 18  # bytes in which zeros are searched at a time
_PREFIX = 8  # bytes of a length
_length_at = struct.Struct("<Q").unpack_from


class StringOffsets(NamedTuple):
    """Start and end of each text of an array, in bytes from the start of the file."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def find_strings(data: mmap.mmap, offset: int, count: int) -> StringOffsets | None:
    """The offsets of `count` strings, the first of which begins at `offset`; None if the file ends before the last."""
    view = np.frombuffer(data, np.uint8)
    offsets = StringOffsets(np.empty(count, np.int64), np.empty(count, np.int64))
    num_found, num_single = 0, 1
    while num_found < count:
        starts, ends = _find_short(view, offset)
        num = min(len(starts), count - num_found)
        if num:
            offsets.starts[num_found : num_found + num] = starts[:num]
            offsets.ends[num_found : num_found + num] = ends[:num]
            num_found, offset = num_found + num, int(ends[num - 1])
            continue
        for index in range(num_found, min(num_found + num_single, count)):
            start = offset + _PREFIX
            if start > len(data) or (offset := start + _length_at(data, offset)[0]) > len(data):
                return None
            offsets.starts[index], offsets.ends[index] = start, offset
        num_found = min(num_found + num_single, count)
        num_single *= 2  # so that a file of empty or long strings is not searched again for each of them
    return offsets


def decode_strings(data: mmap.mmap, offsets: StringOffsets) -> list[str]:
    """Raises UnicodeDecodeError if a text is not UTF-8; `first_bad_string` finds it."""
    if not len(offsets.starts):
        return []
    first = int(offsets.starts[0]) - _PREFIX
    # a copy with one zero before each text instead of its length
    joined = np.frombuffer(data, np.uint8)[first : int(offsets.ends[-1])].copy()
    prefixes = offsets.starts - (first + _PREFIX)
    joined[prefixes + (_PREFIX - 1)] = 0
    kept = np.ones(len(joined), np.bool_)
    for byte in range(_PREFIX - 1):
        kept[prefixes + byte] = False
    strings = joined[kept].tobytes().decode().split("\0")
    if len(strings) == len(offsets.starts) + 1:
        return strings[1:]
    return [data[start:end].decode() for start, end in zip(*offsets, strict=True)]  # a text contains a zero


def first_bad_string(data: mmap.mmap, offsets: StringOffsets) -> int:
    """The first string that is not UTF-8."""
    for index, (start, end) in enumerate(zip(*offsets, strict=True)):
        try:
            data[start:end].decode()
        except UnicodeDecodeError:
            return index
    raise AssertionError("all strings are UTF-8")


def _find_short(view: NDArray[np.uint8], offset: int) -> StringOffsets:
    """The offsets of the strings of 1 to 255 bytes at `offset`, up to the first other one or to the window's end."""
    window = view[offset : offset + _WINDOW]
    zeros = np.flatnonzero(window == 0)
    zeros = zeros[: len(zeros) // 7 * 7].reshape(-1, 7)
    lengths_at, starts = zeros[:, 0] - 1, zeros[:, 6] + 1
    ends = starts + window[lengths_at]  # the first may be -1: it is refused below
    begins = np.concatenate(([0], ends[:-1]))  # of each string, if the one before it is right
    right = (lengths_at == begins[: len(starts)]) & (starts - lengths_at == _PREFIX) & (ends <= len(view) - offset)
    num = len(right) if right.all() else int(right.argmin())
    return StringOffsets(starts[:num] + offset, ends[:num] + offset)
