"""The child process that runs chat templates: Jinja without files, modules and attributes of Python objects.

A template is untrusted code, and a thread that runs it cannot be stopped: one comparison of nested lists may take
years. So `chat_template.py` calls a `LimitedChild`, which limits time and memory, whatever the template does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.base.errors import InvalidPrompt
from slipstream.base.processes import answer_calls
from slipstream.text.chat_fields import IS_TEXT, NotedMessage, Parts, check_read

_MAX_SOURCE = 1 << 20  # characters of a template


def _answer(data: bytes) -> bytes:
    """The rendered text; or JSON: the error, or without variables what the template reads."""
    try:
        template, variables = json.loads(data)
        if variables is None:
            return json.dumps(_summary(template)).encode()
        return IS_TEXT + _render(template, variables).encode("utf-8", "surrogatepass")
    except InvalidPrompt as error:
        return json.dumps({"error": str(error), "param": error.param}).encode()
    except MemoryError:
        os._exit(1)  # the parent takes this for a passed limit


def _summary(template: str) -> dict[str, list[str]]:
    """The variables that a template reads and does not define, and its string constants."""
    _compiled(template)
    tree = _environment().parse(template)
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return {"variables": sorted(jinja2.meta.find_undeclared_variables(tree)), "texts": sorted(texts)}


def _render(template: str, variables: Mapping[str, Any]) -> str:
    compiled = _compiled(template)
    messages = [NotedMessage(message) for message in variables["messages"]]
    for message in messages:
        if isinstance(content := dict.get(message, "content"), list):
            dict.__setitem__(message, "content", Parts(content))
    try:
        text = compiled.render({**variables, "messages": messages})
    except jinja2.TemplateError as error:
        raise InvalidPrompt(
            f"the chat template rejected the messages: {error.message or type(error).__name__}"
        ) from None
    except MemoryError:
        raise
    except RecursionError:
        raise InvalidPrompt("the chat template calls itself too often, or a value is nested too deeply") from None
    except Exception as error:  # untrusted code can raise anything: IndexError, TypeError ...
        raise InvalidPrompt(f"the chat template failed on these messages: {type(error).__name__}: {error}") from None
    check_read(messages)
    return text


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > _MAX_SOURCE:
        raise InvalidPrompt(f"the chat template has {len(template):,} characters, the limit is {_MAX_SOURCE:,}")
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidPrompt(f"the chat template is invalid in line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise InvalidPrompt("the chat template is nested too deeply") from None


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag], cache_size=0
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


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


if __name__ == "__main__":
    answer_calls(_answer)
