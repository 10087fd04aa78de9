"""SchemaNodes: the parts of a JSON schema that decide which texts have the same mask, for `json.c`.

Only keywords whose effect on the text is known are read. A part of a schema with any other keyword is EXACT: two texts
inside of a value of that part have the same key only if they are equal.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.translate import json_schema

EXACT, SCALAR, STRING, OBJECT, ARRAY, ANY = range(6)  # as in json.c
NODE = np.dtype([(name, np.int32) for name in ("kind", "min", "max", "child", "first", "num")])
_SALT = hashlib.sha256(os.urandom(16)).digest()
_MAX_NODES = 4096
_MAX_DEPTH = 100  # parts inside parts, also by $ref; what is deeper is EXACT
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$comment",
    "$defs",
    "definitions",
    "deprecated",
}
_KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "boolean": set(),
    "null": set(),
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}


@dataclass
class SchemaNodes:
    root: bytes  # 16 bytes, of the grammar
    nodes: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # of properties, as in the text
    targets: list[int] = field(default_factory=list)  # their nodes

    def array(self) -> np.ndarray[Any, Any]:
        return np.array(self.nodes, NODE)


def schema_nodes(params: StructuredOutputsParams, grammar: str) -> SchemaNodes | None:
    """The nodes of a JSON schema, the root last; None if the output is not JSON alone. `grammar`: its translation."""
    if (params.prefix, params.alternative, params.whitespace_pattern) != (None, None, None):
        return None
    if params.json is None and not params.json_object:
        return None
    reader = _Reader(json_schema(params), SchemaNodes(hashlib.sha256(_SALT + grammar.encode()).digest()[:16]))
    return reader.read_root()


class _Reader:
    def __init__(self, schema: dict[str, Any], found: SchemaNodes) -> None:
        self.schema = schema
        self.found = found
        self._by_id: dict[int, int] = {}  # nodes of schemas that are read or being read
        self._depth = 0  # of the part that is read

    def read_root(self) -> SchemaNodes | None:
        """Node 0 is EXACT, node 1 ANY, node 2 the root."""
        self.found.nodes += [(EXACT, -1, -1, 0, 0, 0), (ANY, -1, -1, 1, 0, 0)]
        root = self._read(self.schema)
        if root == 1:
            self.found.nodes.append(self.found.nodes[1])
        elif root != 2 or len(self.found.nodes) > _MAX_NODES:
            return None  # nothing is known about it
        return self.found

    def _read(self, schema: object) -> int:
        """The node of this part of the schema."""
        if schema is True:
            return 1
        if not isinstance(schema, dict):
            return 0
        known = self._by_id.get(id(schema))
        if known is not None:
            return known
        used = schema.keys() - _ANNOTATIONS
        if not used:
            return 1
        if used == {"$ref"}:
            return self._read_ref(schema["$ref"])
        kind = schema.get("type")
        if not isinstance(kind, str) or used - {"type"} - _KEYWORDS.get(kind, {"type"}) or kind not in _KEYWORDS:
            return 0
        nodes = self.found.nodes
        if len(nodes) > _MAX_NODES or self._depth == _MAX_DEPTH:
            return 0
        self._depth += 1
        number = self._by_id[id(schema)] = len(nodes)
        nodes.append((EXACT, -1, -1, 0, 0, 0))  # until it is read
        if kind == "string":
            nodes[number] = (STRING, _count(schema, "minLength"), _count(schema, "maxLength"), 0, 0, 0)
        elif kind == "array":
            items = self._read(schema.get("items", True))
            nodes[number] = (ARRAY, _count(schema, "minItems"), _count(schema, "maxItems"), items, 0, 0)
        elif kind == "object":
            self._read_object(schema, number)
        else:
            is_plain_number = kind in ("integer", "number") and used == {"type"}
            nodes[number] = (SCALAR, 0 if is_plain_number else -1, -1, 0, 0, 0)
        self._depth -= 1
        return number

    def _read_object(self, schema: dict[str, Any], number: int) -> None:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            return
        targets = [self._read(each) for each in properties.values()]
        others = self._read(schema.get("additionalProperties", True))
        first = len(self.found.names)
        # the text between the quotes
        self.found.names += [json.dumps(name, ensure_ascii=False)[1:-1].encode() for name in properties]
        self.found.targets += targets
        self.found.nodes[number] = (OBJECT, -1, -1, others, first, len(properties))

    def _read_ref(self, ref: object) -> int:
        """A reference to a part of the same schema by a plain path."""
        if not isinstance(ref, str) or not ref.startswith("#/") or set(ref) & {"~", "%"}:
            return 0
        if self.schema.keys() & {"$id", "id"}:
            return 0
        part: object = self.schema
        for name in ref[2:].split("/"):
            if not isinstance(part, dict) or name not in part:
                return 0
            part = part[name]
        if isinstance(part, dict) and part.keys() - _ANNOTATIONS == {"$ref"}:
            return 0  # a chain may be endless
        return self._read(part)


def _count(schema: dict[str, Any], name: str) -> int:
    value = schema.get(name, -1)
    return value if isinstance(value, int) and 0 <= value < 1 << 30 else -1


# Walker: follows the text of one output through the nodes of its schema (`json.c`), beside a matcher.
#
# Threads look up the mask of its state in the masks that were computed before (`masks.c`).


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of all tokens; special tokens have none."""

    bytes: NDArray[np.uint8]
    starts: NDArray[np.uint32]  # [tokens + 1]


class Walker:
    __slots__ = ("pointer", "_schema")

    def __init__(self, schema: _Schema, pointer: int) -> None:
        self.pointer = pointer
        self._schema = schema

    @classmethod
    def of(cls, nodes: SchemaNodes, tokens: TokenBytes, library: ctypes.CDLL) -> Walker | None:
        """In the state of an empty text. `library`: the compiled C files. None if out of memory."""
        schema = _Schema(nodes, tokens, library)
        pointer = library.slip_walker_open(schema.pointer) if schema.pointer else None
        return cls(schema, pointer) if pointer else None

    def __del__(self) -> None:
        self._schema.library.slip_walker_close(self.pointer)

    def copy(self) -> Walker | None:
        pointer = self._schema.library.slip_walker_copy(self.pointer)
        return Walker(self._schema, pointer) if pointer else None

    def reset(self) -> None:
        self._schema.library.slip_walker_reset(self.pointer)

    def take(self, token: int) -> None:
        self._schema.library.slip_walker_take(self.pointer, token)


class _Schema:
    """A schema of json.c; all walkers of a grammar share it."""

    def __init__(self, nodes: SchemaNodes, tokens: TokenBytes, library: ctypes.CDLL) -> None:
        self.library = library
        self._tokens = tokens  # whose memory it reads
        table, targets = nodes.array(), np.array(nodes.targets, np.int32)
        lengths = np.array([len(name) for name in nodes.names], np.int32)
        names = np.frombuffer(b"".join(nodes.names) or b"\0", np.uint8)
        root = np.frombuffer(nodes.root, np.uint64)
        self.pointer: int | None = library.slip_schema_open(
            table.ctypes.data, len(table), names.ctypes.data, lengths.ctypes.data, targets.ctypes.data, len(targets),
            root.ctypes.data, tokens.bytes.ctypes.data, tokens.starts.ctypes.data, len(tokens.starts) - 1,
        )  # fmt: skip

    def __del__(self) -> None:
        if self.pointer:
            self.library.slip_schema_close(self.pointer)
