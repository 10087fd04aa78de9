"""Renders a conversation as the text of a prompt, by the model's Jinja chat template.

A template is untrusted code: it runs in a sandbox, without files, modules or attributes of Python objects, and with a
limit on the iterations of its loops and the calls of its macros. Control tokens in the text of the request are encoded
as text (`control_tokens.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import BadTokenizer, InvalidPrompt
from slipstream.text.chat_fields import (
    NotedMessage,
    check_read,
    check_tool_calls,
    knows_calls,
    texts_of,
    variables_of,
    with_calls_as_text,
    with_reasoning,
    with_text_arguments,
)
from slipstream.text.control_tokens import ControlTokens

_HINT = "pass chat_template=... with a Jinja template or the path of one"
_MAX_ITERATIONS = 200_000  # of all loops and macro calls in one rendering
_MAX_REPEATED = 1_000_000  # length of a repeated string or list, digits of a power
_MARK = "\ue000end of the message to continue\ue000"  # private-use characters: no text has them
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    controls: ControlTokens | None = None,
    **chat_template_kwargs: Any,
) -> str:
    """Returns the prompt's text. It has the special tokens: encode it with `add_special_tokens=False`.

    With `controls`, control tokens in the text of messages are encoded as text; without, as control tokens.
    With `continue_final_message` the text ends where the content of the last message ends, and the model continues it.
    """
    if template is None:
        raise BadTokenizer(f"the model has no chat template; {_HINT}, or give a plain prompt to generate")
    conversation = [_checked(message, index) for index, message in enumerate(_listed(messages))]
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidPrompt(
                "continue_final_message and add_generation_prompt are both set; set add_generation_prompt=False"
            )
        _mark_end(conversation[-1])
    _check_arguments(template, chat_template_kwargs)
    conversation = [with_reasoning(message, template) for message in conversation]
    if not knows_calls(template):
        conversation = [with_calls_as_text(message) for message in conversation]
    variables = {
        **(special_tokens or {}),
        "documents": None,
        **chat_template_kwargs,
        "messages": conversation,
        "tools": _checked_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    if controls is None:
        return _render_conversation(template, variables, continue_final_message)
    masked = {name: controls.mask(variables[name]) for name in (*chat_template_kwargs, "tools")}
    masked["messages"] = [controls.mask_message(message) for message in conversation]
    try:
        return controls.unmask(_render_conversation(template, variables | masked, continue_final_message))
    except InvalidPrompt as error:  # it may quote a message
        raise InvalidPrompt(controls.restore(str(error)), param=error.param and controls.restore(error.param)) from None


def known_roles(template: str) -> frozenset[str]:
    """Returns the string constants of a template, among them the roles that it knows."""
    return texts_of(template, _environment())


def reads_variable(template: str, name: str) -> bool:
    """Whether a template reads a variable that it does not define."""
    return name in variables_of(template, _environment())


def load_chat_template(given: str) -> str:
    """Returns the template of the option `chat_template`, which is a template or the path of a file."""
    template = given
    if "{{" not in given and "{%" not in given:
        try:
            template = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadTokenizer(
                f"chat_template={given!r} is neither a template nor a readable file: {error}; {_HINT}"
            ) from None
    _compile(template)  # raises at start, not at the first request
    return template


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, list | tuple):
        raise InvalidPrompt(
            f"messages are of type {type(messages).__name__}; give a list of messages with role and content"
        )
    if not messages:
        raise InvalidPrompt("there are no messages; give at least one")
    return messages


def _checked(message: Any, index: int) -> dict[str, Any]:
    """Returns a copy of a message, with its content as one text or as several parts."""
    if not isinstance(message, Mapping):
        raise InvalidPrompt(
            f"message {index} is of type {type(message).__name__}; give an object with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"message {index} has the role {role!r}; give a name like 'user'")
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = check_tool_calls(calls, index)
    content = message.get("content")
    if content is None and not calls:
        raise InvalidPrompt(f"message {index} has no content; give a string or a list of text parts")
    if "content" in message:  # else it is undefined in the template
        checked["content"] = _content(content, index)
    return checked


class _Parts(list[dict[str, str]]):
    """The text parts of a message. A template that prints it as a string fails, instead of printing a Python list."""

    def __repr__(self) -> str:
        raise TypeError("the content of a message is a list of parts")

    __str__ = __repr__


def _content(content: Any, index: int) -> str | _Parts | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise InvalidPrompt(f"message {index} has content of type {kind}; give a string or a list of text parts")
    texts = []
    for part in content:
        if isinstance(part, Mapping) and (extra := [name for name in part if name not in ("type", "text")]):
            raise InvalidPrompt(f"message {index} has a part with the field {extra[0]!r}; a text has type and text")
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise InvalidPrompt(f'message {index} has the part {part!r}; give {{"type": "text", "text": ...}}')
        texts.append(text)
    # a single part is passed as its text, because not all templates take lists
    return "".join(texts) if len(texts) < 2 else _Parts({"type": "text", "text": text} for text in texts)


def _render_conversation(template: str, variables: Mapping[str, Any], continue_final_message: bool) -> str:
    try:
        text = _render_whole(template, variables)
    except InvalidPrompt as error:
        # some templates concatenate content, which is usually null beside tool calls, and arguments, which are objects
        conversation = variables["messages"]
        filled = [_without_null(message) for message in conversation]
        texts = [with_text_arguments(message) for message in filled]
        for other in (filled, texts):
            if other == conversation:
                continue
            try:
                text = _render_whole(template, {**variables, "messages": other})
                break
            except InvalidPrompt:
                continue
        else:
            raise error
    return _cut_at_mark(text) if continue_final_message else text


def _render_whole(template: str, variables: Mapping[str, Any]) -> str:
    text = _render_parts(template, variables)
    if text is not None:
        return text
    return _render(template, {**variables, "messages": [_joined(message) for message in variables["messages"]]})


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": ""} if message.get("tool_calls") and message.get("content", "") is None else message


def _render_parts(template: str, variables: Mapping[str, Any]) -> str | None:
    """Returns the rendering with lists of parts, as transformers does. None if no message has several parts, if the
    template takes only texts, or if it drops a part."""
    parts = [part for message in variables["messages"] if _has_parts(message) for part in message["content"]]
    if not parts:
        return None
    try:
        text = _render(template, variables)
    except InvalidPrompt:
        return None
    return text if all(part["text"].strip() in text for part in parts) else None


def _has_parts(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), _Parts)


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its content as one text."""
    if not _has_parts(message):
        return message
    return message | {"content": " ".join(part["text"] for part in message["content"])}


def _checked_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidPrompt("tools must be a list of JSON schemas of functions, in the format of the OpenAI API")
    return list(tools) or None


def _check_arguments(template: str, given: Mapping[str, Any]) -> None:
    _compile(template)  # raises if it is invalid
    known = variables_of(template, _environment())
    for name in given:
        if name in _RESERVED:
            raise InvalidPrompt(
                f"chat_template_kwargs cannot have {name!r}; give it as an argument of its own",
                param="chat_template_kwargs",
            )
        if name not in known:
            raise InvalidPrompt(
                f"chat_template_kwargs has {name!r}, which the chat template does not read; remove it",
                param=f"chat_template_kwargs.{name}",
            )


def _mark_end(message: dict[str, Any]) -> None:
    if _has_parts(message):
        message["content"][-1]["text"] += _MARK
    elif isinstance(message.get("content"), str):
        message["content"] += _MARK
    else:
        raise InvalidPrompt(
            "the final message has no content to continue; add content or set continue_final_message=False"
        )


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_MARK)
    if end < 0:
        raise InvalidPrompt(
            "the chat template does not print the content of the final message, so it cannot be continued; set "
            "continue_final_message=False"
        )
    return text[:end].replace(_MARK, "")


def _render(template: str, variables: Mapping[str, Any]) -> str:
    compiled = _compile(template)
    token = _iterations.set([0])
    messages = [NotedMessage(message) for message in variables["messages"]]
    try:
        text = compiled.render({**variables, "messages": messages})
    except jinja2.TemplateError as error:
        raise InvalidPrompt(
            f"the chat template rejected the messages: {error.message or type(error).__name__}"
        ) from None
    except Exception as error:  # untrusted code can raise anything: IndexError, TypeError, RecursionError ...
        raise InvalidPrompt(f"the chat template failed on these messages: {type(error).__name__}: {error}") from None
    finally:
        _iterations.reset(token)
    check_read(messages)
    return text


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise BadTokenizer(f"the chat template is invalid in line {error.lineno}: {error.message}; {_HINT}") from None
    except RecursionError:
        raise BadTokenizer(f"the chat template is nested too deeply; {_HINT}") from None


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # generates text of any length in one call
    return environment


_iterations: ContextVar[list[int]] = ContextVar("iterations of the current rendering")


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
