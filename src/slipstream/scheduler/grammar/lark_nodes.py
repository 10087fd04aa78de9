"""Nodes of a grammar that become one text in Lark's syntax for llguidance.

llguidance splits the output into terminals, each as long as possible, before rules apply. So a free text that is a
terminal of its own would never end where the text after it begins. Therefore neighbouring regular parts are joined to
one terminal (`join`), and parts after free text are distributed over alternatives. A terminal with free text inside,
such as any text up to `END`, ends at its first match if something that is not regular follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_NODES = 2**15  # that are made for one grammar
_ANY = "(?s:.{%s})"


class BadGrammar(ValueError):
    """The specification cannot be translated."""


@dataclass(frozen=True)
class Regular:
    """A regular language: an expression over terminals. An empty expression is the empty text."""

    expression: str
    is_nullable: bool = False
    ends_free: bool = False  # it may end with free text, which goes on as long as it can
    is_closed: bool = False  # that free text excludes what comes next
    has_free: bool = False  # free text inside is followed by a text that it may contain itself
    is_lazy: bool = False  # it ends at the first match


@dataclass(frozen=True)
class Symbol:
    """A special token, or the name of a rule that is not regular."""

    name: str
    is_token: bool = False


@dataclass(frozen=True)
class Series:
    parts: tuple[Node, ...]  # none is empty; no two regular ones are neighbours


@dataclass(frozen=True)
class Alternatives:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    body: Node
    least: int
    most: int | None


Node = Regular | Symbol | Series | Alternatives | Repeat
EMPTY = Regular("", is_nullable=True)


class LarkWriter:
    """Makes nodes and writes the grammar. Equal terminals and rules have one name."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._max_nodes = max_nodes
        self._num_nodes = 0
        self._names: dict[str, str] = {}  # of terminals and rules, by their definition

    # Leaves

    def const(self, text: str) -> Regular:
        return Regular(self._terminal(json.dumps(text, ensure_ascii=False))) if text else EMPTY

    def pattern(self, regex: str, *, is_nullable: bool = False) -> Regular:
        """`regex`: in Rust's syntax, with slashes and line breaks escaped."""
        return Regular(self._terminal(f"/{regex}/"), is_nullable=is_nullable)

    def free_text(self, excluded: Iterable[str], least: int = 0, most: int | None = None) -> Regular:
        """Text that contains none of the excluded texts. `least`, `most`: characters."""
        texts = list(dict.fromkeys(filter(None, excluded)))
        size = f"{least}," if most is None else f"{least},{most}"
        expression = f"/{_ANY % size}/"
        if texts:
            everything = f"/{_ANY % '0,'}/"
            quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            expression += f" & ~({everything} ({quoted}) {everything})"
        return Regular(self._terminal(expression), not least, ends_free=True)

    def rule(self, body: str) -> Symbol:
        """A rule that is not regular, such as `%json {...}`."""
        return Symbol(self._name("rule", f": {body}"))

    def token(self, number: int) -> Symbol:
        return Symbol(f"<[{number}]>", is_token=True)

    # Compositions

    def sequence(self, nodes: Iterable[Node]) -> Node:
        result: Node = EMPTY
        run: list[Regular] = []
        for node in nodes:
            if isinstance(node, Regular):
                run.append(node)
                continue
            result = self.join(self.join(result, self._merge(run)), node)
            run = []
        return self.join(result, self._merge(run))

    def choice(self, nodes: Iterable[Node]) -> Node:
        options = list(dict.fromkeys(nodes))
        self._count(len(options))
        if len(options) == 1:
            return options[0]
        regular = [each for each in options if isinstance(each, Regular)]
        if len(regular) < len(options):
            return Alternatives(tuple(options))
        body = " | ".join(each.expression for each in regular if each.expression)
        is_optional = any(not each.expression for each in regular)
        return Regular(
            self._terminal(f"({body})?" if is_optional else body),
            is_nullable=any(each.is_nullable for each in regular),
            ends_free=any(each.ends_free for each in regular),
            is_closed=all(each.is_closed for each in regular if each.ends_free),
            has_free=any(each.has_free for each in regular),
        )

    def repeat(self, body: Node, least: int, most: int | None) -> Node:
        self._count()
        if most == 0 or body == EMPTY:
            return EMPTY
        if not isinstance(body, Regular):
            return Repeat(_lazy(body) if most != 1 else body, least, most)
        expression = f"({body.expression}){_times(least, most)}"
        return replace(
            body,
            expression=self._terminal(expression),
            is_nullable=body.is_nullable or not least,
            has_free=body.has_free or (body.ends_free and most != 1),
        )

    def closed(self, node: Node) -> Node:
        """The node, whose free text at the end excludes what comes next."""
        if isinstance(node, Regular):
            return replace(node, is_closed=True)
        if isinstance(node, Series):
            return Series((*node.parts[:-1], self.closed(node.parts[-1])))
        if isinstance(node, Alternatives):
            return Alternatives(tuple(map(self.closed, node.options)))
        return replace(node, body=self.closed(node.body)) if isinstance(node, Repeat) else node

    def join(self, first: Node, second: Node) -> Node:
        """One after the other."""
        self._count()
        if first == EMPTY:
            return second
        if second == EMPTY:
            return first
        if isinstance(first, Regular) and isinstance(second, Regular):
            return self._merge([first, second])
        if isinstance(first, Series):
            return Series((*first.parts[:-1], *_parts(self.join(first.parts[-1], second))))
        if isinstance(second, Series):
            joined, rest = self.join(first, second.parts[0]), second.parts[1:]
            return Series((*_parts(joined if _is_token(rest[0]) else _lazy(joined)), *rest))
        if _ends_with_text(first):
            if isinstance(first, Alternatives):
                return self.choice(self.join(each, second) for each in first.options)
            if isinstance(first, Repeat):
                some = Series((*self._one_less(first), *_parts(self.join(first.body, second))))
                return some if first.least else self.choice([second, some])
            if isinstance(second, Alternatives):
                return self.choice(self.join(first, each) for each in second.options)
            if isinstance(second, Repeat):
                some = Series((*_parts(self.join(first, second.body)), *self._one_less(second)))
                return some if second.least else self.choice([first, some])
            assert isinstance(first, Regular)
            if not (first.is_closed or _is_token(second)):
                raise BadGrammar(
                    "the end of any_text cannot be found where JSON or a grammar comes next; put any_text into a tag, "
                    "or put a const_string after it"
                )
        return Series((first if _is_token(second) else _lazy(first), second))

    def _one_less(self, node: Repeat) -> tuple[Node, ...]:
        """The repetition with one round less."""
        rest = self.repeat(node.body, max(node.least - 1, 0), None if node.most is None else node.most - 1)
        return () if rest == EMPTY else (rest,)

    def _merge(self, run: Sequence[Regular]) -> Regular:
        run = [each for each in run if each.expression]
        self._count(len(run))
        if len(run) < 2:
            return run[0] if run else EMPTY
        last, has_free = run[0], run[0].has_free  # `last`: the part whose free text may be the end
        for each in run[1:]:
            has_free |= each.has_free or (last.ends_free and not last.is_closed)
            if each.ends_free or not (each.is_nullable and last.ends_free):
                last = each
        return Regular(
            self._terminal(" ".join(each.expression for each in run)),
            is_nullable=all(each.is_nullable for each in run),
            ends_free=last.ends_free,
            is_closed=last.is_closed,
            has_free=has_free,
        )

    # Text

    def grammar(self, start: Node) -> str:
        body = self._text(start)
        rules = [f"{name}{definition}" for definition, name in self._names.items()]
        return "\n".join([f"start: {body}", *rules]) + "\n"

    def _text(self, node: Node) -> str:
        if isinstance(node, Symbol):
            return node.name
        if isinstance(node, Regular):
            return self._name("lazy", f"[lazy]: {node.expression}") if node.is_lazy else node.expression or '""'
        if isinstance(node, Series):
            return " ".join(map(self._text, node.parts))
        if isinstance(node, Alternatives):
            return f"({' | '.join(map(self._text, node.options))})"
        return f"({self._text(node.body)}){_times(node.least, node.most)}"

    def _terminal(self, expression: str) -> str:
        return self._name("T", f": {expression}")

    def _name(self, prefix: str, definition: str) -> str:
        return self._names.setdefault(definition, f"{prefix}{len(self._names)}")

    def _count(self, num: int = 1) -> None:
        self._num_nodes += num
        if self._num_nodes > self._max_nodes:
            raise BadGrammar(f"it is too complex: it has more than {self._max_nodes} parts; give fewer formats")


def _times(least: int, most: int | None) -> str:
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((least, most))
    return short or f"{{{least},{'' if most is None else most}}}"


def _parts(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, Series) else (node,)


def _lazy(node: Node) -> Node:
    """The node, whose last terminal ends at its first match where free text could go on."""
    if isinstance(node, Regular):
        return replace(node, is_lazy=True) if node.has_free and not node.ends_free else node
    if isinstance(node, Series):
        return Series((*node.parts[:-1], _lazy(node.parts[-1])))
    if isinstance(node, Alternatives):
        return Alternatives(tuple(map(_lazy, node.options)))
    return replace(node, body=_lazy(node.body)) if isinstance(node, Repeat) else node


def _ends_with_text(node: Node) -> bool:
    if isinstance(node, Regular):
        return node.ends_free
    if isinstance(node, Series):
        return _ends_with_text(node.parts[-1])
    if isinstance(node, Alternatives):
        return any(map(_ends_with_text, node.options))
    return isinstance(node, Repeat) and _ends_with_text(node.body)


def _is_token(node: Node) -> bool:
    return isinstance(node, Symbol) and node.is_token


def nested(grammar: str) -> str:
    """A grammar as the body of a rule of another one."""
    return f"%lark {{\n{grammar}\n}}"


def escaped(regex: str) -> str:
    """A regular expression as Lark writes it between slashes."""
    regex = ascii_classes(regex)
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex)


def anchored(regex: str) -> tuple[bool, str, bool]:
    """A regular expression without the anchors around it, and whether it had one at its start and at its end."""
    own = regex.removeprefix("^")
    end = re.search(r"(?<!\\)(?:\\\\)*\$$", own)
    return own != regex, own if end is None else own[:-1], end is not None


def unanchored(regex: str) -> str:
    """A regular expression that a whole text matches if a part of it matches this one."""
    has_start, own, has_end = anchored(regex)
    return f"{'' if has_start else '(?s:.*)'}({own}){'' if has_end else '(?s:.*)'}"


def as_lark(grammar: str) -> str:
    """A grammar in Lark's syntax of one in Lark's or llama.cpp's (GBNF) syntax."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except RecursionError:
        raise BadGrammar("the grammar has too many parentheses in one another; write inner ones as rules") from None
    except Exception as error:  # the converter from GBNF raises plain exceptions
        raise BadGrammar(f"the grammar cannot be read: {error}") from None


# \d, \w, \D and \W of regular expressions mean ASCII, as in JSON schemas (ECMA-262) and in vLLM's default backend.
#
# For llguidance they mean Unicode, so that an answer could have the digits of any script for \d.

# as sets in brackets, which are allowed inside of other sets too
_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_IN_JSON = re.compile(r"\\\\[dDwW]")
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name


def ascii_classes(regex: str) -> str:
    return _ESCAPE.sub(lambda found: _CLASSES.get(found[0], found[0]), regex)


def ascii_patterns(schema: str) -> str:
    """A JSON schema, as text, with its regular expressions about ASCII."""
    if not _IN_JSON.search(schema):
        return schema
    found: Any = json.loads(schema)
    left: list[Any] = [found]
    while left:  # no recursion: schemas may be deep
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += [value for name, value in part.items() if name not in _VALUES and name not in _MAPS]
            for name in _MAPS:
                if isinstance(named := part.get(name), dict):
                    left += named.values()
            if isinstance(regex := part.get("pattern"), str):
                part["pattern"] = ascii_classes(regex)
            if isinstance(named := part.get("patternProperties"), dict):
                part["patternProperties"] = {ascii_classes(regex): value for regex, value in named.items()}
    return json.dumps(found)
