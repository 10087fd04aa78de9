"""Reads pickled data without unpickling: no name in the pickle is imported and nothing in it is called.

A pickle is a program for a small stack machine. This machine executes the instructions that describe plain data since
protocol 2. The caller gives a value for each name that may occur; any other name raises NotPlain.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any


class NotPlain(Exception):
    """The pickle contains something other than plain data; the text names it."""


def read_pickle(data: bytes, names: Mapping[str, Any], load: Callable[[Any], Any]) -> Any:
    """The value that the pickle describes. Raises NotPlain, or ValueError if the pickle is invalid.

    `names`: the value or function of ours for each "module.name". `load`: resolves persistent ids.
    """
    machine = _Machine(names, load)
    try:
        for op, argument, _ in pickletools.genops(data):
            if op.name == "STOP":
                (value,) = machine.stack
                return value
            machine.run(op.name, argument)
    except (IndexError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"the pickle is invalid: {error}") from None
    raise ValueError("the pickle has no STOP instruction")


class _Name:
    """A name in a pickle, and its value here."""

    __slots__ = ("text", "value")

    def __init__(self, text: str, value: Any) -> None:
        self.text = text
        self.value = value


class _Machine:
    """The stack machine: a stack of values, and marks at which groups of values start."""

    def __init__(self, names: Mapping[str, Any], load: Callable[[Any], Any]) -> None:
        self.names = names
        self.load = load
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, op: str, argument: Any) -> None:
        if op in _PLAIN:
            self.stack.append(argument)
        elif op in _FIXED:
            self.stack.append(_FIXED[op]())
        elif op in _NOTHING:
            pass
        elif (step := getattr(self, f"_{op.lower()}", None)) is not None:
            step(argument)
        else:
            raise NotPlain(f"the instruction {op}")

    def _gather(self) -> list[Any]:
        """The values since the last mark."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _top(self, kind: type) -> Any:
        """The value on top of the stack, which must be of this kind."""
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"the pickle adds items to a {type(self.stack[-1]).__name__}, expected a {kind.__name__}")
        return self.stack[-1]

    # Containers

    def _mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._gather()

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._gather()))

    def _tuple1(self, _: Any) -> None:
        self.stack[-1:] = [(self.stack[-1],)]

    def _tuple2(self, _: Any) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _tuple3(self, _: Any) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def _list(self, _: Any) -> None:
        self.stack.append(self._gather())

    def _append(self, _: Any) -> None:
        value = self.stack.pop()
        self._top(list).append(value)

    def _appends(self, _: Any) -> None:
        values = self._gather()
        self._top(list).extend(values)

    def _dict(self, _: Any) -> None:
        values = self._gather()
        self.stack.append({})
        self._put(values)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def _setitems(self, _: Any) -> None:
        self._put(self._gather())

    def _put(self, values: list[Any]) -> None:
        found = self._top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int):  # hashing other keys may be very slow
                raise NotPlain(f"a dictionary with keys of type {type(key).__name__}")
            found[key] = value

    # Memo

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _binput(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _binget(self, index: int) -> None:
        self.stack.append(self.memo[index])

    _long_binput = _binput
    _long_binget = _binget

    # Names and calls

    def _global(self, text: str) -> None:
        self._name(text.replace(" ", ".", 1))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("the pickle has a name that is not a string")
        self._name(f"{module}.{name}")

    def _name(self, text: str) -> None:
        if text not in self.names:
            raise NotPlain(text)
        self.stack.append(_Name(text, self.names[text]))

    def _reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Name) or not callable(function.value) or not isinstance(arguments, tuple):
            raise NotPlain("a call of a value that is not a function")
        self.stack.append(function.value(*map(value_of, arguments)))

    def _build(self, _: Any) -> None:
        """Attributes of a value are ignored, such as the version metadata of a state dict."""
        self.stack.pop()
        self._top(dict)

    def _binpersid(self, _: Any) -> None:
        self.stack.append(self.load(self.stack.pop()))


def value_of(value: Any) -> Any:
    return value.value if isinstance(value, _Name) else value


_PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_FIXED: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_NOTHING = {"PROTO", "FRAME"}


# Tensors in files that torch.save wrote, located without torch and without executing code in them.
#
# Such a file is a zip with a pickle, which could call any function. Here the pickle is read as data (`read_pickle`):
# it may name only what dense tensors consist of. Files from before torch 1.6 are not zips.

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
