"""The sandbox of chat templates: Jinja without files, modules and attributes of Python objects, and with limits.

A template is untrusted code. The iterations of its loops and the calls of its macros are counted, and the memory of the
values that it makes is limited (`template_memory.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.base.errors import BadTokenizer
from slipstream.text.template_memory import (
    BASE,
    HINT,
    ITEM,
    SIZES_OF_METHODS,
    RenderingMemory,
    size_of_format,
    size_of_operator,
    size_of_percent,
    size_of_replaced,
)

_MAX_ITERATIONS = 200_000  # of all loops and calls of macros in one rendering
_NODES = 256  # of a body that count as one iteration
_MAX_SOURCE = 1 << 20  # characters of a template


@lru_cache(maxsize=16)
def compile_template(template: str) -> jinja2.Template:
    if len(template) > _MAX_SOURCE:
        raise BadTokenizer(f"the chat template has {len(template):,} characters, the limit is {_MAX_SOURCE:,}; {HINT}")
    try:
        return environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise BadTokenizer(f"the chat template is invalid in line {error.lineno}: {error.message}; {HINT}") from None
    except RecursionError:
        raise BadTokenizer(f"the chat template is nested too deeply; {HINT}") from None


@lru_cache(maxsize=1)
def environment() -> _Sandbox:
    sandbox = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        cache_size=0,
        optimized=False,  # constants are not computed while a template is compiled, where nothing limits them
        finalize=_finalize,
    )
    sandbox.filters["tojson"] = _to_json
    for name in ("pprint", "urlize"):  # for debugging and HTML; their results have no simple bound
        del sandbox.filters[name]
    sandbox.filters = {name: limited_filter(name, function) for name, function in sandbox.filters.items()}
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    del sandbox.globals["lipsum"]  # generates text of any length in one call
    return sandbox


def run_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a template, with limits on its time and memory. Raises what its code raises: anything."""
    token = rendering.set(Rendering(variables))
    try:
        return template.render(variables)
    finally:
        rendering.reset(token)


class _Generator(CodeGenerator):
    """Compiles the operations that Jinja leaves to Python as calls of the sandbox."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._visit_made(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _visit_made(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on time and memory: counts iterations of loops and calls of macros, and records every
    value that a template makes."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
            # an attribute and not a call: the sandbox checks calls, which costs more than the loop itself
            count = 1 + sum(1 for _ in node.find_all(nodes.Node)) // _NODES
            count *= 8 if isinstance(node, nodes.Block) else 1  # a call of a block takes that much longer
            counters = [nodes.ExprStmt(nodes.EnvironmentAttribute("count_iteration")) for _ in range(count)]
            node.body[:0] = [counter.set_lineno(node.lineno) for counter in counters]  # type: ignore[attr-defined]
        return tree

    @property
    def count_iteration(self) -> None:
        current = rendering.get()
        current.iterations += 1
        if current.iterations > _MAX_ITERATIONS:
            raise jinja2.TemplateRuntimeError(f"its loops have more than {_MAX_ITERATIONS:,} iterations; {HINT}")

    def made(self, value: Any) -> Any:
        return rendering.get().add(value)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the output of a template, macro or block."""
        memory = rendering.get()
        texts = list(parts)
        memory.check(sum(map(len, texts)))
        return memory.add("".join(texts))  # type: ignore[no-any-return]

    def join_texts(self, context: Context, values: Sequence[Any]) -> str:
        """The operator ~."""
        memory = rendering.get()
        memory.check_text(*values)
        memory.check(sum(len(value) for value in values if isinstance(value, str)))
        join = markup_join if context.eval_ctx.autoescape else str_join
        return memory.add(join(values))  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        memory = rendering.get()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            memory.check(len(left) + len(right))
            return memory.add(left + right)
        memory.check(size_of_operator(operator, left, right, memory))
        return memory.add(self.binop_table[operator](left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = value.__self__

        def limited(*values: Any, **named: Any) -> str:
            memory = rendering.get()
            memory.check(size_of_format(pattern, (values, named), memory))
            return memory.add(wrapped(*values, **named))  # type: ignore[no-any-return]

        return limited

    def call(__self, __context: Context, __called: Any, *args: Any, **kwargs: Any) -> Any:
        memory = rendering.get()
        owner, size = getattr(__called, "__self__", None), 0
        if isinstance(owner, str | bytes | int):
            args, size = limited_method(memory, owner, __called.__name__, args, kwargs)
        return memory.add(super().call(__context, __called, *args, **kwargs), size)


@jinja2.pass_context  # so that constants are printed at run time, where sizes are limited
def _finalize(context: Context, value: Any) -> Any:
    if not isinstance(value, str):
        rendering.get().check_text(value)
    return value


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the model's text for training; here only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    memory = rendering.get()
    memory.check(memory.weigh(value, _width(indent) + sum(map(len, separators or ()))))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _width(indent: Any) -> int:
    return len(indent) if isinstance(indent, str) else indent or 0


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


# Filters and methods that chat templates call, with the memory limit of the rendering.


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
