"""StructuredOutputsParams: the shape that the output of one request must have. Checked when built."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.params.values import CheckedNames, is_deep, is_deep_json

MAX_CHARS = 2**18  # of a schema, grammar or structural tag, and of all choices together
MAX_REGEX_CHARS = 2**14
MAX_DEPTH = 64  # nested objects and arrays of a schema
MAX_CHOICES = 4096

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "lenient")


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True, metaclass=CheckedNames):
    """Exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag` is given."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression that the whole output matches: Rust's syntax, without look-around and back-references."""
    choice: Sequence[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar in Lark's or llama.cpp's (GBNF) syntax."""
    json_object: bool | None = None
    """The output is any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Text of several parts, by a format of vLLM and xgrammar: an object with `format`, or its text. The older form has
    structures (begin, schema, end) and triggers."""
    disable_any_whitespace: bool = False
    """JSON has no whitespace between its tokens."""
    disable_additional_properties: bool = False
    """Objects of the schema have no properties besides those that it lists, unless the schema says otherwise."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between JSON tokens; by default up to 64 spaces, tabs and line breaks."""
    lenient: bool = False
    """Schema keywords that are not supported have no effect, instead of an error."""
    prefix: str | None = None
    """A grammar in Lark's syntax of text before the structure, such as reasoning."""
    alternative: str | None = None
    """A grammar in Lark's syntax of another output, such as tool calls: it takes the place of prefix and structure."""
    backend: str | None = None
    """One of vLLM's compilers of grammars. llguidance does the work of each, so that it changes nothing."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:  # a schema that nothing matches
            given.append("json")
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise _invalid(f"exactly one of {', '.join(KINDS)} is needed, and {found}")
        for name in ("disable_any_whitespace", "disable_additional_properties", "lenient"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(f"{name} is {getattr(self, name)!r}; give True or False")
        others = [name for name in _JSON_OPTIONS if getattr(self, name)]
        if others and given[0] not in ("json", "json_object"):
            raise _invalid(f"{', '.join(others)} is for json and json_object only; remove it")
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern, MAX_REGEX_CHARS)
        for name in ("prefix", "alternative"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), MAX_CHARS)
        if self.backend is not None:
            if self.backend not in BACKENDS:
                raise _invalid(f"backend is {self.backend!r}; give one of {', '.join(BACKENDS)}, or leave it out")
            self._freeze("backend", None)  # so that equal structures are compiled once
        self._check_kind(given[0])

    def _check_kind(self, kind: str) -> None:
        value = getattr(self, kind)
        if kind == "json":
            self._freeze("json", _as_json("json", value))
        elif kind == "structural_tag":
            self._freeze("structural_tag", _as_json("structural_tag", value))
        elif kind == "regex":
            _check_text("regex", value, MAX_REGEX_CHARS)
        elif kind == "grammar":
            _check_text("grammar", value, MAX_CHARS)
        elif kind == "choice":
            if isinstance(value, str) or not isinstance(value, Sequence) or not value:
                raise _invalid("choice is a list of at least one string")
            if len(value) > MAX_CHOICES:
                raise _invalid(f"choice has {len(value)} strings, the limit is {MAX_CHOICES}")
            for text in value:
                _check_text("choice", text, MAX_CHARS)
            if sum(map(len, value)) > MAX_CHARS:
                raise _invalid(f"choice has more than {MAX_CHARS} characters in all, the limit")
            self._freeze("choice", tuple(dict.fromkeys(value)))
        elif value is not True:
            raise _invalid(f"json_object is {value!r}; give True, or leave it out")

    def _freeze(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    @property
    def key(self) -> bytes:
        """The same for equal parameters."""
        return msgspec.msgpack.encode(self)


def as_params(given: object) -> StructuredOutputsParams | None:
    """`structured_outputs` of SamplingParams: also a mapping of fields."""
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise _invalid(f"it is {type(given).__name__}; give StructuredOutputsParams or an object")
    known = StructuredOutputsParams.__struct_fields__
    if unknown := sorted(str(name) for name in given if name not in known):
        raise _invalid(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return StructuredOutputsParams(**given)


def _as_json(name: str, value: object) -> str:
    """The text of a JSON object or schema, checked for syntax, size and depth."""
    if is_deep_json(value, MAX_DEPTH) if isinstance(value, str) else is_deep(value, MAX_DEPTH):
        raise _invalid(f"{name} is nested too deeply; the limit is {MAX_DEPTH} levels")
    try:
        if isinstance(value, str):
            text, value = value, json_module.loads(value)
        else:
            text = json_module.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _invalid(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict) and not (name == "json" and isinstance(value, bool)):
        raise _invalid(f"{name} is {type(value).__name__}; give an object")
    _check_text(name, text, MAX_CHARS)
    return text


def _check_text(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or not value:
        raise _invalid(f"{name} is {value!r:.100}; give text that is not empty")
    if len(value) > limit:
        raise _invalid(f"{name} has {len(value)} characters, the limit is {limit}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(f"{name} has half of a surrogate pair, which UTF-8 cannot encode; give valid text") from None


def _invalid(fact: str) -> InvalidParams:
    return InvalidParams(f"structured_outputs: {fact}", param="structured_outputs")
