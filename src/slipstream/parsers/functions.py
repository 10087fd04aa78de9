"""Functions: the tools of one request, as parsers need them: their names, and the types of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean"}


class Functions:
    """`schemas`: the parameters of each function, as a JSON schema."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.schemas = dict(schemas or {})

    @classmethod
    def of_tools(cls, tools: Sequence[Mapping[str, Any]]) -> Functions:
        """`tools`: in the format of OpenAI's chat API, checked."""
        return cls({tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools})

    def __contains__(self, name: str) -> bool:
        return name in self.schemas

    def types_of(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter can have; empty if the schema does not say."""
        schema = self.schemas.get(name, {})
        properties = schema.get("properties")
        return _types(properties.get(parameter), schema) if isinstance(properties, Mapping) else frozenset()


def _types(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_target(reference, root), root, depth + 1)
    given = schema.get("type")
    if isinstance(given, str | list):
        names = [given] if isinstance(given, str) else given
        return frozenset(_TYPES.get(name, name) for name in names if isinstance(name, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset("string" if isinstance(value, str) else "any" for value in values)
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(alternatives := schema.get(key), list):
            found |= {name for inner in alternatives for name in _types(inner, root, depth + 1)}
    return frozenset(found)


def _target(reference: str, root: Mapping[str, Any]) -> object:
    """The target of a reference within a schema; None for other references."""
    node: object = root
    for name in reference.removeprefix("#/").split("/") if reference.startswith("#/") else [reference]:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
