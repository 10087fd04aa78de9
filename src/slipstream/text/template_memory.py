"""RenderingMemory: the memory that one rendering of a chat template may need.

Every value that a template makes is recorded with its size. When the sum passes the limit, values that nothing else
refers to are dropped, and if the rest is still too large the rendering fails. An operation that can make a value much
larger than its arguments is checked before it runs (`size_of_*`), so no single value passes the limit either.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sized, ValuesView
from functools import cached_property
from itertools import islice
from typing import Any

import jinja2
from jinja2.utils import Namespace

BASE = 1 << 24  # bytes for what a template makes by itself
_PER_BYTE = 8  # bytes for each byte of the request's values
ITEM = 64  # bytes of an item of a list: its reference and a small value
_BIT = 16  # bytes that a bit of an integer counts: its products take time rather than memory
_COLLECTIONS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_KEPT = (str, bytes, list, tuple, dict, set, Namespace)
_SMALL = 128  # characters of texts that are only counted
_PER_SMALL = 16  # bytes that such a text counts
_CHECK_SMALL = BASE // _PER_SMALL
_SIZED = (str, bytes, list, tuple)
_ENDLESS = 1 << 62

HINT = "pass chat_template=... with a Jinja template or the path of one"


class RenderingMemory:
    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._variables = variables
        self._made: dict[int, tuple[Any, int]] = {}  # by id(): the value and its bytes
        self._num_small = 0
        self._sum = 0
        self._check_at = BASE

    @cached_property
    def limit(self) -> int:
        """In bytes. The request's values are weighed only for a template that needs more than BASE."""
        return BASE + _PER_BYTE * weigh(self._variables, _ENDLESS)

    def check(self, size: int) -> None:
        """Raises if a value of `size` bytes would pass the limit."""
        if size > BASE and size > self.limit:
            raise jinja2.TemplateRuntimeError(
                f"its values would need more than {self.limit:,} bytes, the limit for these messages; {HINT}"
            )

    def add(self, value: Any, size: int = 0) -> Any:
        """Records a value that a template made, and returns it. `size`: bytes with the value's items, if known."""
        if isinstance(value, str) and len(value) <= _SMALL:
            self._num_small += 1  # without looking which are still in use
            if self._num_small > _CHECK_SMALL:
                self.check(self._num_small * _PER_SMALL)
        elif isinstance(value, _KEPT) and id(value) not in self._made:
            size = max(size, sys.getsizeof(value))
            if isinstance(value, Namespace):
                size = max(size, ITEM * len(_attributes(value)))
            self._made[id(value)] = value, size
            self._sum += size
            if self._sum > self._check_at:
                self._drop_unused()
        return value

    def _drop_unused(self) -> None:
        # three references are ours: the tuple, the variable of the loop and the argument of getrefcount
        unused = [key for key, (value, _) in self._made.items() if sys.getrefcount(value) <= 3]
        for key in unused:
            self._sum -= self._made.pop(key)[1]
        self.check(self._sum)
        self._check_at = self._sum + self.limit  # at least as much must be new before the next search

    def items(self, values: Any) -> Any:
        """Returns values that can be read several times: a generator as a list. Raises if they are too many."""
        if not isinstance(values, Sized) and isinstance(values, Iterable):
            values = list(islice(values, self.limit // ITEM + 1))
        if isinstance(values, Sized):
            self.check(ITEM * len(values))
        return values

    def check_text(self, *values: Any) -> None:
        """Raises if the values are too large as text. The same list may be in them many times."""
        if not all(isinstance(value, str) for value in values):
            self.check(self.weigh(values))

    def weigh(self, value: Any, indent: int = 0) -> int:
        """Returns about the bytes of a nested value as text, or a number above the limit. `indent`: of each level, in
        JSON."""
        size = weigh(value, BASE, indent)
        return size if size <= BASE else weigh(value, self.limit, indent)


def weigh(value: Any, limit: int, indent: int = 0) -> int:
    """Returns about the bytes of a nested value as text, or a number above `limit`."""
    total, stack = 0, [(value, 0)]
    while stack and total <= limit:
        value, depth = stack.pop()
        if isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, int):
            total += value.bit_length() // 3
        elif isinstance(value, range):
            total += ITEM * len(value)
        else:
            if isinstance(value, Namespace):
                value = _attributes(value)
            if isinstance(value, dict):
                total += sum(len(key) if isinstance(key, str) else ITEM for key in value)
                value = dict.values(value)  # not by a method of a subclass, which may note what a template reads
            if value is not None and isinstance(value, _COLLECTIONS):
                stack += [(item, depth + 1) for item in value]
        total += ITEM + indent * depth
    return total


def _attributes(namespace: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = namespace._Namespace__attrs
    return found


def size_of_operator(operator: str, left: Any, right: Any, memory: RenderingMemory) -> int:
    """Returns about the bytes of an operator's result, with one byte for a character."""
    if operator == "+":
        sized = isinstance(left, _SIZED) and isinstance(right, _SIZED)
        return 8 * (len(left) + len(right)) if sized else 0
    if operator == "**":
        return _BIT * left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    if operator == "%":
        return size_of_percent(left, right, memory) if isinstance(left, str | bytes) else 0
    for value, times in ((left, right), (right, left)):
        if isinstance(value, _SIZED) and isinstance(times, int):
            return _unit(value) * len(value) * times
    is_integer = isinstance(left, int) and isinstance(right, int)
    return _BIT * (left.bit_length() + right.bit_length()) if is_integer else 0


def _unit(value: Any) -> int:
    return 1 if isinstance(value, str | bytes) else 8


_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_BRACE_WIDTH = re.compile(r"\d+")
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")


def size_of_percent(pattern: str | bytes, values: Any, memory: RenderingMemory) -> int:
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    widths = [width for found in _PERCENT_WIDTH.findall(text) for width in found if width]
    if "*" in widths:
        return _ENDLESS  # a width that is a value
    return len(text) + _sum_of(widths) + text.count("%") * memory.weigh(values)


def size_of_format(pattern: str, values: Any, memory: RenderingMemory) -> int:
    """Of str.format: any number in the pattern may be a width."""
    if _NESTED_FIELD.search(pattern):
        return _ENDLESS  # a width that is a value
    return len(pattern) + _sum_of(_BRACE_WIDTH.findall(pattern)) + pattern.count("{") * memory.weigh(values)


def _sum_of(widths: list[str]) -> int:
    return sum(int(width) if len(width) < 12 else _ENDLESS for width in widths)


def _size_of_padded(value: Any, *arguments: Any, **named: Any) -> int:
    return max((width for width in (*arguments, *named.values()) if isinstance(width, int)), default=0)


def _size_of_tabs(text: Any, tabsize: int = 8) -> int:
    num_tabs: int = text.count("\t" if isinstance(text, str) else b"\t")
    return len(text) + num_tabs * tabsize


def size_of_replaced(text: Any, old: Any, new: Any, count: int = -1) -> int:
    num_found: int = text.count(old)
    return len(text) + num_found * len(new)


def _size_of_joined(separator: Any, values: Any) -> int:
    return sum(map(len, values)) + len(separator) * len(values)


def _size_of_translated(text: Any, table: Any, *_: Any) -> int:
    values = table.values() if isinstance(table, Mapping) else ()
    return len(text) * max((len(value) for value in values if isinstance(value, Sized)), default=1)


def _size_of_lines(text: Any, keepends: bool = False) -> int:
    breaks = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029" if isinstance(text, str) else [b"\n", b"\r"]
    num_breaks: int = sum(text.count(one) for one in breaks)
    return ITEM * num_breaks


SIZES_OF_METHODS: dict[str, Callable[..., int]] = {
    "center": _size_of_padded,
    "ljust": _size_of_padded,
    "rjust": _size_of_padded,
    "zfill": _size_of_padded,
    "to_bytes": _size_of_padded,
    "expandtabs": _size_of_tabs,
    "replace": size_of_replaced,
    "join": _size_of_joined,
    "translate": _size_of_translated,
    "splitlines": _size_of_lines,
}
"""By the name of a method of texts, bytes or integers: the size of its result, from the object and the arguments."""
