"""Pickled data, read without unpickling: no name in it is looked up and nothing in it is called.

A pickle is a program for a small stack machine. Here is a machine that knows the part of its language in which plain
data are written since protocol 2; a name stands for what the reader says it stands for, and one that the reader does
not know ends it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any


class NotPlain(Exception):
    """What a pickle asked for that is not plain data, in words."""


def read_pickle(data: bytes, names: Mapping[str, Any], load: Callable[[Any], Any]) -> Any:
    """The value that it describes. Raises NotPlain, or ValueError where it is broken.

    `names`: what "module.name" stands for, a value or a function of our own. `load`: what stands outside the pickle.
    """
    machine = _Machine(names, load)
    try:
        for op, argument, _ in pickletools.genops(data):
            if op.name == "STOP":
                (value,) = machine.stack
                return value
            machine.run(op.name, argument)
    except (IndexError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"the pickle makes no sense: {error}") from None
    raise ValueError("the pickle has no end")


class _Name:
    """A name in a pickle, and what it stands for here."""

    __slots__ = ("text", "meaning")

    def __init__(self, text: str, meaning: Any) -> None:
        self.text = text
        self.meaning = meaning


class _Machine:
    """Its stack holds values, and marks from which several values are gathered."""

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
        """The value on top, to be added to."""
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"the pickle adds to a {type(self.stack[-1]).__name__} as if it were a {kind.__name__}")
        return self.stack[-1]

    # Gathering values

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
            if not isinstance(key, str | int):  # others may take forever to hash
                raise NotPlain(f"a dictionary by {type(key).__name__}")
            found[key] = value

    # Remembering

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _binput(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def _binget(self, place: int) -> None:
        self.stack.append(self.memo[place])

    _long_binput = _binput
    _long_binget = _binget

    # Names, and what is made of them

    def _global(self, text: str) -> None:
        self._name(text.replace(" ", ".", 1))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("the pickle has a name that is no text")
        self._name(f"{module}.{name}")

    def _name(self, text: str) -> None:
        if text not in self.names:
            raise NotPlain(text)
        self.stack.append(_Name(text, self.names[text]))

    def _reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Name) or not callable(function.meaning) or not isinstance(arguments, tuple):
            raise NotPlain("a call of what is no function")
        self.stack.append(function.meaning(*map(meaning_of, arguments)))

    def _build(self, _: Any) -> None:
        """Attributes of a value, such as the versions that a module's state has beside its tensors: left out."""
        self.stack.pop()
        self._top(dict)

    def _binpersid(self, _: Any) -> None:
        self.stack.append(self.load(self.stack.pop()))


def meaning_of(value: Any) -> Any:
    return value.meaning if isinstance(value, _Name) else value


_PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_FIXED: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_NOTHING = {"PROTO", "FRAME"}
