"""Walker: follows the text of one output through the nodes of its schema (`json_state.c`), beside a matcher.

Threads look up the mask of its state in the masks that were computed before (`mask_memory.c`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.scheduler.grammar.schema_nodes import SchemaNodes


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
    """A schema of json_state.c; all walkers of a grammar share it."""

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
