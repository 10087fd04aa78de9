"""Matches names of modules with the regular expressions of a file that the server did not write.

`re` needs exponential time for some expressions, during which no other thread runs. Here all expressions of a file
become one automaton without backtracking, and its steps are counted: a bound that no machine changes. Syntax that needs
backtracking (references, lookahead) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

_MAX_CHARACTERS = 1_000_000  # of all expressions
_MAX_STATES = 100_000  # {m,n} needs n times the states of what it repeats
_MAX_DEPTH = 50  # of parentheses
_MAX_STEPS = 1_000_000  # steps for all names together: about a second
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[]", re.DOTALL)
_REPEAT = re.compile(r"\*|\+|\?|\{(?!\})(?P<low>\d*)(?P<upto>,?)(?P<high>\d*)\}")
_OUT = "give fewer and plainer patterns: names of modules, with . * + ? {} [] () | at most"


class _Node(NamedTuple):
    """A character, a class of characters, all of `nodes` in turn, any of them, or one of them repeated."""

    kind: Literal["char", "class", "all", "any", "repeat"]
    nodes: tuple[_Node, ...] = ()
    text: str = ""
    low: int = 0
    high: int | None = None


class ModulePatterns:
    """Expressions in order. One matches a whole name or the end of a name after a dot, as those of PEFT."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError for an expression that is invalid or not supported, and for too many of them."""
        self._chars: dict[tuple[int, str], int] = {}  # the state after a state and a character
        self._classes: dict[int, list[tuple[re.Pattern[str], int]]] = {}
        self._free: dict[int, list[int]] = {}  # states that are entered together with a state
        self._accepts: dict[int, int] = {}  # the first expression that ends in a state
        self._beginnings: dict[tuple[int, _Node], int] = {}  # states that expressions with equal beginnings share
        self._num_states = 2  # 0 is entered where a name begins, 1 also after each dot
        self._num_steps = 0
        self._after: dict[tuple[frozenset[int], str], frozenset[int]] = {}  # cache of `_step`
        self._sets: dict[frozenset[int], frozenset[int]] = {}  # one object for equal sets, so that keys compare fast
        given = list(patterns)
        if (total := sum(map(len, given))) > _MAX_CHARACTERS:
            raise ValueError(f"the patterns have {total} characters, at most {_MAX_CHARACTERS} are supported; {_OUT}")
        for number, pattern in enumerate(given):
            try:
                self._add(number, pattern)
            except (ValueError, re.error) as error:
                raise ValueError(f"pattern {pattern[:100]!r}: {error}; {_OUT}") from None

    def first_match(self, name: str) -> int | None:
        """The number of the first expression that matches. Raises ValueError if that takes too many steps."""
        states = self._closure((0, 1))
        for character in name:
            after = self._after.get((states, character))
            if after is None:
                after = self._after[states, character] = self._step(states, character)
            states = after
        return min((self._accepts[state] for state in states if state in self._accepts), default=None)

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        self._count(len(states))
        found = [1] if character == "." else []
        for state in states:
            if (target := self._chars.get((state, character))) is not None:
                found.append(target)
            classes = self._classes.get(state, ())
            self._count(len(classes))
            found += [target for members, target in classes if members.fullmatch(character)]
        return self._closure(found)

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        found = set(states)
        waiting = list(found)
        while waiting:
            free = self._free.get(waiting.pop(), ())
            self._count(1 + len(free))
            new = set(free) - found
            waiting += new
            found |= new
        whole = frozenset(found)
        return self._sets.setdefault(whole, whole)

    def _count(self, num: int) -> None:
        self._num_steps += num
        if self._num_steps > _MAX_STEPS:
            raise ValueError(f"the patterns take more than {_MAX_STEPS} steps to match; {_OUT}")

    def _add(self, number: int, pattern: str) -> None:
        node = _Parser(pattern.removeprefix("^")).parse()
        nodes = list(node.nodes) if node.kind == "all" else [node]
        state = 0 if pattern.startswith("^") else 1
        while nodes and nodes[0].kind in ("char", "class"):
            key = (state, nodes.pop(0))
            if key not in self._beginnings:
                self._beginnings[key] = self._build(key[1], state)
            state = self._beginnings[key]
        self._accepts.setdefault(self._build(_Node("all", tuple(nodes)), state), number)

    def _build(self, node: _Node, start: int) -> int:
        """Adds the states of a node behind `start`; returns the state in which it ends."""
        self._count(1)
        if node.kind == "char":
            return self._enter(start, node.text)
        if node.kind == "class":
            self._classes.setdefault(start, []).append((re.compile(node.text), target := self._state()))
            return target
        if node.kind == "all":
            for each in node.nodes:
                start = self._build(each, start)
            return start
        if node.kind == "any":
            return self._join([self._build(each, start) for each in node.nodes])
        (repeated,) = node.nodes
        for _ in range(node.low):
            start = self._build(repeated, start)
        if node.high is None:
            loop = self._join([start])
            self._free.setdefault(self._build(repeated, loop), []).append(loop)
            return loop
        ends = [start]
        for _ in range(node.high - node.low):
            ends.append(self._build(repeated, ends[-1]))
        return self._join(ends)

    def _enter(self, start: int, character: str) -> int:
        target = self._state()
        if (start, character) in self._chars:
            self._classes.setdefault(start, []).append((re.compile(re.escape(character)), target))
        else:
            self._chars[start, character] = target
        return target

    def _join(self, ends: Iterable[int]) -> int:
        """A new state that is entered together with each of these."""
        joined = self._state()
        for end in ends:
            self._free.setdefault(end, []).append(joined)
        return joined

    def _state(self) -> int:
        if self._num_states >= _MAX_STATES:
            raise ValueError(f"the patterns need more than {_MAX_STATES} states")
        self._num_states += 1
        return self._num_states - 1


class _Parser:
    """Reads the part of Python's syntax that needs no backtracking. Raises ValueError for the rest."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> _Node:
        node = self._choice(0)
        if self._at < len(self._text):
            raise ValueError("a parenthesis is not opened")
        return node

    def _choice(self, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise ValueError(f"parentheses are nested more than {_MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else _Node("any", tuple(options))

    def _sequence(self, depth: int) -> _Node:
        nodes: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            if self._text[self._at :] == "$":  # names are matched to their end
                self._at += 1
                break
            nodes.append(self._repeated(self._atom(depth)))
        return _Node("all", tuple(nodes))

    def _repeated(self, node: _Node) -> _Node:
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            return node
        self._at = found.end() + self._text.startswith("?", found.end())  # the shortest match is a match as well
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0]) or _bounds(found)
        return _Node("repeat", (node,), low=low, high=high)

    def _atom(self, depth: int) -> _Node:
        found = _ATOM.match(self._text, self._at)
        if found is None:
            raise ValueError(f"{self._text[self._at :][:20]!r} has no end")
        self._at = found.end()
        text = found[0]
        if text == "(":
            if self._next() == "?" and not self._text.startswith("?:", self._at):
                raise ValueError(f"{self._text[self._at - 1 :][:4]!r} is not supported")
            self._at += 2 * (self._next() == "?")
            node = self._choice(depth + 1)
            if self._next() != ")":
                raise ValueError("a parenthesis is not closed")
            self._at += 1
            return node
        if text in "^$" or _REPEAT.match(text + self._text[self._at :]):
            raise ValueError(f"{text!r} is not supported in this place")
        if text[0] == "\\" and text[1].isalnum() and text[1] not in "dDsSwW":
            raise ValueError(f"{text!r} is not supported")
        if text == "." or text[0] == "[" or text[1:].isalnum():
            re.compile(text)
            return _Node("class", text=text)
        return _Node("char", text=text[-1])

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    """Of {low,high}."""
    low = int(found["low"] or 0)
    high = int(found["high"]) if found["high"] else None if found["upto"] else low
    if high is not None and high < low:
        raise ValueError(f"{found[0]} ends before it begins")
    return low, high
