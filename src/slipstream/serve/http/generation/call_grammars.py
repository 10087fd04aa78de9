"""Grammars in Lark's syntax of calls in the model's own format, for tools that the model may call: of free text with
calls, where a tool is strict, and of calls alone, where the content has a shape (`response_format`).

Arguments of functions with `strict` match their schema; those of other functions are any JSON object. Of strings that
a format writes without JSON's quotes only the type and the choices of `enum` are enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from slipstream.parsers.envelope import EnvelopeFormat, MistralFormat, NamedFormat
from slipstream.parsers.literals import BracedFormat, PythonicFormat
from slipstream.parsers.output_parser import Functions, HarmonyFormat, ReasoningFormat, ToolCallFormat, reference_target
from slipstream.parsers.tagged import TaggedFormat
from slipstream.scheduler.grammar.translate import json_rule
from slipstream.text.tokenizer import Tokenizer

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each function."""
TERMINALS = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{1,8}/\nNAME: /[A-Za-z0-9_.\\-]{1,64}/"


def symbol(tokenizer: Tokenizer, text: str) -> str:
    """A marker in a grammar: a special token in it is no text, so it is written by its id."""
    parts = _special(tokenizer).split(text)
    return " ".join(_token(tokenizer, part) if index % 2 else quoted(part) for index, part in enumerate(parts) if part)


def _token(tokenizer: Tokenizer, text: str) -> str:
    return f"<[{tokenizer.backend.token_to_id(text)}]>"


@lru_cache(maxsize=16)
def _special(tokenizer: Tokenizer) -> re.Pattern[str]:
    texts = [text for token in tokenizer.special_ids if (text := tokenizer.piece(token))]
    return re.compile("(" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")" if texts else "(?!)()")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def calls_grammar(
    format: ToolCallFormat | None,
    tokenizer: Tokenizer,
    schemas: Schemas,
    *,
    alone: bool = False,
    reasoning: ReasoningFormat | HarmonyFormat | None = None,
) -> str | None:
    """The grammar; None for a format or a schema that it cannot describe. `alone`: at least one call, and no text
    beside the calls, but for the reasoning of gpt-oss. `reasoning`: its markers may be within the text."""
    if isinstance(format, HarmonyFormat):
        return harmony_calls(tokenizer, schemas) if alone else harmony_messages(tokenizer, schemas)
    rules: list[str] | None
    begin: tuple[str, ...]
    if isinstance(format, EnvelopeFormat):
        rules, begin = _envelope(format, tokenizer, schemas), format.begin
    elif isinstance(format, MistralFormat):
        rules, begin = _mistral(tokenizer, schemas), (format.begin,)
    elif isinstance(format, NamedFormat):
        rules, begin = _named(format, tokenizer, schemas), (format.section[0],)
    elif isinstance(format, TaggedFormat):
        rules, begin = _tagged(format, tokenizer, schemas), (format.begin or format.function[0],)
    elif isinstance(format, PythonicFormat):
        rules, begin = _pythonic(format, tokenizer, schemas), tuple(filter(None, (format.begin,)))
    elif isinstance(format, BracedFormat):
        rules, begin = _braced(format, tokenizer, schemas), (format.begin,)
    else:
        return None
    if rules is None:
        return None
    marks = [symbol(tokenizer, marker) for marker in begin]
    if isinstance(format, EnvelopeFormat | PythonicFormat) and format.bare:
        opening = f"({' | '.join(marks)})? " if marks else ""
        if alone:
            return "\n".join([f"start: {opening}SPACE? calls", *rules, TERMINALS])
        # an answer that begins with a bracket is a call
        brackets = "\\[" if isinstance(format, PythonicFormat) else "{\\[" if format.only_known else "{"
        other = brackets + " \\n" + "".join(mark[1] for mark in marks if not mark.startswith("<["))
        return "\n".join([f"start: {opening}SPACE? calls | last", f"last: /[^{other}](.|\\n)*/", *rules, TERMINALS])
    if alone:
        return "\n".join(["start: (SPACE? mark calls)+ SPACE?", f"mark: {' | '.join(marks)}", *rules, TERMINALS])
    triggers, names = [], []
    for index, mark in enumerate(marks):
        # free text ends at the first match of a text; what follows in the marker is a rule of its own
        first, _, more = mark.partition(" <[") if not mark.startswith("<[") else (mark, "", "")
        triggers.append(f"trigger{index}{'' if mark.startswith('<[') else '[lazy]'}: TEXT {first}")
        names.append(f"trigger{index} {'<[' + more if more else ''}")
    own = [mark for mark in _asides(tokenizer, reasoning) if mark not in marks]
    free = f"(TEXT ({' | '.join(own)}))* " if own else ""
    start = f"start: ({free}({' | '.join(names)}) calls)* {free}last"
    return "\n".join([start, "last: TEXT", *triggers, *rules, TERMINALS])


def _asides(tokenizer: Tokenizer, reasoning: ReasoningFormat | HarmonyFormat | None) -> list[str]:
    """Markers with special tokens that may be anywhere in the content."""
    if not isinstance(reasoning, ReasoningFormat):
        return []
    repeated = (*reasoning.begin, *reasoning.end) if reasoning.repeats else ()
    markers = dict.fromkeys((*reasoning.answer_begin, *reasoning.answer_end, *reasoning.header, *repeated))
    return [mark for marker in markers if (mark := symbol(tokenizer, marker)).startswith("<[")]


def _objects(schemas: Schemas, format: EnvelopeFormat) -> list[str]:
    return [
        f"call{index}: {json_rule(_object(name, format, schema))}"
        for index, (name, schema) in enumerate(schemas.items())
    ]


_LIST = '"[" SPACE? call (SPACE? "," SPACE? call)* SPACE? "]"'


def _envelope(format: EnvelopeFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    rules = _objects(schemas, format)
    items = f"call | {_LIST}"
    if format.bare:
        items = 'call (SPACE? ";" SPACE? call)*' + (f" | {_LIST}" if format.only_known else "")
    end = f" SPACE? {symbol(tokenizer, format.end)}" if format.end else ""
    return [f"calls: SPACE? ({items})({end})?" if format.bare and end else f"calls: SPACE? ({items}){end}",
            f"call: {_any(len(rules))}", *rules]  # fmt: skip


def _mistral(tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    """Both forms: a list of objects, or a name and its arguments."""
    rules = _objects(schemas, EnvelopeFormat())
    mark = symbol(tokenizer, "[ARGS]")
    named = [
        f"named{index}: {quoted(name)} {mark}? {json_rule(schema)}"
        for index, (name, schema) in enumerate(schemas.items())
    ]
    any_named = " | ".join(f"named{index}" for index in range(len(named)))
    return [f"calls: SPACE? ({_LIST} | {any_named})", f"call: {_any(len(rules))}", *rules, *named]


def _named(format: NamedFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    begin, separator, end = (symbol(tokenizer, text) for text in (format.begin, format.separator, format.end))
    before = f'"function" {symbol(tokenizer, format.before_name)} ' if format.before_name else ""
    after = f" SPACE? {quoted(format.after_arguments)}" if format.after_arguments else ""
    rules = []
    for index, (name, schema) in enumerate(schemas.items()):
        shown = f"{quoted(f'functions.{name}:')} /[0-9]{{1,4}}/" if format.name_is_id else quoted(name)
        rules.append(f"call{index}: {shown} {separator} {json_rule(schema)}{after} {end}")
    section = symbol(tokenizer, format.section[1])
    return [f"calls: (SPACE? {begin} {before}({_any(len(rules))}))+ SPACE? {section}", *rules]


def _tagged(format: TaggedFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    def mark(text: str) -> str:
        return symbol(tokenizer, text)

    between = f"(SPACE? ({' | '.join(map(mark, format.between))}))*" if format.between else ""
    calls = f"({_any(len(schemas))})"
    if format.begin and format.function[0]:  # a section
        calls = f"({between} SPACE? {mark(format.function[0])} {calls})+ {between}"
    end = f" SPACE? {mark(format.end)}" if format.end else ""
    rules = [f"calls: SPACE? {calls}{end}" if format.begin else f"calls: {calls}"]
    functions = Functions(schemas)
    for index, (name, schema) in enumerate(schemas.items()):
        required = schema.get("required") or []
        parts = []
        for number, (key, inner) in enumerate((schema.get("properties") or {}).items()):
            rule = f"value{index}x{number}"
            rules.append(_value(format, tokenizer, rule, inner, functions.types_of(name, key), schema))
            part = f"SPACE? {mark(format.key[0] + key + format.key[1])} {rule}"
            parts.append(part if key in required else f"({part})?")
        if is_open(schema):
            rules.append(_value(format, tokenizer, f"any{index}", {}, frozenset(), schema))
            parts.append(f"(SPACE? {mark(format.key[0])} NAME {mark(format.key[1])} any{index})*")
        attributes = ' "\\"" /[^<>]{0,64}/' if format.type_key and not format.function[1].endswith('">') else ""
        after_name = f"{attributes} {mark(format.function[1])}" if format.function[0] else ""
        tail = f" SPACE? {mark(format.function_end)}" if format.function_end else ""
        rules.append(f"call{index}: {quoted(name)}{after_name} {' '.join(parts)}{tail}")
    return rules


def is_open(schema: Mapping[str, Any]) -> bool:
    """Whether the parameters are any, as no schema names them."""
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _value(
    format: TaggedFormat,
    tokenizer: Tokenizer,
    rule: str,
    schema: Mapping[str, Any],
    types: frozenset[str],
    root: Mapping[str, Any],
) -> str:
    """The rule of a value and its end tag."""
    line = quoted("\n") if format.trims_lines else ""
    begin, end = symbol(tokenizer, format.value[0]), f"{line} {symbol(tokenizer, format.value[1])}".strip()
    choices = _choices(schema, root)
    texts = [quoted(value) for value in choices or () if isinstance(value, str)]
    others = [quoted(json.dumps(value)) for value in choices or () if not isinstance(value, str)]
    rules: list[str] = []
    if choices is None:
        if not types or "string" in types:
            text, *rules = _text(rule, end)
            texts = [text]
        if types != {"string"} and (format.type_key or not texts):
            others = [json_rule(with_definitions(schema, root)) if types else f"{rule}_json"]
            rules += [] if types else [f"{rule}_json: {json_rule({})}"]
    own_end = "" if choices is None and texts else end

    def written(values: list[str], kind: str, closing: str) -> str:
        attribute = f"{quoted(f' {format.type_key}=')} {kind} " if format.type_key else "SPACE? " if begin else ""
        return f"{attribute}{begin} {line} ({' | '.join(values)}) {closing}"

    kinds = (r'/"true"/', r'/"false"/') if format.type_key == "string" else ('/"string"/', r'/"[a-z]{4,7}"/')
    options = [written(texts, kinds[0], own_end)] if texts else []
    options += [written(others, kinds[1], end)] if others else []
    return "\n".join([f"{rule}: {' | '.join(options)}", *rules])


def _choices(schema: object, root: Mapping[str, Any]) -> list[Any] | None:
    """All values that a schema allows, if it lists them."""
    left: list[object] = [schema]
    seen: list[object] = []
    found: list[Any] = []
    while left:
        part = left.pop(0)
        if not isinstance(part, Mapping) or len(seen) > _MAX_PARTS:
            return None
        if any(part is each for each in seen):
            continue
        seen.append(part)
        several = part.get("anyOf") or part.get("oneOf")
        if isinstance(reference := part.get("$ref"), str):
            left.append(reference_target(reference, root))
        elif isinstance(values := part.get("enum", [part["const"]] if "const" in part else None), list):
            found += values
        elif isinstance(several, list):
            left += several
        elif part.get("type") in ("null", "boolean"):
            found += [None] if part["type"] == "null" else [True, False]
        else:
            return None
    return found or None


_MAX_PARTS = 100  # of a schema with choices


def _text(rule: str, end: str) -> tuple[str, str]:
    """A reference to free text up to its end, and the rule of it."""
    if end.startswith("<["):
        return f"{rule}_text", f"{rule}_text: TEXT {end}"
    first, found, more = end.partition(" <[")
    return f"{rule}_text {found}{more}", f"{rule}_text[lazy]: TEXT {first}"


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}}


def _listed(rule: str, parts: Sequence[tuple[str, bool]], separator: str = '","') -> list[str]:
    """The rule of parts in order with separators between them. `parts`: each with whether it is required."""
    rules, first = [], []
    for index, (part, required) in reversed([*enumerate(parts)]):
        rest = f" {rule}x{index + 1}" if index + 1 < len(parts) else ""
        rules.append(f"{rule}x{index}: {separator} {part}{rest}" + ("" if required else f" | {rest or quoted('')}"))
    for index, (part, required) in enumerate(parts):
        first.append(part + (f" {rule}x{index + 1}" if index + 1 < len(parts) else ""))
        if required:
            break
    else:
        first.append(quoted(""))
    return [f"{rule}: {' | '.join(first)}", *rules]


def _pythonic(format: PythonicFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    """Values are JSON, which Python's notation has but for three words."""
    end = f" SPACE? {symbol(tokenizer, format.end)}" if format.end else ""
    calls = '"[" SPACE? call ("," SPACE? call)* SPACE? "]"' if format.brackets[0] else "call (SPACE call)*"
    if format.bare and end:
        end = f"({end})?"
    rules = [f"calls: SPACE? {calls}{end}", f"call: {_any(len(schemas))}"]
    for index, (name, schema) in enumerate(schemas.items()):
        required = schema.get("required") or []
        parts = []
        for number, (key, inner) in enumerate((schema.get("properties") or {}).items()):
            parts.append((f"{quoted(key + '=')} value{index}x{number}", key in required))
            rules.append(f"value{index}x{number}: {json_rule(with_definitions(inner, schema))}")
        rules.append(f"call{index}: {quoted(name + '(')} arguments{index} {quoted(')')}")
        if is_open(schema):
            rules.append(f'arguments{index}: (pair{index} ("," SPACE? pair{index})*)?')
            rules.append(f"pair{index}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ value{index}\nvalue{index}: {json_rule({})}")
        else:
            rules += _listed(f"arguments{index}", parts, '"," SPACE?')
    return rules


# Gemma's notation of JSON: keys without quotes, and strings between markers.


def _braced(format: BracedFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str] | None:
    end = symbol(tokenizer, format.end)
    writer = _Braced(symbol(tokenizer, format.quote))
    calls = []
    for index, (name, schema) in enumerate(schemas.items()):
        body = writer.value({**schema, "type": "object"}, schema)
        calls.append(f"call{index}: {quoted(format.prefix + name)} {body}")
    if not writer.is_complete:
        return None
    return [f"calls: SPACE? ({_any(len(schemas))}) SPACE? {end}", *calls, *writer.rules]


_UNWRITTEN = {"allOf", "not", "if", "patternProperties"}
UNWRITTEN = "allOf, not, if or patternProperties"


class _Braced:
    """Rules of values by their schemas, each once, as a schema may refer to itself."""

    def __init__(self, quote: str) -> None:
        reference, inner = _text("inner", quote)
        self.rules = [f"text: {quote} {reference}", inner, f"any: text | {json_rule(_SCALAR)} | items | members"]
        self.rules += ['items: "[" (any ("," any)*)? "]"', 'members: "{" (member ("," member)*)? "}"']
        self.rules.append('member: NAME ":" any')
        self._quote = quote
        self._names: dict[int, tuple[str, Mapping[str, Any]]] = {}  # by the identity of the schema
        self.is_complete = True  # all keywords are enforced

    def value(self, schema: object, root: Mapping[str, Any]) -> str:
        """The name of the rule of a value."""
        if not isinstance(schema, Mapping) or not schema:
            return "any"
        if id(schema) not in self._names:
            name = f"node{len(self._names)}"
            self._names[id(schema)] = name, schema
            self.rules.append(f"{name}: {self._body(name, schema, root)}")
        return self._names[id(schema)][0]

    def _body(self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        if isinstance(reference := schema.get("$ref"), str):
            return self.value(reference_target(reference, root), root)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list):
            strings = [f"{self._quote} {quoted(each)} {self._quote}" for each in choices if isinstance(each, str)]
            others = [each for each in choices if not isinstance(each, str)]
            return " | ".join([*strings, *([json_rule({"enum": others})] if others else [])])
        for key in ("anyOf", "oneOf"):
            if isinstance(several := schema.get(key), list) and several:
                return " | ".join(self.value(each, root) for each in several)
        kind = schema.get("type")
        self.is_complete &= not schema.keys() & _UNWRITTEN
        if isinstance(kind, list):
            return " | ".join(self.value({**schema, "type": each}, root) for each in kind)
        if kind == "string":
            return "text"
        if kind == "array":
            return self._array(self.value(schema.get("items"), root), schema)
        if kind == "object" and not is_open(schema):
            required = schema.get("required") or []
            properties = (schema.get("properties") or {}).items()
            parts = [(f"{quoted(key + ':')} {self.value(inner, root)}", key in required) for key, inner in properties]
            self.rules += _listed(f"{name}_members", parts)
            return f'"{{" {name}_members "}}"'
        if kind == "object":
            return "members"
        return json_rule(schema) if isinstance(kind, str) else "any"

    def _array(self, item: str, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else max(most - 1, 0)}}}'
        if most == 0:
            return '"[" "]"'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'


_SCALAR = {"type": ["number", "boolean", "null"]}


def _any(count: int) -> str:
    return " | ".join(f"call{index}" for index in range(count))


def _object(name: str, format: EnvelopeFormat, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call. Definitions of the arguments are its own, where references look for them."""
    arguments = dict(schema)
    definitions: dict[str, Any] = {name: arguments.pop(name) for name in ("$defs", "definitions") if name in arguments}
    properties: dict[str, Any] = {name: arguments}
    if format.name_key:
        properties = {format.name_key: {"const": name}, format.arguments_key: arguments}
    if format.id_key != EnvelopeFormat.id_key:  # a format with a key of its own for ids has them in each call
        properties = {format.id_key: {"type": "string", "pattern": "^[0-9]+$"}, **properties}
    shape = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {**shape, **definitions}


# Messages of gpt-oss.


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


def harmony_prefix(tokenizer: Tokenizer) -> str:
    """The grammar of what comes before the content of a final message."""
    return _harmony_analysis(tokenizer) + "\n" + f"start: analysis* {_header(tokenizer, 'final')}"


def _harmony_analysis(tokenizer: Tokenizer) -> str:
    end, start = symbol(tokenizer, "<|end|>"), symbol(tokenizer, "<|start|>")
    lazy = "" if end.startswith("<[") else "[lazy]"
    header = _header(tokenizer, "analysis")
    return "\n".join([f'analysis: {header} thought {start} "assistant"', f"thought{lazy}: TEXT {end}", TERMINALS])


def _header(tokenizer: Tokenizer, text: str, more: str = "") -> str:
    return f"{symbol(tokenizer, '<|channel|>')} {quoted(text)} {more} {symbol(tokenizer, '<|message|>')}"
