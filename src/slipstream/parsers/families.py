"""The formats of reasoning and tool calls by name, with vLLM's names, and the choice of one by a chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from slipstream.base.errors import InvalidOption
from slipstream.parsers.envelope import EnvelopeFormat, MistralFormat, NamedFormat
from slipstream.parsers.literals import BracedFormat, PythonicFormat
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.parsers.response_template import template_reasoning, template_tools
from slipstream.parsers.tagged import TaggedFormat

T = TypeVar("T")
NO_PARSER = "none"  # the name that turns a parser off

_HERMES = EnvelopeFormat(("<tool_call>",), "</tool_call>")
_QWEN3_CODER = TaggedFormat(
    "<tool_call>",
    "</tool_call>",
    ("<function=", ">"),
    "</function>",
    ("<parameter=", ">"),
    ("", "</parameter>"),
    trims_lines=True,
    bare=True,
)
_GLM = TaggedFormat(
    "<tool_call>", "</tool_call>", ("", "\n"), "", ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
)
_TOOL_CALLS = EnvelopeFormat(("<tool_calls>",), "</tool_calls>")
_LLAMA_JSON = EnvelopeFormat(("<|python_tag|>",), arguments_key="parameters", bare=True)
_COHERE = EnvelopeFormat(
    ("<|START_ACTION|>",),
    "<|END_ACTION|>",
    name_key="tool_name",
    arguments_key="parameters",
    id_key="tool_call_id",
)
_DEEPSEEK_V31 = NamedFormat(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
)
_DEEPSEEK_V3 = dataclasses.replace(
    _DEEPSEEK_V31, separator="\n```json\n", before_name="<｜tool▁sep｜>", after_arguments="```"
)
_KIMI = NamedFormat(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    name_is_id=True,
)
_MINIMAX_M2 = TaggedFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    ('<invoke name="', '">'),
    "</invoke>",
    ('<parameter name="', '">'),
    ("", "</parameter>"),
)


def _prefixed(prefix: str, section: str) -> TaggedFormat:
    """Invocations as MiniMax has them, with a prefix in each tag."""
    return TaggedFormat(
        f"<{prefix}{section}>",
        f"</{prefix}{section}>",
        (f'<{prefix}invoke name="', '">'),
        f"</{prefix}invoke>",
        (f'<{prefix}parameter name="', '">'),
        ("", f"</{prefix}parameter>"),
    )


def _dsml(section: str) -> TaggedFormat:
    own = _prefixed("｜DSML｜", section)
    return dataclasses.replace(own, key=(own.key[0], '"'), value=(">", own.value[1]), type_key="string")


_STEP3 = dataclasses.replace(
    _prefixed("steptml:", ""),
    begin="<｜tool_calls_begin｜>",
    end="<｜tool_calls_end｜>",
    between=("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"),
)
_KIMI_K3 = TaggedFormat(
    "<|open|>tools<|sep|>",
    "<|close|>tools<|sep|>",
    ('<|open|>call tool="', "<|sep|>"),
    "<|close|>call<|sep|>",
    ('<|open|>argument key="', '"'),
    ("<|sep|>", "<|close|>argument<|sep|>"),
    type_key="type",
)
_HY_V3 = TaggedFormat(
    "<tool_calls:opensource>",
    "</tool_calls:opensource>",
    ("<tool_call:opensource>", "<tool_sep:opensource>"),
    "</tool_call:opensource>",
    ("<arg_key:opensource>", "</arg_key:opensource>"),
    ("<arg_value:opensource>", "</arg_value:opensource>"),
)

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    "hermes": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "mimo": _QWEN3_CODER,
    "step3p5": _QWEN3_CODER,
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "pythonic": PythonicFormat(),
    "llama4_pythonic": PythonicFormat("<|python_start|>", "<|python_end|>"),
    "lfm2": PythonicFormat("<|tool_call_start|>", "<|tool_call_end|>", bare=False),
    "olmo3": PythonicFormat("<function_calls>", "</function_calls>", bare=False, brackets=("", "")),
    "mistral": MistralFormat(),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "gemma4": BracedFormat("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": BracedFormat("<start_function_call>", "<end_function_call>", "<escape>"),
    "glm45": _GLM,
    "glm47": _GLM,
    "ling3": _GLM,
    "poolside_v1": _GLM,
    "openai": HarmonyFormat(),
    "granite": EnvelopeFormat(("<|tool_call|>", "<tool_call>")),
    "granite4": _HERMES,
    "granite-20b-fc": EnvelopeFormat(("<function_call>",)),
    "phi4_mini_json": EnvelopeFormat(("functools",)),
    "kimi_k2": _KIMI,
    "kimi_k3": _KIMI_K3,
    "ernie45": _HERMES,
    "longcat": EnvelopeFormat(("<longcat_tool_call>",), "</longcat_tool_call>"),
    "internlm": EnvelopeFormat(("<|action_start|><|plugin|>",), "<|action_end|>"),
    "jamba": _TOOL_CALLS,
    "minimax": _TOOL_CALLS,
    "minimax_m2": _MINIMAX_M2,
    "minicpm5": TaggedFormat(
        "",
        "",
        ('<function name="', '">'),
        "</function>",
        ('<param name="', '">'),
        ("", "</param>"),
        cdata=("<![CDATA[", "]]>"),
    ),
    "dots": dataclasses.replace(_MINIMAX_M2, begin="<dots_function_call>", end="</dots_function_call>"),
    "muse_glimmer": _prefixed("atem:", "function_calls"),
    "step3": _STEP3,
    "hunyuan_a13b": _TOOL_CALLS,
    "hy_v3": _HY_V3,
    "seed_oss": dataclasses.replace(_QWEN3_CODER, begin="<seed:tool_call>", end="</seed:tool_call>"),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "apertus": EnvelopeFormat(("<|tools_prefix|>",), "<|tools_suffix|>", name_key=""),
    "xlam": EnvelopeFormat(("```json",), "```", bare=True, only_known=True),
    "gigachat3": EnvelopeFormat(
        ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>"), drops_cut=True
    ),
    "inkling": EnvelopeFormat(("<|content_invoke_tool_json|>",), "<|end_message|>", arguments_key="args"),
}

_THINK = ReasoningFormat()
# the first words of a call, as no reasoning about tools would have them in a sentence
_THINK_OR_CALL = ReasoningFormat(calls=("<tool_call>\n<function=", '<tool_call>\n{"name"'))
_GLM_THINK = ReasoningFormat(stops=("<tool_call>",))
_COHERE_THINK = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    stops=_COHERE.begin,
    answer_begin=("<|START_RESPONSE|>", "<|START_TEXT|>"),
    answer_end=("<|END_RESPONSE|>", "<|END_TEXT|>"),
)
_INKLING_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_INKLING_TEXT = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
REASONING_FORMATS: dict[str, ReasoningFormat | HarmonyFormat] = {
    "qwen3": _THINK_OR_CALL,
    "mimo": _THINK_OR_CALL,
    "nemotron_v3": _THINK_OR_CALL,
    "deepseek_r1": ReasoningFormat(implicit=True),
    "deepseek_v3": _THINK,
    "deepseek_v4": ReasoningFormat(stops=("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>")),
    "holo2": _THINK,
    "olmo3": _THINK,
    "poolside_v1": _GLM_THINK,
    "step3": ReasoningFormat(implicit=True),
    "step3p5": _THINK_OR_CALL,
    "glm45": _GLM_THINK,
    "glm47": _GLM_THINK,
    "ling3": _GLM_THINK,
    "kimi_k2": ReasoningFormat(stops=(_KIMI.section[0],)),
    "kimi_k3": ReasoningFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        stops=(_KIMI_K3.begin,),
        answer_begin=("<|open|>response<|sep|>",),
        answer_end=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "minimax_m2": ReasoningFormat(implicit=True, stops=(_MINIMAX_M2.begin,)),
    "minimax_m2_append_think": ReasoningFormat(implicit=True, in_content=True),
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), stops=("[TOOL_CALLS]",)),
    "gemma4": ReasoningFormat(("<|channel>thought",), ("<channel|>",), stops=("<|tool_call>",), repeats=True),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "openai_gptoss": HarmonyFormat(),
    "ernie45": ReasoningFormat(answer_begin=("<response>",), answer_end=("</response>",)),
    "hunyuan_a13b": ReasoningFormat(answer_begin=("<answer>",), answer_end=("</answer>",)),
    "hy_v3": ReasoningFormat(("<think:opensource>",), ("</think:opensource>",), stops=(_HY_V3.begin,)),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), stops=("<seed:tool_call>",)),
    "cohere_command3": _COHERE_THINK,
    "cohere_command4": _COHERE_THINK,
    "apertus": ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",), stops=("<|tools_prefix|>",), repeats=True),
    "muse_glimmer": ReasoningFormat(
        ("to=self<|message|>",),
        ("<|eom|>",),
        stops=("<|start|>",),
        repeats=True,
        answer_end=("<|message|>", "<|eom|>", "<|eot|>"),
        header=("<|start|>", "to=self<|message|>", "<|message|>"),
    ),
    "inkling": ReasoningFormat(
        ("<|content_thinking|>",),
        _INKLING_ENDS,
        stops=("<|content_invoke_tool_json|>",),
        repeats=True,
        answer_end=(*_INKLING_TEXT, *_INKLING_ENDS),
        header=("<|message_model|>", "<|content_thinking|>", "<|content_invoke_tool_json|>", *_INKLING_TEXT),
    ),
}

# the first entry whose texts are all in the template
_TOOLS_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "functions."), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("<tool_sep{}>", ":opensource"), "hy_v3"),
    (("<arg_key>",), "glm45"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<|tool_call>call:",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [",), "lfm2"),
    (("<steptml:invoke",), "step3"),
    (("<|tools_prefix|>", "<|tools_suffix|>"), "apertus"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<dots_function_call>",), "dots"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|content_invoke_tool_json|>",), "inkling"),
    (("<|role_sep|>", "<|message_sep|>"), "gigachat3"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("<function_calls>",), "olmo3"),
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
    (("make calls in a single JSON array",), "xlam"),
)
_REASONING_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("<|channel>thought",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("</seed:think>",), "seed_oss"),
    (("</mm:think>",), "minimax_m3"),
    (("</think{}>", ":opensource"), "hy_v3"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|inner_prefix|>",), "apertus"),
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<|content_thinking|>",), "inkling"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("Here is my thought process:",), "granite"),
    (("Here's my thought process:",), "granite"),
    (("<|tool_calls_section_begin|>", "</think>"), "kimi_k2"),
    (("｜DSML｜", "</think>"), "deepseek_v4"),
    (("<minimax:tool_call>", "</think>"), "minimax_m2"),
    (("<arg_key>", "</think>"), "glm45"),
    (("</think>", "</response>"), "ernie45"),
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>",), "qwen3"),
)


def tool_call_format(name: str) -> ToolCallFormat:
    return _named(name, TOOL_CALL_FORMATS, "tool_call_parser")


def reasoning_format(name: str) -> ReasoningFormat | HarmonyFormat:
    return _named(name, REASONING_FORMATS, "reasoning_parser")


def checkpoint_formats(
    settings: Mapping[str, object],
) -> tuple[ReasoningFormat | HarmonyFormat | None, ToolCallFormat | None]:
    """The formats of the response template in tokenizer_config.json, each None where there is none to read."""
    template = settings.get("response_template")
    tools = template_tools(template, TOOL_CALL_FORMATS.values())
    return template_reasoning(template, REASONING_FORMATS.values()), tools


def reasoning_of(
    template: str | None, name: str | None, settings: Mapping[str, object]
) -> ReasoningFormat | HarmonyFormat | None:
    """The format of this name, or without one that of the checkpoint: of its response template, else of the texts of
    its chat template. None: the model does not reason, or it is not known how."""
    if name is None and (own := checkpoint_formats(settings)[0]) is not None:
        return own
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
