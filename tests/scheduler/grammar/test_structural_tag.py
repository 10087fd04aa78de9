"""Structural tags: the texts that each format accepts, by llguidance over single bytes, and what is refused by name."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher

from slipstream.base.errors import InvalidParams
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.grammar.lark_nodes import BadGrammar
from slipstream.scheduler.grammar.native_matcher import grammar_vocabulary
from slipstream.scheduler.grammar.translate import translate

SPECIAL = {"<|call|>": 256, "[END]": 257, "<eos>": 258}


class ByteTokenizer:
    """A token for each byte, and special tokens."""

    vocab_size = 259
    special_ids = frozenset(SPECIAL.values())

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.piece(token).encode()

    def piece(self, token: int) -> str:
        return next(text for text, own in SPECIAL.items() if own == token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


TOKENIZER: Any = ByteTokenizer()
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.vocab_size)


def tokens(text: str) -> list[int]:
    """Special tokens are written as {name}."""
    parts = text.replace("}", "{").split("{")
    return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]


def matcher_of(tag: object) -> LLMatcher:
    shape = StructuredOutputsParams(structural_tag=tag)  # type: ignore[arg-type]
    matcher = LLMatcher(VOCABULARY, translate(shape, SPECIAL), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: LLMatcher, ids: Sequence[int]) -> bool:
    own = matcher.deep_copy()
    return own.try_consume_tokens(list(ids)) == len(ids) and own.is_accepting()


def check(form: object, good: Sequence[str], bad: Sequence[str]) -> None:
    matcher = matcher_of({"type": "structural_tag", "format": form})
    assert [text for text in good if not accepts(matcher, list(text.encode()))] == []
    assert [text for text in bad if accepts(matcher, list(text.encode()))] == []


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def schema(of: object, **options: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": of, **options}


def sequence(*elements: object) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: object) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(begin: object, content: object, end: object) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: object, **options: object) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f"], "tags": list(tags), **options}


def separated(*tags: object, **options: object) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": list(tags), "separator": ",", **options}


TEXT: dict[str, Any] = {"type": "any_text"}
NUMBER = schema({"type": "integer"})
CALL = tag("<f>", NUMBER, "</f>")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
FORMATS: list[tuple[str, object, Sequence[str], Sequence[str]]] = [
    ("const_string", const('a"\n\\b/é'), ['a"\n\\b/é'], ["", "a", "x"]),
    ("an empty const_string", const(""), [""], ["a"]),
    ("json_schema", schema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}), ['{"a": 1}'],
     ["{}", '{"a": 2}', 'x{"a": 1}']),
    ("any JSON", schema(True), ["1", '{"a": []}'], ["", "x"]),
    ("whitespace of JSON", schema({"type": "array"}, max_whitespace_cnt=1), ["[ ]", "[]"], ["[  ]"]),
    ("any_text", TEXT, ["", "a\nb</f>é"], []),
    ("any_text without some", {"type": "any_text", "excludes": ["<a>", "b"]}, ["", "a<a"], ["x<a>y", "ab"]),
    ("any_text of a length", {"type": "any_text", "max_chars": 2}, ["", "éé"], ["abc"]),
    ("grammar", {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["", "(x"]),
    ("regex", {"type": "regex", "pattern": "[a-c]+/x"}, ["ab/x"], ["a", "d/x"]),
    ("regex with anchors", {"type": "regex", "pattern": r"^a\$$"}, ["a$"], ["a", "^a$"]),
    ("sequence", sequence(const("a"), NUMBER, const("b")), ["a12b"], ["a1", "1b", "ab"]),
    ("alternatives that begin alike", sequence(either(const("a"), const("ab")), const("bc")), ["abc", "abbc"], ["ab"]),
    ("or", either(const("yes"), NUMBER), ["yes", "12"], ["", "yes12", "no"]),
    ("optional", sequence({"type": "optional", "content": NUMBER}, const("x")), ["x", "1x"], ["", "1", "xx"]),
    ("star", {"type": "star", "content": const("ab")}, ["", "abab"], ["a"]),
    ("plus", {"type": "plus", "content": tag("<f>", NUMBER, "</f>")}, ["<f>1</f><f>2</f>"], [""]),
    ("repeat", {"type": "repeat", "min": 1, "max": 2, "content": const("x")}, ["x", "xx"], ["", "xxx"]),
    ("repeat at least", {"type": "repeat", "min": 2, "max": -1, "content": CALL}, ["<f>1</f><f>2</f>"], ["<f>1</f>"]),
    ("tag", CALL, ["<f>12</f>"], ["12", "<f>x</f>", "<f>1", "<f>1</f>x"]),
    ("a tag with text", tag("<a>", TEXT, "</a>"), ["<a></a>", "<a>x</a</a>"], ["<a>x</a>y</a>", "<a>x", "x</a>"]),
    ("a tag without begin", tag("", TEXT, "</a>"), ["</a>", "x</a>"], ["x"]),
    ("a tag with several ends", tag("<a>", TEXT, ["</a>", "</b>"]), ["<a>x</a>", "<a>x</b>"], ["<a>x</b></a>"]),
    ("a tag without type", {"begin": "<a>", "content": NUMBER, "end": "</a>"}, ["<a>1</a>"], ["<a></a>"]),
    ("text or JSON in a tag", tag("<a>", either(TEXT, NUMBER), "</a>"), ["<a>1</a>", "<a>x</a>"], ["<a>x</a></a>"]),
    ("JSON and text in a tag", tag("<a>", sequence(NUMBER, TEXT), "</a>"), ["<a>1</a>", "<a>1x</a>"], ["<a>x</a>"]),
    ("a tag in a tag", tag("<a>", tag("<b>", TEXT, "</b>"), "</a>"), ["<a><b>x</a></b></a>"], ["<a>x</a>"]),
    ("repeated text in a tag", tag("<a>", {"type": "star", "content": sequence(CALL, TEXT)}, "</a>"),
     ["<a></a>", "<a><f>1</f>x</a>", "<a><f>1</f><f>2</f></a>"], ["<a>x</a>", "<a><f>1</f></a></a>"]),
    ("triggered_tags", triggered(CALL, tag("<fx>", TEXT, "</f>")),
     ["", "abc", "a<f>1</f>", "a<f>1</f>b<fx>c</f>d", "a<"], ["a<f>", "<fy", "a<f>x</f>", "<f>1</f><f"]),
    ("at_least_one", triggered(CALL, at_least_one=True), ["<f>1</f>", "<f>1</f>a<f>2</f>"], ["", "a", "a<f>1</f>"]),
    ("stop_after_first", triggered(CALL, stop_after_first=True), ["", "a", "a<f>1</f>"], ["<f>1</f>a"]),
    ("exactly one", triggered(CALL, at_least_one=True, stop_after_first=True), ["<f>1</f>"], ["", "<f>1</f>a"]),
    ("triggered_tags without some", triggered(CALL, excludes=["b"]), ["a<f>1</f>c"], ["b", "<f>1</f>b"]),
    ("triggered_tags in a tag", tag("<a>", triggered(CALL), "</a>"),
     ["<a></a>", "<a>x<f>1</f>y</a>"], ["<a>x</a></a>", "<a><fx</a>", "<a><f>1</f>"]),
    ("triggered_tags and an end", sequence(triggered(CALL), const("END")), ["END", "a<f>1</f>bEND"], ["a<f>1</f>"]),
    ("tags_with_separator", separated(CALL, tag("<g>", TEXT, "</g>")), ["", "<f>1</f>", "<f>1</f>,<g>x</g>"],
     ["<f>1</f>,", "<f>1</f><f>1</f>", "x"]),
    ("at least one with separator", separated(CALL, at_least_one=True), ["<f>1</f>,<f>2</f>"], [""]),
    ("one with separator", separated(CALL, stop_after_first=True), ["", "<f>1</f>"], ["<f>1</f>,<f>2</f>"]),
    ("no separator", separated(CALL, separator=""), ["<f>1</f><f>2</f>"], ["<f>1</f>,<f>2</f>"]),
    ("dispatch", {"type": "dispatch", "rules": [["<f>", NUMBER], ["<g>", const("x")]], "excludes": ["!"]},
     ["", "a<f>1b<g>xc"], ["<f>a", "<g>y", "!"]),
    ("dispatch once", {"type": "dispatch", "rules": [["<f>", CALL]], "loop": False}, ["a", "a<f><f>1</f>"],
     ["<f><f>1</f>a"]),
    ("text up to JSON", sequence(TEXT, const("json:"), NUMBER), ["json:1", "a json:1"], ["json:a json:1", "a"]),
    ("qwen_xml_parameter", {"type": "qwen_xml_parameter", "json_schema": PERSON},
     ["<parameter=name>a<b</parameter>", "\n<parameter=name>\nx\n</parameter>\n<parameter=age>\n1\n</parameter>\n"],
     ["", "<parameter=age>1</parameter>", "<parameter=name>x</parameter><parameter=age>x</parameter>",
      "<parameter=name>x</parameter><parameter=other>x</parameter>"]),
    ("any parameters", {"type": "qwen_xml_parameter", "json_schema": {"type": "object"}},
     ["", "<parameter=a>b</parameter><parameter=c>d</parameter>"], ["<parameter=>b</parameter>"]),
    ("more parameters", schema({**PERSON, "additionalProperties": {"type": "integer"}}, style="qwen_xml"),
     ["<parameter=name>x</parameter><parameter=a>1</parameter>"],
     ["<parameter=name>x</parameter><parameter=a>b</parameter>"]),
    ("minimax_xml", schema(PERSON, style="minimax_xml"),
     ['<parameter name="name">x</parameter> <parameter name="age">1</parameter>'], ["<parameter=name>x</parameter>"]),
    ("deepseek_xml", schema(PERSON, style="deepseek_xml"),
     ['<｜DSML｜parameter name="name" string="true">x</｜DSML｜parameter>'
      '<｜DSML｜parameter name="age" string="false">1</｜DSML｜parameter>'],
     ['<｜DSML｜parameter name="name" string="false">x</｜DSML｜parameter>']),
    ("deepseek_v4_1_xml", schema(PERSON, style="deepseek_v4_1_xml"),
     ['<｜DSML｜ parameter name="name" string="true">x</｜DSML｜ parameter>'],
     ['<｜DSML｜parameter name="name" string="true">x</｜DSML｜parameter>']),
    ("glm_xml", schema(PERSON, style="glm_xml"),
     ["<arg_key>name</arg_key>\n<arg_value>x</arg_value>", "<arg_key>name</arg_key><arg_value>x</arg_value>"],
     ["<arg_key>age</arg_key><arg_value>1</arg_value>"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), [each[1:] for each in FORMATS], ids=[each[0] for each in FORMATS])
def test_each_format_accepts_its_texts_and_no_others(form, good, bad):
    check(form, good, bad)


@pytest.mark.parametrize(
    ("of", "good", "bad"),
    [
        ({"type": "string", "enum": ["a", "b"]}, "b", '"b"'),
        ({"enum": [1, "x", None]}, "null", "2"),
        ({"const": "x"}, "x", "y"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "abc", "abcd"),
        ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
        ({"type": "string", "pattern": "b"}, "abc", "ac"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "text"),
        ({"type": ["string", "integer"]}, "text", None),
        ({"type": "array", "items": {"type": "string"}}, '["a"]', "a"),
        ({"$ref": "#/$defs/flag"}, "true", "x"),
        ({"type": "object", "properties": {"f": {"$ref": "#/$defs/flag"}}}, '{"f": true}', '{"f": 1}'),
        ({}, "anything", None),
    ],
    ids=str,
)
def test_a_parameter_is_text_where_its_schema_allows_a_string(of, good, bad):
    own = {"properties": {"p": of}, "required": ["p"], "$defs": {"flag": {"type": "boolean"}}}
    whole = [f"<parameter=p>{value}</parameter>" for value in (good, bad) if value is not None]
    check({"type": "qwen_xml_parameter", "json_schema": own}, whole[:1], whole[1:])


def test_forms_of_vllm_and_xgrammar():
    """The tags of vLLM's test of structural tags, of its harmony parser, and of xgrammar's pages."""
    hello = {"begin": "hello_flag", "content": TEXT, "end": "hello"}
    form = {"type": "triggered_tags", "tags": [hello], "triggers": ["hello"], "stop_after_first": False}
    check(form, ["", "hell", "a hello_flag b hello c"], ["hello", "hello_flag", "hello_flaghellobhello"])
    think = tag("<think>", TEXT, "</think>")
    first, second = (tag(f"<function=func{i}>", schema(PERSON), "</function>") for i in (1, 2))
    calls = {"type": "triggered_tags", "triggers": ["<function="], "tags": [first, second]}
    one = '<function=func1>{"name": "x"}</function>'
    check(
        sequence(think, calls),
        ["<think>hm <function= </think>", f"<think></think>ok {one} {one}"],
        [one, f"<think>{one}", "<think></think><function=func3>", "<think></think><function=func1>{}</function>"],
    )
    weather = schema({"type": "object", "properties": {"city": {"type": "string"}}}, style="deepseek_xml")
    invoke = tag('<｜DSML｜invoke name="weather">\n', weather, "</｜DSML｜invoke>\n")
    inner = {"type": "tags_with_separator", "tags": [invoke], "separator": "\n", "at_least_one": True}
    calls = {
        "type": "triggered_tags",
        "triggers": ["<｜DSML｜calls>"],
        "tags": [tag("<｜DSML｜calls>\n", inner, "</｜DSML｜calls>")],
    }
    check(
        sequence(tag("", TEXT, "</think>"), calls),
        [
            "hm</think>fine",
            'hm</think><｜DSML｜calls>\n<｜DSML｜invoke name="weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜calls>",
        ],
        ["hm", "</think><｜DSML｜calls>\n</｜DSML｜calls>"],
    )


def test_special_tokens_in_fixed_texts_are_tokens():
    call = tag("<|call|>f:", NUMBER, "\n[END]")
    matcher = matcher_of({"format": {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [call]}})
    for text in ("", "a", "a{<|call|>}f:1\n{[END]}b"):
        assert accepts(matcher, tokens(text)), text
    assert not accepts(matcher, list(b"<|call|>"))  # the same text by other tokens
    for text in ("{<|call|>}", "{<|call|>}g", "{<|call|>}f:1{[END]}", "{[END]}"):
        assert not accepts(matcher, tokens(text)), text
    matcher = matcher_of({"format": tag({"type": "token", "token": 256}, TEXT, {"type": "token", "token": "[END]"})})
    assert accepts(matcher, tokens("{<|call|>}a{[END]}"))
    assert not accepts(matcher, [*b"<|call|>a", 257]) and not accepts(matcher, tokens("{<|call|>}a"))
    matcher = matcher_of({"format": sequence(TEXT, {"type": "token", "token": "[END]"}, NUMBER)})
    assert accepts(matcher, tokens("a{[END]}1")) and not accepts(matcher, tokens("a{[END]}"))


def test_the_older_form_is_triggered_tags():
    structures = [{"begin": f"<f={name}>", "schema": {"const": name}, "end": "</f>"} for name in ("a", "b")]
    given = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    for each in (given, json.dumps(given), {"structures": structures, "triggers": ["<f=", "<f=a"]}):
        matcher = matcher_of(each)
        for text in ("", "x", 'x<f=a>"a"</f>y<f=b>"b"</f>'):
            assert accepts(matcher, list(text.encode()))
        for text in ("<f=", '<f=a>"b"</f>', "<f=c>"):
            assert not accepts(matcher, list(text.encode()))


REFUSED: list[tuple[object, str]] = [
    ({"type": "tag"}, "type of a structural tag is 'tag'"),
    ({}, "a structural tag has format, or structures"),
    ({"format": TEXT, "max_new_tokens": 5}, "a structural tag has no field 'max_new_tokens'"),
    ({"format": "text"}, "a format of a structural tag is 'text'"),
    ({"format": {"value": "x"}}, "type of a format of a structural tag is None; give one of const_string"),
    ({"format": {"type": "xml"}}, "type of a format of a structural tag is 'xml'"),
    ({"format": {"type": "any_tokens"}}, "the format any_tokens is not supported; use any_text"),
    ({"format": {"type": "token_triggered_tags"}}, "token_triggered_tags is not supported; use triggered_tags"),
    ({"format": {"type": "const_string", "value": 5}}, "value of const_string is 5"),
    ({"format": {"type": "const_string", "value": "x", "extra": 1}}, "the format const_string has no field 'extra'"),
    ({"format": {"type": "token", "token": "word"}}, "'word', which is no special token; use const_string"),
    ({"format": {"type": "token", "token": 5}}, "5, which is no special token"),
    ({"format": schema(False)}, "json_schema of a format is False"),
    ({"format": schema({}, style="cohere_xml")}, "style of json_schema is 'cohere_xml'; give json or one of qwen_xml"),
    ({"format": schema({}, any_order=True)}, "any_order of json_schema is not supported; remove it"),
    ({"format": schema({}, excludes=["a"])}, "excludes of json_schema is not supported"),
    ({"format": {"type": "any_text", "max_tokens": 5}}, "max_tokens of any_text is not supported; use max_chars"),
    ({"format": {"type": "any_text", "max_chars": 10**9}}, "max_chars of any_text is 1000000000"),
    ({"format": {"type": "any_text", "excludes": "a"}}, "excludes of any_text is 'a'; give a list of strings"),
    ({"format": {"type": "grammar", "grammar": 'root ::= ("a"'}}, ""),
    ({"format": sequence()}, "elements of sequence is []"),
    ({"format": {"type": "repeat", "min": 2, "max": 1, "content": TEXT}}, "max of repeat is 1; give a number from 2"),
    ({"format": {"type": "optional"}}, "a format of a structural tag is None"),
    ({"format": tag("<a>", TEXT, [])}, "end of a tag is an empty list"),
    ({"format": tag("<a>", TEXT, None)}, "end of a tag is None"),
    ({"format": triggered(tag("<g>", TEXT, "</g>"))}, "no trigger begins the tag that starts with '<g>'"),
    ({"format": triggered(CALL, triggers=["<f", "<g"])}, "no tag starts with the trigger '<g'; remove it"),
    ({"format": triggered(CALL, triggers=[""])}, "none of them empty"),
    ({"format": triggered(TEXT)}, "tags of triggered_tags is a list of formats with type tag"),
    ({"format": triggered(CALL, at_least_one="yes")}, "at_least_one of triggered_tags is 'yes'"),
    ({"format": {"type": "dispatch", "rules": [["", TEXT]]}}, "a text that is not empty"),
    ({"format": sequence(TEXT, NUMBER)}, "the end of any_text cannot be found"),
    ({"format": {"type": "qwen_xml_parameter", "json_schema": {"type": "string"}}}, "an object with properties"),
    ({"format": {"type": "qwen_xml_parameter", "json_schema": {"required": ["a"]}}}, "required of XML parameters"),
    ({"format": {"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"$ref": "#/properties/a"}}}}},
     "references of a parameter's schema"),
    ({"format": schema({"properties": {"a": {"type": "string", "format": "uri"}}}, style="qwen_xml")},
     "format of a string"),
    ({"structures": [{"begin": "<f>", "schema": {}, "end": "</f>", "x": 1}], "triggers": ["<f>"]},
     "a structure has no field 'x'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def grammars():
    own = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size)
    yield own
    own.close()


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_cannot_be_done_is_refused_by_name(grammars, given, words):
    with pytest.raises(InvalidParams) as caught:
        grammars.compile(StructuredOutputsParams(structural_tag=given)).result()
    assert words in str(caught.value)


def nested(form: Any, times: int, leaf: object) -> object:
    for _ in range(times):
        leaf = form(leaf)
    return leaf


HOSTILE = {
    "formats": sequence(*[const("x")] * 5000),
    "rounds": nested(lambda leaf: {"type": "repeat", "min": 1000, "max": 1024, "content": leaf}, 12, const("a")),
    "free text": nested(lambda leaf: {"type": "star", "content": sequence(NUMBER, either(leaf, CALL))}, 9, TEXT),
    "tags": nested(lambda leaf: tag("<a>", either(leaf, TEXT, sequence(TEXT, const("b"), TEXT)), "</a>"), 10, TEXT),
    "alternatives": either(*[const(f"x{i}") for i in range(2000)]),
    "excludes": {"type": "any_text", "excludes": [f"x{i}" for i in range(20000)]},
    "triggers": {
        "type": "triggered_tags",
        "triggers": [f"<{i:05d}>" for i in range(1000)],
        "tags": [tag(f"<{i:05d}>", TEXT, "</f>") for i in range(1000)],
    },
    "regex": {"type": "regex", "pattern": "(a|b|ab)*" * 1000 + "c{1000}{1000}"},
    "grammar": {"type": "grammar", "grammar": 'root ::= root root | "a" | ""'},
    "parameters": schema({"properties": {f"p{i}": {"type": "string"} for i in range(4000)}}, style="qwen_xml"),
    "lengths": schema(
        {"properties": {f"p{i}": {"type": "string", "maxLength": 65536} for i in range(500)}}, style="qwen_xml"
    ),
}


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
def test_hostile_tags_compile_or_are_refused(grammars, form):
    """Either way it ends: a grammar that takes longer than a second is refused by the checker."""
    try:
        grammars.compile(StructuredOutputsParams(structural_tag={"format": form})).result()
    except InvalidParams as error:
        assert len(str(error)) < 700
    assert grammars.compile(StructuredOutputsParams(structural_tag={"format": const("ok")})).result() is not None


def test_formats_that_grow_when_joined_are_bounded():
    """Every level doubles the joined parts: what follows free text is written into each alternative."""
    wide = sequence(*[either(sequence(CALL, TEXT), sequence(const("b"), TEXT)) for _ in range(20)])
    with pytest.raises(BadGrammar, match="too complex"):
        translate(StructuredOutputsParams(structural_tag={"format": wide}), SPECIAL)


def test_any_values_are_translated_or_refused():
    """Formats in which values are replaced at random: no other exception than those of users' mistakes."""
    rng = random.Random(5)
    values = [None, True, False, -1, 0, 3, 2.5, "", "x", [], ["x"], [1], {}, TEXT, {"type": "tag"}, [TEXT], [[]]]
    num_refused = 0
    for _ in range(3000):
        given = json.loads(json.dumps({"type": "structural_tag", "format": rng.choice(FORMATS)[1]}))
        for _ in range(rng.randint(1, 2)):
            places = list(_places(given))
            holder, key = rng.choice(places)
            holder[key] = copy.deepcopy(rng.choice(values))
        try:
            translate(StructuredOutputsParams(structural_tag=given), SPECIAL)
        except (BadGrammar, InvalidParams):
            num_refused += 1
    assert 1000 < num_refused < 3000


def _places(value: Any) -> Any:
    """Each value inside, as its holder and key."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
