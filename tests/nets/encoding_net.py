"""The encoding net: finds text files that are read or written in the locale's encoding instead of a named one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from syntax import nodes_of

TEXT_METHODS = {"read_text", "write_text"}
PROCESS_WORDS = {"text", "universal_newlines"}


def find_unnamed(source: str, path: str = "<snippet>") -> list[str]:
    return [f"{path}:{line}: {what} without encoding=" for line, what in _walk(nodes_of(source))]


def find_unnamed_in(root: Path) -> list[str]:
    return [
        finding
        for file in sorted(root.rglob("*.py"))
        for finding in find_unnamed(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
    ]


def _walk(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Call) and not any(keyword.arg == "encoding" for keyword in node.keywords):
            if isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_METHODS:
                yield node.lineno, f"{node.func.attr}()"
            elif isinstance(node.func, ast.Name) and node.func.id == "open" and not _is_binary(_mode(node)):
                yield node.lineno, "open() in text mode"
            elif _starts_process(node) and any(keyword.arg in PROCESS_WORDS for keyword in node.keywords):
                yield node.lineno, "the text of a process"


def _starts_process(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("run", "Popen", "check_output")


def _mode(call: ast.Call) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    return named[0] if named else call.args[1] if len(call.args) > 1 else None


def _is_binary(mode: ast.expr | None) -> bool:
    return isinstance(mode, ast.Constant) and "b" in str(mode.value)
