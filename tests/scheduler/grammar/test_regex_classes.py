r"""\d and \w are about ASCII wherever a request has a regular expression."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from scheduler.grammar.test_structural_tag import VOCABULARY, accepts
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.lark_nodes import ascii_patterns
from slipstream.scheduler.grammar.translate import translate

EIGHT = "\N{SEGMENTED DIGIT EIGHT}"
EMAIL = r"[\w-\.]+@([\w-]+\.)+[\w-]{2,4}"


def matches(text: str, **shape: Any) -> bool:
    matcher = LLMatcher(VOCABULARY, translate(StructuredOutputsParams(**shape), {}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return accepts(matcher, list(text.encode()))


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d{2}", "12", EIGHT * 2),
        (r"[\d.]+", "1.5", EIGHT),
        (r"\w+", "a_1", "é"),
        (r"\W\D", "éé", "a1"),
        (r"[^\w\s]", "é", "a"),
        (r"[\w\W]+", "aé\n", ""),
        (r"\\d", r"\d", "1"),
        (EMAIL, "a-b.c@d-e.org", "a@b"),
    ],
)
def test_classes_are_about_ascii(regex, good, bad):
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": regex}}
    for shape in ({"regex": regex}, {"structural_tag": tag}, {"regex": regex, "prefix": 'start: ""'}):
        assert matches(good, **shape) and not matches(bad, **shape)
    schema = {"type": "string", "pattern": f"^{regex}$"}
    assert matches(json.dumps(good, ensure_ascii=False), json=schema)
    assert not matches(json.dumps(bad, ensure_ascii=False), json=schema)


def test_patterns_of_a_schema_are_found_and_values_are_left():
    part, new = {"type": "string", "pattern": r"\d"}, {"type": "string", "pattern": "[0-9]"}

    def schema(part: object, name: str) -> dict[str, Any]:
        return {
            "properties": {"a": part, "const": part, "pattern": part, "b": {"const": {"pattern": r"\d"}}},
            "patternProperties": {name: {"items": [part]}},
            "anyOf": [{"additionalProperties": part}, {"enum": [r"\d"], "default": {"pattern": r"\w"}}],
            "components": {"own": part},
        }

    assert json.loads(ascii_patterns(json.dumps(schema(part, r"^\w")))) == schema(new, "^[0-9A-Za-z_]")
