"""The request fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and older names."""

from __future__ import annotations

from typing import Any

from slipstream.params.structured import StructuredOutputsParams, as_params
from slipstream.serve.http.errors import bad_request

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
OUTPUT_FIELDS = ("structured_outputs", *_GUIDED)
"""Fields with the shape of the whole output; that of `response_format` is for the content."""
FIELDS = ("response_format", *OUTPUT_FIELDS)
_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(given: dict[str, Any], names: dict[str, str]) -> StructuredOutputsParams | None:
    """The required shape of the output. `names` gets the name of the field, for later errors."""
    pattern = given.get("guided_whitespace_pattern")
    asked = [name for name in FIELDS if name in given and given[name] != {"type": "text"}]
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} both ask for a structured output; remove one", param=asked[1])
    if not asked:
        if pattern is not None:
            name = "guided_whitespace_pattern"
            raise bad_request(f"{name} needs guided_json; set it, or remove this", param=name)
        return None
    names["structured_outputs"] = name = asked[0]
    if name == "response_format":
        return _response_format(given[name])
    fields = given[name] if name == "structured_outputs" else {_GUIDED[name]: given[name]}
    return as_params(fields if pattern is None else {**fields, "whitespace_pattern": pattern})


def _response_format(given: dict[str, Any]) -> StructuredOutputsParams:
    kind = given.get("type")
    if kind not in _TYPES:
        raise _wrong("response_format.type", f"is {kind!r:.100}; give one of {', '.join(_TYPES)}")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=given)
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if unknown := given.keys() - known:
        name = f"response_format.{min(unknown)}"
        raise bad_request(f"there is no field {name} with type {kind}; remove it", param=name)
    return (
        StructuredOutputsParams(json_object=True) if kind == "json_object" else _json_schema(given.get("json_schema"))
    )


def _json_schema(given: object) -> StructuredOutputsParams:
    path = "response_format.json_schema"
    if not isinstance(given, dict):
        raise _wrong(path, "is missing or no object; give name and schema")
    if unknown := given.keys() - {"name", "description", "schema", "strict"}:
        raise bad_request(f"there is no field {path}.{min(unknown)}; remove it", param=f"{path}.{min(unknown)}")
    for name in ("name", "description"):
        if not isinstance(given.get(name, ""), str | None):
            raise _wrong(f"{path}.{name}", "is a label of the client; give a string")
    schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(schema, dict):
        raise _wrong(f"{path}.schema", "is missing or no object; give a JSON schema")
    if strict not in (None, True, False):
        raise _wrong(f"{path}.strict", f"is {strict!r:.100}; give true or false")
    return StructuredOutputsParams(json=schema, lenient=strict is False)


def _wrong(name: str, fact: str) -> Exception:
    return bad_request(f"{name} {fact}", param=name)
