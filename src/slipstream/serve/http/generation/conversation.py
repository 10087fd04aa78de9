"""ChatConversation: a chat request in the form that the routes of all chat APIs convert their requests to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.base.typed import doc
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.families import tool_call_format
from slipstream.serve.http.generation.tools import GENERIC, ChatFormats, Tools
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request
from slipstream.text.chat_fields import TextPart, read_content
from slipstream.text.chat_template import known_roles, reads_variable
from slipstream.text.tokenizer import Tokenizer


class ChatConversation(msgspec.Struct, kw_only=True):
    """Messages and tools are in the format of OpenAI's chat API, checked (`read_messages`, `Tools.of`). A content is a
    text or a list of Parts."""

    model: ServedModel
    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    max_tokens: int | None = None  # of the request, if it has one: a prompt that leaves less room is refused
    max_context: int | None = None  # limit of prompt and answer together, below the model's (Ollama's num_ctx)
    truncates: bool = False  # a prompt that is too long loses its oldest messages, then its beginning (Ollama's)
    tools: Tools = Tools()
    include_reasoning: bool = True
    chat_template_kwargs: Mapping[str, Any] = {}
    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False  # besides those of the template
    allow_control_tokens: bool | None = None
    skip_special_tokens: bool | None = None  # default: unless they mark reasoning or tool calls

    @property
    def num_chars(self) -> int:
        """The approximate length of the prompt."""
        return prompt_chars(self.messages, self.tools.listed, self.chat_template_kwargs)

    def without_oldest(self) -> list[Sequence[Mapping[str, Any]]]:
        """The messages without the oldest ones: the system's, and the others from one of the user's on. The longest is
        first."""
        starts = [index for index, message in enumerate(self.messages) if message.get("role") == "user"][1:]
        numbered = list(enumerate(self.messages))
        return [[each for i, each in numbered if i >= start or each.get("role") == "system"] for start in starts]

    def render(self) -> str:
        """Returns the text of the prompt."""
        messages, tools = self.messages, self.tools.shown
        if tools and not self.reads("tools", with_tools=True):
            messages, tools = _described(messages, tools, forced=self.tools.are_forced), []
        generates = self.add_generation_prompt
        return self.model.inputs.render_chat(
            messages,
            tools=tools or None,
            add_generation_prompt=not self.continue_final_message if generates is None else generates,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs or None,
            allow_control_tokens=self.allow_control_tokens,
        )

    def reads(self, variable: str, *, with_tools: bool = False) -> bool:
        """Whether the model's chat template reads a variable."""
        tokenizer = self.model.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template(with_tools=with_tools)
        return template is not None and reads_variable(template, variable)

    def check_tool_choice(self, formats: ChatFormats, *, auto: bool) -> None:
        """Raises if the model would have to decide about tool calls and cannot. `auto`: it may."""
        if not self.tools.shown or self.tools.are_forced:
            return
        hint = "set tool_choice to required or to a function"
        if not auto:
            raise bad_request(f"tool_choice is auto, which this server has disabled; {hint}", "tool_choice")
        if formats.tools is None:
            fact = "tool_choice is auto, and this server has no parser of tool calls (--tool-call-parser none)"
            raise bad_request(f"{fact}; {hint}", "tool_choice")


def _described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, forced: bool
) -> list[Mapping[str, Any]]:
    """For a template without tools: the messages with the tools in the system message. `forced`: a grammar makes the
    call, so the message does not explain its form."""
    generic = tool_call_format(GENERIC)
    assert isinstance(generic, EnvelopeFormat)
    (begin,), end = generic.begin, generic.end
    lines = [
        "You can call these functions, given as JSON:",
        *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
    ]
    if not forced:
        lines.append(f'To call one, write {begin}{{"name": the name, "arguments": an object}}{end}.')
    text = "\n".join(lines)
    first = messages[0] if messages else {}
    content = first.get("content")
    if first.get("role") != "system" or not isinstance(content, str):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{content}\n\n{text}"}, *messages[1:]]


# Reads the messages of a chat request: roles, and contents.

ROLES = ("system", "developer", "user", "assistant", "tool")

AllowControlTokens = Annotated[
    bool | None,
    doc("let the text of messages spell control tokens; default no, unless the server says so"),
]


def read_messages(
    request: Request, messages: Sequence[dict[str, Any]], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Returns the messages with contents as texts or Parts, after checks of roles; rendering the template checks the
    rest."""
    request.set_input_field("messages")
    if not messages:
        raise bad_request("there are no messages; give at least one", "messages")
    request.check_count(len(messages), "messages")
    template = None if tokenizer is None else tokenizer.chat_template()
    found = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or (role not in ROLES and (template is None or role not in known_roles(template))):
            name = f"messages[{index}].role"
            shown = "missing" if role is None else f"{role!r:.100}"
            raise bad_request(f"{name} is {shown}; give one of {', '.join(ROLES)}", name)
        if content is not None and not isinstance(content, str):
            message = {**message, "content": read_content(content, f"messages[{index}].content")}
        found.append(message)
    return found


OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "allow_control_tokens")
"""Request fields that need messages."""


def render_fields(body: Any, *, generates: bool) -> dict[str, Any]:
    """The fields OF_MESSAGES as arguments of `render_messages`. `generates`: add_generation_prompt by default, unless
    the last message is continued."""
    continues, given = bool(body.continue_final_message), body.add_generation_prompt
    own = {"add_generation_prompt": generates and not continues if given is None else given}
    return own | {"continue_final_message": continues} | {name: getattr(body, name) for name in OF_MESSAGES[2:]}


def prompt_chars(*parts: Any) -> int:
    """The approximate length of a prompt: the characters of all text in its messages, tools and template variables,
    which may be unchecked. A number counts as one."""
    total, rest = 0, list(parts)
    while rest:
        part = rest.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, TextPart):
            total += len(part.text)
        elif isinstance(part, Mapping):
            rest += part.keys()
            rest += part.values()
        elif isinstance(part, list | tuple):
            rest += part
        else:
            total += 1
    return total
