"""Translates structural tags to Lark's syntax: a tree of formats, under the names of xgrammar and vLLM.

Free text ends where the end of the innermost tag around it begins, at a trigger, or at a text that it excludes. Special
tokens are not part of free text; fixed texts have them where they have their text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.scheduler.grammar.lark_nodes import (
    EMPTY,
    BadGrammar,
    LarkWriter,
    Node,
    anchored,
    as_lark,
    escaped,
    nested,
)
from slipstream.scheduler.grammar.xml_parameters import (
    FIELDS,
    STYLES,
    XmlParameters,
    check_fields,
    check_number,
    flag_of,
    list_of,
    tag_flags,
    text_of,
    texts_of,
)

MAX_FORMATS = 2048
MAX_REPEATS = 1024
_MAX_CHARS = 2**16
_SPACES = r"[\x20\x0A\x0D\x09]"
_TOKEN_FORMATS = {
    "exclude_token": "regex",
    "any_tokens": "any_text",
    "token_triggered_tags": "triggered_tags",
    "token_dispatch": "dispatch",
}
JsonRule = Callable[[dict[str, Any], str | None], str]
"""Makes the body of a rule of a JSON schema, with a pattern for whitespace."""


def tag_grammar(tag: Mapping[str, Any], special_tokens: Mapping[str, int], json_rule: JsonRule) -> str:
    """A grammar in Lark's syntax. `special_tokens`: ids by text."""
    if tag.get("type", "structural_tag") != "structural_tag":
        raise BadGrammar(f"type of a structural tag is {tag['type']!r:.100}; give structural_tag, or leave it out")
    formats = _Formats(special_tokens, json_rule)
    if "format" in tag:
        check_fields("a structural tag", tag, {"type", "format"})
        root = tag["format"]
    else:
        check_fields("a structural tag", tag, {"type", "structures", "triggers"})
        root = _of_structures(tag)
    return formats.writer.grammar(formats.node(root, ()))


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older form as a format."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not structures:
        raise BadGrammar(
            "a structural tag has format, or structures, a list of objects with begin, schema and end, and triggers"
        )
    tags = []
    for each in structures:
        if not isinstance(each, dict):
            raise BadGrammar("a structure is an object with begin, schema and end")
        check_fields("a structure", each, {"begin", "schema", "end"})
        content = {"type": "json_schema", "json_schema": each.get("schema", {"type": "object"})}
        tags.append({"type": "tag", "begin": each.get("begin"), "content": content, "end": each.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Formats:
    """Makes nodes of formats. `ends`: the texts that end the innermost tag."""

    def __init__(self, special_tokens: Mapping[str, int], json_rule: JsonRule) -> None:
        self.writer = LarkWriter()
        self._special_tokens = special_tokens
        self._json_rule = json_rule
        texts = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._num_formats = 0
        self._makers: dict[str, Callable[[Mapping[str, Any], Sequence[str]], Node]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_xml_parameter,
            "any_text": self._any_text,
            "grammar": self._grammar,
            "regex": self._regex,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "plus": self._plus,
            "star": self._star,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
            "token": self._token,
        }

    def node(self, given: object, ends: Sequence[str], kind: str | None = None) -> Node:
        """`kind`: the type of a format that does not name it."""
        if not isinstance(given, dict):
            raise BadGrammar(f"a format of a structural tag is {given!r:.100}; give an object with type")
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise BadGrammar(f"a structural tag has more than {MAX_FORMATS} formats, the limit")
        if kind is None and {"begin", "content", "end"} <= given.keys():
            kind = "tag"
        kind = given.get("type", kind)
        if not isinstance(kind, str) or kind not in self._makers:
            if isinstance(kind, str) and kind in _TOKEN_FORMATS:
                raise BadGrammar(
                    f"the format {kind} is not supported; use {_TOKEN_FORMATS[kind]}, and write special tokens as text"
                )
            known = ", ".join(self._makers)
            raise BadGrammar(f"type of a format of a structural tag is {kind!r:.100}; give one of {known}")
        check_fields(f"the format {kind}", given, {"type", *FIELDS[kind]})
        return self._makers[kind](given, ends)

    # Texts

    def fixed(self, text: str) -> Node:
        """A fixed text, in which special tokens are tokens."""
        nodes: list[Node] = []
        start = 0
        for found in self._special.finditer(text) if self._special is not None else ():
            nodes += [self.writer.const(text[start : found.start()]), self.writer.token(self._special_tokens[found[0]])]
            start = found.end()
        return self.writer.sequence([*nodes, self.writer.const(text[start:])])

    def _const_string(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.fixed(text_of(given, "value", "const_string"))

    def _any_text(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        if given.get("max_tokens") is not None:
            raise BadGrammar("max_tokens of any_text is not supported; use max_chars")
        most = given.get("max_chars")
        if most is not None:
            most = check_number(most, "max_chars of any_text", 0, _MAX_CHARS)
        return self.writer.free_text([*ends, *texts_of(given, "excludes", "any_text", [])], most=most)

    def _regex(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        _, pattern, _ = anchored(text_of(given, "pattern", "regex"))  # the whole text matches
        return self.writer.pattern(escaped(pattern)) if pattern else EMPTY

    def _grammar(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.writer.rule(nested(as_lark(text_of(given, "grammar", "grammar"))))

    def _json_schema(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        style = given.get("style", "json")
        if not isinstance(style, str) or style not in ("json", *STYLES):
            raise BadGrammar(f"style of json_schema is {style!r:.100}; give json or one of {', '.join(STYLES)}")
        for name in ("any_order", "excludes"):
            if given.get(name):
                raise BadGrammar(f"{name} of json_schema is not supported; remove it")
        most = given.get("max_whitespace_cnt")
        space = None
        if most is not None:
            space = f"{_SPACES}{{1,{check_number(most, 'max_whitespace_cnt of json_schema', 1, 64)}}}"
        return self._schema(given, style, space)

    def _qwen_xml_parameter(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self._schema(given, "qwen_xml", None)

    def _schema(self, given: Mapping[str, Any], style: str, space: str | None) -> Node:
        schema = given.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise BadGrammar(f"json_schema of a format is {schema!r:.100}; give a schema that JSON can match")

        def of_json(schema: dict[str, Any]) -> Node:
            return self.writer.rule(self._json_rule(schema, space))

        return of_json(schema) if style == "json" else XmlParameters(style, self, of_json).node(schema)

    def _token(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        token = given.get("token")
        if isinstance(token, str):
            if token not in self._special_tokens:
                raise BadGrammar(f"token is {token!r:.100}, which is no special token; use const_string")
            token = self._special_tokens[token]
        if token not in self._special_tokens.values():
            raise BadGrammar(f"token is {token!r:.100}, which is no special token; use const_string with its text")
        return self.writer.token(check_number(token, "token", 0, 2**31))

    # Compositions

    def _sequence(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.writer.sequence([self.node(each, ends) for each in list_of(given, "elements", "sequence")])

    def _or(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.writer.choice([self.node(each, ends) for each in list_of(given, "elements", "or")])

    def _optional(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.writer.repeat(self.node(given.get("content"), ends), 0, 1)

    def _plus(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.writer.repeat(self.node(given.get("content"), ends), 1, None)

    def _star(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.writer.repeat(self.node(given.get("content"), ends), 0, None)

    def _repeat(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        least = check_number(given.get("min"), "min of repeat", 0, MAX_REPEATS)
        most = None if given.get("max") == -1 else check_number(given.get("max"), "max of repeat", least, MAX_REPEATS)
        return self.writer.repeat(self.node(given.get("content"), ends), least, most)

    # Tags

    def _tag(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        return self.writer.join(self._marker(given, "begin"), self._rest_of_tag(given))

    def _rest_of_tag(self, given: Mapping[str, Any]) -> Node:
        """Content and end of a tag."""
        end = given.get("end")
        if isinstance(end, dict):
            own: list[str] = []
            node = self._marker(given, "end")
        else:
            own = [end] if isinstance(end, str) else texts_of(given, "end", "a tag")
            if not own:
                raise BadGrammar("end of a tag is an empty list; give a string, or several")
            node = self.writer.choice([self.fixed(text) for text in own])
        content = self.node(given.get("content"), own)
        return self.writer.join(content if "" in own else self.writer.closed(content), node)

    def _marker(self, given: Mapping[str, Any], name: str) -> Node:
        value = given.get(name)
        if isinstance(value, dict):
            return self.node(value, (), "token")
        return self.fixed(text_of(given, name, "a tag"))

    def _tags(self, given: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
        tags = list_of(given, "tags", kind)
        for each in tags:
            if not isinstance(each, dict) or each.get("type", "tag") != "tag":
                raise BadGrammar(f"tags of {kind} is a list of formats with type tag")
            check_fields("the format tag", each, {"type", *FIELDS["tag"]})
            self._num_formats += 1
        return tags

    def _tags_with_separator(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        writer = self.writer
        at_least_one, stop_after_first = tag_flags(given, "tags_with_separator")
        one = writer.choice([self._tag(each, ends) for each in self._tags(given, "tags_with_separator")])
        if not stop_after_first:
            more = writer.join(self.fixed(text_of(given, "separator", "tags_with_separator")), one)
            one = writer.join(one, writer.repeat(more, 0, None))
        return one if at_least_one else writer.repeat(one, 0, 1)

    def _triggered_tags(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        kind = "triggered_tags"
        tags, triggers = self._tags(given, kind), texts_of(given, "triggers", kind)
        if not triggers or not all(triggers):
            raise BadGrammar("triggers of triggered_tags is a list of at least one string, none of them empty")
        at_least_one, stop_after_first = tag_flags(given, kind)
        sizes, known = sorted(set(map(len, triggers))), set(triggers)

        def first_trigger(text: str) -> str | None:
            return next((text[:size] for size in sizes if text[:size] in known), None)

        rules: dict[str, list[Node]] = {}  # what follows each trigger
        for each in tags:
            begin = text_of(each, "begin", "a tag of triggered_tags")
            trigger = first_trigger(begin)
            if trigger is None:
                raise BadGrammar(f"no trigger begins the tag that starts with {begin!r:.100}")
            after = self.writer.join(self.fixed(begin[len(trigger) :]), self._rest_of_tag(each))
            rules.setdefault(trigger, []).append(after)
        for text in triggers:
            if first_trigger(text) not in rules:
                raise BadGrammar(f"no tag starts with the trigger {text!r:.100}; remove it")
        return self._dispatching(
            [(trigger, self.writer.choice(nodes)) for trigger, nodes in rules.items()],
            [*ends, *texts_of(given, "excludes", kind, [])],
            at_least_one=at_least_one,
            is_loop=not stop_after_first,
        )

    def _dispatch(self, given: Mapping[str, Any], ends: Sequence[str]) -> Node:
        rules = []
        for each in list_of(given, "rules", "dispatch"):
            if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or not each[0]:
                raise BadGrammar("rules of dispatch is a list of pairs of a text that is not empty and a format")
            rules.append((each[0], self.node(each[1], ends)))
        excluded = [*ends, *texts_of(given, "excludes", "dispatch", [])]
        is_loop = flag_of(given, "loop", "dispatch", default=True)
        return self._dispatching(rules, excluded, at_least_one=False, is_loop=is_loop)

    def _dispatching(
        self, rules: Sequence[tuple[str, Node]], excluded: Sequence[str], *, at_least_one: bool, is_loop: bool
    ) -> Node:
        """Free text in which each trigger begins what follows it."""
        writer = self.writer
        text = self.writer.free_text([*(trigger for trigger, _ in rules), *excluded])
        before = writer.closed(text)
        first = writer.choice([writer.join(self.fixed(trigger), node) for trigger, node in rules])
        one = writer.choice([writer.join(writer.join(before, self.fixed(trigger)), node) for trigger, node in rules])
        if not is_loop:
            return first if at_least_one else writer.choice([text, one])
        many = writer.join(writer.repeat(one, 0, None), text)
        return writer.join(first, many) if at_least_one else many
