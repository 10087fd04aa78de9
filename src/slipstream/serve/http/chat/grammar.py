"""Grammars in Lark's syntax of what comes before a structure: reasoning, and the headers of gpt-oss's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat
from slipstream.scheduler.grammar.translate import json_rule
from slipstream.text.tokenizer import Tokenizer

TERMINALS = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{1,8}/"


def symbol(tokenizer: Tokenizer, text: str) -> str:
    """A marker in a grammar: a special token is no text, so it is written by its id."""
    token = tokenizer.backend.token_to_id(text)
    return f"<[{token}]>" if token is not None and tokenizer.is_special(token) else quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def reasoning_prefix(
    format: ReasoningFormat | HarmonyFormat | None, tokenizer: Tokenizer, prompt: str, *, continues: bool
) -> str | None:
    """The grammar of the reasoning before a structure; None if the model cannot reason there."""
    if format is None:
        return None
    if isinstance(format, HarmonyFormat):
        return _harmony_analysis(tokenizer) + "\n" + f"start: analysis* {_header(tokenizer, 'final')}"
    is_open = format.is_open(prompt, continues=continues)
    if not is_open and prompt.rstrip().endswith(format.end):
        return None  # the template has ended it
    begin = " | ".join(symbol(tokenizer, marker) for marker in format.begin)
    ends = [symbol(tokenizer, marker) for marker in format.end]
    lazy = "" if any(end.startswith("<[") for end in ends) else "[lazy]"
    return "\n".join(
        [
            "start: thought SPACE?" if is_open else f"start: (({begin}) thought SPACE?)?",
            f"thought{lazy}: TEXT ({' | '.join(ends)})",
            TERMINALS,
        ]
    )


def harmony_calls(tokenizer: Tokenizer, schemas: Mapping[str, Any]) -> str:
    """The grammar of an output of gpt-oss that calls one of the functions, after any reasoning."""
    calls, rules = _harmony_rules(tokenizer, schemas)
    return "\n".join([f"start: analysis* ({calls})", *rules, _harmony_analysis(tokenizer)])


def harmony_messages(tokenizer: Tokenizer, schemas: Mapping[str, Any]) -> str:
    """The grammar of any messages of gpt-oss, of which the last may call one of the functions."""
    calls, rules = _harmony_rules(tokenizer, schemas)
    channels = (_header(tokenizer, channel) for channel in ("analysis", "commentary", "final"))
    end, start = symbol(tokenizer, "<|end|>"), symbol(tokenizer, "<|start|>")
    lazy = "" if end.startswith("<[") else "[lazy]"
    return "\n".join(
        [
            f'start: (header thought {start} "assistant")* (header TEXT | {calls})',
            f"header: {' | '.join(channels)}",
            f"thought{lazy}: TEXT {end}",
            *rules,
            TERMINALS,
        ]
    )


def _harmony_rules(tokenizer: Tokenizer, schemas: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The alternatives of calls, and their rules."""
    constrain = symbol(tokenizer, "<|constrain|>") + ' "json"'
    headers = {name: _header(tokenizer, f"commentary to=functions.{name} ", constrain) for name in schemas}
    bodies = [f"{headers[name]} {json_rule(schema)}" for name, schema in schemas.items()]
    rules = [f"call{index}: {body}" for index, body in enumerate(bodies)]
    return " | ".join(f"call{index}" for index in range(len(rules))), rules


def _harmony_analysis(tokenizer: Tokenizer) -> str:
    end, start = symbol(tokenizer, "<|end|>"), symbol(tokenizer, "<|start|>")
    lazy = "" if end.startswith("<[") else "[lazy]"
    header = _header(tokenizer, "analysis")
    return "\n".join([f'analysis: {header} thought {start} "assistant"', f"thought{lazy}: TEXT {end}", TERMINALS])


def _header(tokenizer: Tokenizer, text: str, more: str = "") -> str:
    return f"{symbol(tokenizer, '<|channel|>')} {quoted(text)} {more} {symbol(tokenizer, '<|message|>')}"
