"""ChatConversation: a chat request in the form that the routes of all chat APIs convert their requests to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.families import tool_call_format
from slipstream.serve.http.chat.formats import GENERIC, ChatFormats
from slipstream.serve.http.chat.tools import Tools
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.messages import prompt_chars
from slipstream.text.chat_template import reads_variable


class ChatConversation(msgspec.Struct, kw_only=True):
    """Messages and tools are in the format of OpenAI's chat API, checked (`text_messages`, `Tools.check`)."""

    model: ServedModel
    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    max_tokens: int | None = None  # of the request, if it has one: a prompt that leaves less room is refused
    max_context: int | None = None  # limit of prompt and answer together, below the model's (Ollama's num_ctx)
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
