"""Checks of single values of SamplingParams and PoolingParams. An error names the parameter and what it takes."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.base.errors import InvalidParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_COUNT = 2**31 - 1  # of tokens
MAX_BIAS = 100.0
MAX_DEPTH = 100  # objects and arrays inside one another, in what a client sends
MAX_HOLDERS = 100_000  # objects and arrays in a body: each takes a microsecond or two in the event loop
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # 1 and -1
_OTHERS = bytes(set(range(256)) - set(b'[{]}"'))
_HOLDERS = (dict, list, tuple, Mapping)
_PLAIN = {str, int, float, bool, type(None)}
_STRING = re.compile(rb'"[^"]*"')


class CheckedNames(msgspec.StructMeta):
    """Metaclass that reports an unknown parameter by name, with the nearest known one."""

    def __call__(cls, *values: Any, **given: Any) -> Any:
        check_names(cls, given)
        return super().__call__(
            *map(plain_value, values), **{name: plain_value(value) for name, value in given.items()}
        )


def check_names(params: Any, given: Iterable[str]) -> None:
    known = params.__struct_fields__
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "there are " + ", ".join(known)
            raise InvalidParams(f"{params.__name__} has no {name}; {hint}")


def plain_value(value: Any) -> Any:
    """Numbers and arrays of numpy as those of Python, which can be sent to a core. Does not import numpy."""
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def check_real(
    name: str, value: object, low: float | None, high: float | None, *, open_low: bool = False, of: str = ""
) -> None:
    """Checks that the value is a finite number in a range. `of`: which value of a parameter, for the message."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParams(f"{name}{of} is {value!r}; give a number", param=name)
    if not math.isfinite(value):
        raise InvalidParams(f"{name}{of} is {value}; give a finite number", param=name)
    too_low = low is not None and (value <= low if open_low else value < low)
    if too_low or (high is not None and value > high):
        raise InvalidParams(f"{name}{of} is {value}; give {_range(low, high, open_low)}", param=name)


def check_integer(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParams(f"{name} is {value!r}; give a whole number", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidParams(f"{name} is {value}; give {_range(low, high, False)}", param=name)


# Checks of parameters. As a text each says what it takes.

Check = Callable[[str, Any], Any]
"""Takes the name and a value of a parameter. Returns the value to keep, or raises InvalidParams."""


@dataclass(frozen=True, slots=True)
class Real:
    low: float
    high: float
    open_low: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        check_real(name, value, self.low, self.high, open_low=self.open_low)
        return value

    def __str__(self) -> str:
        return _range(self.low, self.high, self.open_low)


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int = MAX_COUNT
    or_none: bool = False  # None is a value of its own
    unset: int | None = None  # a number that means None
    switch: bool = False  # True means 1, False None

    def __call__(self, name: str, value: Any) -> Any:
        if self.switch and isinstance(value, bool):
            return 1 if value else None
        if value is None and self.or_none:
            return None
        check_integer(name, value, self.low, self.high)
        return None if value == self.unset else value

    def __str__(self) -> str:
        return _range(self.low, None if self.high == MAX_COUNT else self.high, False)


@dataclass(frozen=True, slots=True)
class Switch:
    or_none: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        if not isinstance(value, bool):
            choice = "True, False or None" if self.or_none else "True or False"
            raise InvalidParams(f"{name} is {value!r}; give {choice}", param=name)
        return value

    def __str__(self) -> str:
        return "True or False"


PRIORITY = Integer(-(2**62), 2**62)


def check_turn(priority: object, cache_salt: object) -> None:
    """Checks priority and cache_salt."""
    PRIORITY("priority", priority)
    check_text("cache_salt", cache_salt)


def check_text(name: str, value: object) -> object:
    """Checks that the value is a str that UTF-8 can encode: the core closes connections that send anything else."""
    if not isinstance(value, str):
        raise InvalidParams(f"{name} is {value!r}; give a string", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParams(
            f"{name} holds half of a surrogate pair, which is no character; give text that is UTF-8", param=name
        ) from None
    return value


def is_deep_json(text: str | bytes, limit: int = MAX_DEPTH) -> bool:
    """Whether more than `limit` objects and arrays are inside one another, in text that should be JSON. A decoder has
    no limit of its own that is known: it depends on the stack of its caller."""
    source = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if source.count(b"[") + source.count(b"{") <= limit:
        return False
    return bool(_steps(source).cumsum(dtype="int32").max(initial=0) > limit)


def is_wide_json(source: bytes) -> bool:
    """Whether it has more than MAX_HOLDERS objects and arrays."""
    if source.count(b"[") + source.count(b"{") <= MAX_HOLDERS:
        return False
    return bool((_steps(source) > 0).sum() > MAX_HOLDERS)


def _steps(source: bytes) -> NDArray[np.int8]:
    """1 for the start of each object and array, -1 for its end."""
    import numpy as np  # commands that do not read a request answer without it

    bare = source.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    return np.frombuffer(_STRING.sub(b"", bare).translate(_BRACKETS), np.int8)


def is_deep(value: object, limit: int = MAX_DEPTH) -> bool:
    """Whether more than `limit` objects, lists and tuples are inside one another."""
    level = [value]
    for _ in range(limit):
        holders = [each for each in level if type(each) not in _PLAIN and isinstance(each, _HOLDERS)]
        level = [inner for each in holders for inner in (each.values() if isinstance(each, Mapping) else each)]
        if not level:
            return False
    return any(isinstance(each, _HOLDERS) for each in level)


def _range(low: float | None, high: float | None, open_low: bool) -> str:
    if high is None:
        return f"more than {low}" if open_low else f"at least {low}"
    return f"more than {low} and at most {high}" if open_low else f"{low} to {high}"


def check_strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise InvalidParams(f"{name} is {value!r}; give a string or a list of strings", param=name)
    if any(not text.strip() if name == "bad_words" else not text for text in value):
        raise InvalidParams(f"{name} holds an empty string, which is in every text; leave it out", param=name)
    for text in value:
        check_text(name, text)
    return tuple(dict.fromkeys(value))


def check_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidParams(f"{name} is {value!r}; give a list of token ids", param=name)
    ids = [plain_value(each) for each in value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise InvalidParams(f"{name} holds {i!r}; token ids are whole numbers from 0 up", param=name)
    return tuple(dict.fromkeys(ids))


def check_named_values(name: str, value: object) -> dict[str, Any] | None:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        raise InvalidParams(f"{name} is {value!r}; give names with a value each", param=name)
    return dict(value) or None


def check_callables(name: str, value: object) -> tuple[Any, ...] | None:
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise InvalidParams(f"{name} is {value!r}; give a list of callables, see docs/logits-processors.md", param=name)
    if needs := [each.needs for each in value if getattr(each, "needs", "logits") not in ("tokens", "logits")]:
        raise InvalidParams(f'{name} has a callable whose needs is {needs[0]!r}; give "tokens" or "logits"', param=name)
    return tuple(value) or None


def check_bias(name: str, value: object) -> dict[int, float] | None:
    """Checks logit_bias. Ids may be strings, as in JSON."""
    if not isinstance(value, Mapping):
        raise InvalidParams(f"{name} is {value!r}; give an object of token ids and numbers", param=name)
    bias: dict[int, float] = {}
    for key, number in value.items():
        token, number = int(key) if isinstance(key, str) and key.isdecimal() else plain_value(key), plain_value(number)
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidParams(f"{name} holds {key!r}; token ids are whole numbers from 0 up", param=name)
        if token in bias:
            raise InvalidParams(f"{name} holds {token} twice, as a number and as a text; leave one out", param=name)
        check_real(name, number, None, None, of=f" of {token}")
        bias[token] = min(MAX_BIAS, max(-MAX_BIAS, float(number)))  # clamped, as in OpenAI's API
    return bias or None
