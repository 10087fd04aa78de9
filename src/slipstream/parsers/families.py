"""The formats of reasoning and tool calls by name, with vLLM's names, and the choice of one by a chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from slipstream.base.errors import InvalidOption
from slipstream.parsers.envelope import EnvelopeFormat, MistralFormat, NamedFormat
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.parsers.tagged import PythonicFormat, TaggedFormat

T = TypeVar("T")
NO_PARSER = "none"  # the name that turns a parser off

_HERMES = EnvelopeFormat(("<tool_call>",), "</tool_call>")
_QWEN3_CODER = TaggedFormat(
    "<tool_call>", "</tool_call>", ("<function=", ">"), "</function>", ("<parameter=", ">"), ("", "</parameter>"), True
)
_GLM = TaggedFormat(
    "<tool_call>", "</tool_call>", ("", "\n"), "", ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), False
)
_SEED = dataclasses.replace(_QWEN3_CODER, begin="<seed:tool_call>", end="</seed:tool_call>")
_TOOL_CALLS = EnvelopeFormat(("<tool_calls>",), "</tool_calls>")
_LLAMA_JSON = EnvelopeFormat(("<|python_tag|>",), bare=True)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_V3 = NamedFormat(
    _DEEPSEEK_SECTION, _DEEPSEEK_CALL, "\n```json\n", _DEEPSEEK_END, "<｜tool▁sep｜>", after_arguments="```"
)
_DEEPSEEK_V31 = NamedFormat(_DEEPSEEK_SECTION, _DEEPSEEK_CALL, "<｜tool▁sep｜>", _DEEPSEEK_END)
_KIMI = NamedFormat(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    name_is_id=True,
)

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    "hermes": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "pythonic": PythonicFormat(),
    "llama4_pythonic": PythonicFormat("<|python_start|>", "<|python_end|>"),
    "mistral": MistralFormat(),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "glm45": _GLM,
    "glm47": _GLM,
    "openai": HarmonyFormat(),
    "granite": EnvelopeFormat(("<|tool_call|>", "<tool_call>")),
    "phi4_mini_json": EnvelopeFormat(("functools",)),
    "kimi_k2": _KIMI,
    "granite4": _HERMES,
    "granite-20b-fc": EnvelopeFormat(("<function_call>",)),
    "ernie45": _HERMES,
    "internlm": EnvelopeFormat(("<|action_start|><|plugin|>",), "<|action_end|>"),
    "jamba": _TOOL_CALLS,
    "minimax": _TOOL_CALLS,
    "hunyuan_a13b": _TOOL_CALLS,
    "seed_oss": _SEED,
}

_THINK = ReasoningFormat()
REASONING_FORMATS: dict[str, ReasoningFormat | HarmonyFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat(implicit=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": ReasoningFormat(stops=(_KIMI.section[0],)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "openai_gptoss": HarmonyFormat(),
    "ernie45": _THINK,
    "hunyuan_a13b": _THINK,
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
}

# the first entry whose texts are all in the template
_TOOLS_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "functions."), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<arg_key>",), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|start_of_role|>", "<|tool_call|>"), "granite"),
    (("<|start_of_role|>", "<tool_call>["), "granite"),
    (("functools",), "phi4_mini_json"),
    (("<tool_calls>",), "jamba"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<function_call>",), "granite-20b-fc"),
    (("<tool_call>",), "hermes"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
    (('{"name": function name, "parameters"',), "llama3_json"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("func_name1(params_name1=",), "pythonic"),
)
_REASONING_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("</seed:think>",), "seed_oss"),
    (("Here is my thought process:",), "granite"),
    (("Here's my thought process:",), "granite"),
    (("<|tool_calls_section_begin|>", "</think>"), "kimi_k2"),
    (("</think>",), "qwen3"),
)


def tool_call_format(name: str) -> ToolCallFormat:
    return _named(name, TOOL_CALL_FORMATS, "tool_call_parser")


def reasoning_format(name: str) -> ReasoningFormat | HarmonyFormat:
    return _named(name, REASONING_FORMATS, "reasoning_parser")


def reasoning_of(template: str | None, name: str | None) -> ReasoningFormat | HarmonyFormat | None:
    """The format of this name, or without one that of the template. None: the model does not reason, or it is not
    known how."""
    name = detect_reasoning(template) if name is None else name
    return None if name in (None, NO_PARSER) else reasoning_format(name)


def check_parsers(reasoning: str | None, tools: str | None) -> None:
    """Raises for a name that is not known. None: by the template."""
    if reasoning not in (None, NO_PARSER):
        reasoning_format(reasoning)
    if tools not in (None, NO_PARSER):
        tool_call_format(tools)


def detect_tools(template: str | None) -> str | None:
    """The name of the format of tool calls that a template uses for the history; None if it is unknown."""
    return _detect(template, _TOOLS_BY_TEXT)


def detect_reasoning(template: str | None) -> str | None:
    return _detect(template, _REASONING_BY_TEXT)


def _detect(template: str | None, table: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    if template is None:
        return None
    return next((name for texts, name in table if all(text in template for text in texts)), None)


def _named(name: str, table: Mapping[str, T], option: str) -> T:
    if name not in table:
        raise InvalidOption(f"{option} is {name!r}; give one of {', '.join(table)}, or {NO_PARSER}")
    return table[name]
