"""Chat templates: a conversation to the text of a prompt, by the Jinja template that the model brings.

A template is foreign code: it runs in a sandbox, without files, modules or attributes of Python objects, and with a
limit on the turns its loops and macros may take. Control tokens that text of the request spells are encoded as text
(`control_tokens.py`).
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
)
from slipstream.text.control_tokens import ControlTokens

_WAY_OUT = "pass chat_template=... with a Jinja template or the path of one"
_MAX_TURNS = 200_000  # of all loops and macros in one rendering
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
    """The prompt's text. It holds its own special tokens: encode it with `add_special_tokens=False`.

    With `controls`, only the template writes control tokens; without, text of messages may spell them.
    With `continue_final_message` it ends exactly where the last message's content ends, for the model to go on.
    """
    if template is None:
        raise BadTokenizer(f"the model brings no chat template; {_WAY_OUT}, or give a plain prompt to generate")
    conversation = [_checked(message, place) for place, message in enumerate(_listed(messages))]
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidPrompt(
                "a final message cannot be continued and followed by a new one; set add_generation_prompt=False"
            )
        _mark_end(conversation[-1])
    _check_arguments(template, chat_template_kwargs)
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
    """Texts that a template names: roles that it knows are among them."""
    return texts_of(template, _environment())


def load_chat_template(given: str) -> str:
    """The option `chat_template`: a template itself, or the path of a file that holds one."""
    template = given
    if "{{" not in given and "{%" not in given:
        try:
            template = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadTokenizer(f"chat_template={given!r} is no template and no file we can read: {error}") from None
    _compile(template)  # a mistake in it shows at start, not at the first chat
    return template


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, list | tuple):
        raise InvalidPrompt(
            f"messages are of type {type(messages).__name__}; give a list of messages with role and content"
        )
    if not messages:
        raise InvalidPrompt("there are no messages; give at least one")
    return messages


def _checked(message: Any, place: int) -> dict[str, Any]:
    """A copy with the content as one text, or as parts where it has several."""
    if not isinstance(message, Mapping):
        raise InvalidPrompt(
            f"message {place} is of type {type(message).__name__}; give an object with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"message {place} has the role {role!r}; give a name like 'user'")
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = check_tool_calls(calls, place)
    content = message.get("content")
    if content is None and not calls:
        raise InvalidPrompt(f"message {place} has no content; give a string or a list of text parts")
    if "content" in message:  # left out, it is undefined to the template
        checked["content"] = _content(content, place)
    return checked


class _Parts(list[dict[str, str]]):
    """The text parts of a message. A template that takes it for a text fails instead of showing a Python list."""

    def __repr__(self) -> str:
        raise TypeError("the content of a message is a list of parts")

    __str__ = __repr__


def _content(content: Any, place: int) -> str | _Parts | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise InvalidPrompt(f"message {place} has content of type {kind}; give a string or a list of text parts")
    texts = []
    for part in content:
        if isinstance(part, Mapping) and (extra := [name for name in part if name not in ("type", "text")]):
            raise InvalidPrompt(f"message {place} holds a part with the field {extra[0]!r}; a text has type and text")
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise InvalidPrompt(
                f'message {place} holds the part {part!r}; we take {{"type": "text", "text": ...}} only'
            )
        texts.append(text)
    # one part and its text are the same to a template, and not all templates take lists
    return "".join(texts) if len(texts) < 2 else _Parts({"type": "text", "text": text} for text in texts)


def _render_conversation(template: str, variables: Mapping[str, Any], continue_final_message: bool) -> str:
    try:
        text = _render_whole(template, variables)
    except InvalidPrompt:
        # null beside calls is usual, and some templates that know calls add texts to the content
        conversation = variables["messages"]
        filled = [_without_null(message) for message in conversation]
        if filled == conversation:
            raise
        text = _render_whole(template, {**variables, "messages": filled})
    return _cut_at_mark(text) if continue_final_message else text


def _render_whole(template: str, variables: Mapping[str, Any]) -> str:
    text = _render_parts(template, variables)
    if text is not None:
        return text
    return _render(template, {**variables, "messages": [_joined(message) for message in variables["messages"]]})


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": ""} if message.get("tool_calls") and message.get("content", "") is None else message


def _render_parts(template: str, variables: Mapping[str, Any]) -> str | None:
    """Where messages have several parts, what a template makes of them, as transformers leaves it to the template.
    None if no message has parts, if the template wants texts, or if it would lose a part."""
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
    """With the content as one text."""
    if not _has_parts(message):
        return message
    return message | {"content": " ".join(part["text"] for part in message["content"])}


def _checked_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidPrompt("tools must be a list of JSON schemas of functions, as the OpenAI API has them")
    return list(tools) or None


def _check_arguments(template: str, given: Mapping[str, Any]) -> None:
    _compile(template)  # says what is wrong with it
    known = variables_of(template, _environment())
    for name in given:
        if name in _RESERVED:
            raise InvalidPrompt(
                f"chat_template_kwargs may not hold {name!r}; give it as an argument of its own",
                param="chat_template_kwargs",
            )
        if name not in known:
            raise InvalidPrompt(
                f"chat_template_kwargs holds {name!r}, which the chat template does not read; leave it out",
                param=f"chat_template_kwargs.{name}",
            )


def _mark_end(message: dict[str, Any]) -> None:
    if _has_parts(message):
        message["content"][-1]["text"] += _MARK
    elif isinstance(message.get("content"), str):
        message["content"] += _MARK
    else:
        raise InvalidPrompt(
            "the final message has no content to continue; give it one or set continue_final_message=False"
        )


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_MARK)
    if end < 0:
        raise InvalidPrompt("the chat template does not show the final message's content, so it cannot be continued")
    return text[:end].replace(_MARK, "")


def _render(template: str, variables: Mapping[str, Any]) -> str:
    compiled = _compile(template)
    token = _turns.set([0])
    messages = [NotedMessage(message) for message in variables["messages"]]
    try:
        text = compiled.render({**variables, "messages": messages})
    except jinja2.TemplateError as error:
        raise InvalidPrompt(
            f"the chat template refused the messages: {error.message or type(error).__name__}"
        ) from None
    except Exception as error:  # foreign code: an index, a type, a depth of recursion ...
        raise InvalidPrompt(f"the chat template failed on these messages: {type(error).__name__}: {error}") from None
    finally:
        _turns.reset(token)
    check_read(messages)
    return text


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise BadTokenizer(f"the chat template is broken in line {error.lineno}: {error.message}; {_WAY_OUT}") from None
    except RecursionError:
        raise BadTokenizer(f"the chat template is nested too deep; {_WAY_OUT}") from None


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # text of any length for one call
    return environment


_turns: ContextVar[list[int]] = ContextVar("turns of the rendering now going on")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, and bounds on time and memory: each turn of a loop and each call of a macro is counted."""

    intercepted_binops = frozenset(("*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            # an attribute and not a call: calls go through the sandbox, which costs more than the loop itself
            node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("one_more_turn")).set_lineno(node.lineno))  # type: ignore[attr-defined]
        return tree

    @property
    def one_more_turn(self) -> None:
        turns = _turns.get()
        turns[0] += 1
        if turns[0] > _MAX_TURNS:
            raise jinja2.TemplateRuntimeError(f"its loops took more than {_MAX_TURNS:,} turns")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size_of(operator, left, right) > _MAX_REPEATED:
            raise jinja2.TemplateRuntimeError(f"{operator} would make a value of more than {_MAX_REPEATED:,} parts")
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
    """{% generation %} marks what the model wrote, for training; here it is only its body."""

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
    """Plain JSON: a prompt is not a web page, so nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
