"""Writes conversations in the format of a family, as its chat template does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.parsers.envelope import EnvelopeFormat, MistralFormat, NamedFormat
from slipstream.parsers.families import REASONING_FORMATS, TOOL_CALL_FORMATS
from slipstream.parsers.literals import BracedFormat, PythonicFormat
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.parsers.tagged import TaggedFormat

Call = tuple[str, Mapping[str, Any]]


def reasoning_of(tools: str) -> str | None:
    """The name of the reasoning format of a family."""
    return "openai_gptoss" if tools == "openai" else tools if tools in REASONING_FORMATS else "qwen3"


def rendered(tools: str, thought: str, before: str, calls: Sequence[Call], after: str = "") -> str:
    """An output with reasoning, content, calls and more content, any of which may be empty."""
    text = rendered_calls(TOOL_CALL_FORMATS[tools], calls) if calls else ""
    if tools == "openai":
        parts = ["<|channel|>analysis<|message|>" + thought + "<|end|>"] if thought else []
        parts += ["<|channel|>final<|message|>" + before + "<|end|>"] if before else []
        return "<|start|>assistant".join([*parts, *([text] if text else [])])
    if tools == "muse_glimmer":
        parts = [f" to=self<|message|>{thought}"] if thought else []
        parts += [f" to=user<|message|>{each}" for each in (before,) if each]
        parts += [f" to=weather<|message|>{text}"] if text else []
        parts += [f" to=user<|message|>{each}" for each in (after,) if each]
        return "<|eom|><|start|>assistant".join(parts)
    if tools == "inkling":
        parts = [f"<|content_thinking|>{thought}<|end_message|>"] if thought else []
        parts += [f"<|content_text|>{before}<|end_message|>"] if before else []
        parts += [text] if text else []
        parts += [f"<|content_text|>{after}<|end_message|>"] if after else []
        return "<|message_model|>".join(parts)
    format = REASONING_FORMATS[reasoning_of(tools) or ""]
    assert isinstance(format, ReasoningFormat)
    if before and format.answer_begin:
        before = f"{format.answer_begin[0]}{before}{format.answer_end[0]}"
    return (f"{format.begin[0]}\n{thought}\n{format.end[0]}" if thought else "") + before + text + after


def rendered_calls(format: ToolCallFormat, calls: Sequence[Call]) -> str:
    match format:
        case EnvelopeFormat():
            objects = [json.dumps(_object(format, name, arguments)) for name, arguments in calls]
            if format.bare:
                return "; ".join(objects) if not format.only_known else f"[{', '.join(objects)}]"
            if format.end == "</tool_call>" or format.name_key == "name" and format.arguments_key == "args":
                return "".join(f"{format.begin[0]}\n{each}\n{format.end}" for each in objects)
            return f"{format.begin[0]}[{', '.join(objects)}]{format.end}"
        case MistralFormat():
            return "".join(f"{format.begin}{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
        case NamedFormat():
            texts = []
            for index, (name, arguments) in enumerate(calls):
                shown = f"functions.{name}:{index}" if format.name_is_id else name
                kind = f"function{format.before_name}" if format.before_name else ""
                after = f"\n{format.after_arguments}" if format.after_arguments else ""
                body = f"{shown}{format.separator}{json.dumps(arguments)}{after}"
                texts.append(f"{format.begin}{kind}{body}{format.end}")
            return format.section[0] + "".join(texts) + format.section[1]
        case TaggedFormat():
            texts = [_tagged(format, name, arguments) for name, arguments in calls]
            if format.function[0] and not format.bare:
                return f"{format.begin}{''.join(texts)}{format.end}"
            return "".join(f"{format.begin}{text}{format.end}" for text in texts)
        case PythonicFormat():
            texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
            separator = ", " if format.brackets[0] else "\n"
            return f"{format.begin}{format.brackets[0]}{separator.join(texts)}{format.brackets[1]}{format.end}"
        case BracedFormat():
            return "".join(
                f"{format.begin}{format.prefix}{name}{_braced(format, args)}{format.end}" for name, args in calls
            )
        case HarmonyFormat():
            header = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s"
            return "<|call|><|start|>assistant".join(header % (name, json.dumps(args)) for name, args in calls)
    raise AssertionError(format)


def _object(format: EnvelopeFormat, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if not format.name_key:
        return {name: arguments}
    id = {format.id_key: "0"} if format.id_key != "id" else {}
    return {**id, format.name_key: name, format.arguments_key: arguments}


def _tagged(format: TaggedFormat, name: str, arguments: Mapping[str, Any]) -> str:
    line = "\n" if format.trims_lines else ""
    attribute = '" index="1"' if format.type_key and not format.function[1].startswith('"') else ""
    text = format.function[0] + name + attribute + format.function[1]
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        source = value if isinstance(value, str) else json.dumps(value)
        kind = ""
        if format.type_key == "string":
            kind = f' string="{json.dumps(is_text)}"'
        elif format.type_key:
            kind = f' type="{"string" if is_text else "object"}"'
        if format.cdata[0] and any(character in source for character in "<&\n"):
            source = source.join(format.cdata)
        text += f"{format.key[0]}{key}{format.key[1]}{kind}{format.value[0]}{line}{source}{line}{format.value[1]}"
    return text + format.function_end


def _braced(format: BracedFormat, value: object) -> str:
    if isinstance(value, str):
        return f"{format.quote}{value}{format.quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_braced(format, inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_braced(format, inner) for inner in value) + "]"
    return json.dumps(value)
