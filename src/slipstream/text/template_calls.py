"""Filters and methods that chat templates call, with the memory limit of the rendering."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from slipstream.text.template_memory import (
    BASE,
    ITEM,
    SIZES_OF_METHODS,
    RenderingMemory,
    size_of_percent,
    size_of_replaced,
)


class Rendering(RenderingMemory):
    """The state of one rendering."""

    iterations = 0


rendering: ContextVar[Rendering] = ContextVar("the current rendering")


def limited_method(
    memory: RenderingMemory, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], int]:
    """Checks a call of a method of a text, bytes or integer. Returns the arguments to call it with, and the bytes of
    the result if its items are new."""
    if name == "join" and args:
        args = (memory.items(args[0]), *args[1:])
    named = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # Jinja adds _loop_vars
    size = 0
    if name in ("split", "rsplit"):
        size = ITEM * _num_parts(memory, owner, *args, **named)
    elif size_of := SIZES_OF_METHODS.get(name):
        size = size_of(owner, *args, **named)
    memory.check(size)
    return args, size if name.endswith(("split", "lines")) else 0


def _num_parts(memory: RenderingMemory, text: Any, sep: Any = None, maxsplit: int = -1) -> int:
    """Returns into how many parts a text is split at most, or how many are too many."""
    if sep:
        return text.count(sep) + 1  # type: ignore[no-any-return]
    return len(text) // 2 + 1 if len(text) < BASE // ITEM else len(text.split(None, memory.limit // ITEM)) + 1


# filters whose results are not larger than their arguments
_PLAIN = frozenset(
    ("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "map", "max", "min")
    + ("random", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "tojson")
)
# filters that read all items of their first argument
_OF_ITEMS = frozenset(("batch", "dictsort", "groupby", "join", "list", "slice", "sort", "sum", "unique"))


def limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that checks the size of its result before it is made."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments before the value: the context or environment
    size_of = _SIZES_OF_FILTERS.get(name)

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        memory = rendering.get()
        size = 0
        if name in _OF_ITEMS and len(args) > first:
            values = memory.items(args[first])
            args = (*args[:first], values, *args[first + 1 :])
            size = ITEM * len(values) if hasattr(values, "__len__") else 0
        elif name not in _PLAIN:
            memory.check_text(*args[first:], *kwargs.values())
        if size_of is not None:
            memory.check(size_of(memory, *args[first:], **kwargs))
        return memory.add(function(*args, **kwargs), size if name != "join" else 0)

    return limited


def _size_of_centered(memory: RenderingMemory, value: Any, width: int = 80) -> int:
    return width


def _size_of_indented(memory: RenderingMemory, value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    margin = len(width) if isinstance(width, str) else width
    return (str(value).count("\n") + 1) * int(margin) + len(str(value))


def _size_of_wrapped(
    memory: RenderingMemory,
    value: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: Any = None,
    **_: Any,
) -> int:
    return len(str(value)) * (1 + len(wrapstring or "\n"))


def _size_of_replaced(memory: RenderingMemory, value: Any, old: Any, new: Any, count: Any = None) -> int:
    return size_of_replaced(str(value), str(old), str(new))


def _size_of_joined(memory: RenderingMemory, values: Any, d: Any = "", attribute: Any = None) -> int:
    return memory.weigh(values) + len(str(d)) * len(values)  # an attribute is at most all of a value


def _size_of_formatted(memory: RenderingMemory, value: Any, *args: Any, **kwargs: Any) -> int:
    return size_of_percent(str(value), (args, kwargs), memory)


def _size_of_parts(memory: RenderingMemory, values: Any, count: int, *_: Any, **__: Any) -> int:
    return ITEM * int(count)


def _size_of_sum(memory: RenderingMemory, values: Any, *_: Any, **__: Any) -> int:
    return memory.weigh(values)


_SIZES_OF_FILTERS: dict[str, Callable[..., int]] = {
    "center": _size_of_centered,
    "indent": _size_of_indented,
    "wordwrap": _size_of_wrapped,
    "replace": _size_of_replaced,
    "join": _size_of_joined,
    "format": _size_of_formatted,
    "batch": _size_of_parts,
    "slice": _size_of_parts,
    "sum": _size_of_sum,
}
