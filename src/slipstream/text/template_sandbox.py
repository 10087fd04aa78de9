"""The sandbox of chat templates: Jinja without files, modules and attributes of Python objects, and with limits.

A template is untrusted code. The iterations of its loops and the calls of its macros are counted, and no operator may
make a huge value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import BadTokenizer

HINT = "pass chat_template=... with a Jinja template or the path of one"
_MAX_ITERATIONS = 200_000  # of all loops and macro calls in one rendering
_MAX_REPEATED = 1_000_000  # length of a repeated string or list, digits of a power


@lru_cache(maxsize=16)
def compile_template(template: str) -> jinja2.Template:
    try:
        return environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise BadTokenizer(f"the chat template is invalid in line {error.lineno}: {error.message}; {HINT}") from None
    except RecursionError:
        raise BadTokenizer(f"the chat template is nested too deeply; {HINT}") from None


@lru_cache(maxsize=1)
def environment() -> _Sandbox:
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag], cache_size=0
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    del sandbox.globals["lipsum"]  # generates text of any length in one call
    return sandbox


_iterations: ContextVar[list[int]] = ContextVar("iterations of the current rendering")


def run_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a template, with limits on its time and memory. Raises what its code raises: anything."""
    token = _iterations.set([0])
    try:
        return template.render(variables)
    finally:
        _iterations.reset(token)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on time and memory: counts iterations of loops and calls of macros."""

    intercepted_binops = frozenset(("*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            # an attribute and not a call: the sandbox checks calls, which costs more than the loop itself
            counter = nodes.EnvironmentAttribute("count_iteration")
            node.body.insert(0, nodes.ExprStmt(counter).set_lineno(node.lineno))  # type: ignore[attr-defined]
        return tree

    @property
    def count_iteration(self) -> None:
        iterations = _iterations.get()
        iterations[0] += 1
        if iterations[0] > _MAX_ITERATIONS:
            raise jinja2.TemplateRuntimeError(f"its loops have more than {_MAX_ITERATIONS:,} iterations")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size_of(operator, left, right) > _MAX_REPEATED:
            raise jinja2.TemplateRuntimeError(f"{operator} would make a value of more than {_MAX_REPEATED:,} items")
        return super().call_binop(context, operator, left, right)


def _size_of(operator: str, left: Any, right: Any) -> int:
    if operator == "**":
        exact = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * right if exact else 0
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * times
    return 0


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
