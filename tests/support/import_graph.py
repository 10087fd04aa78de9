"""The import graph of a source tree, from its syntax trees. Imports under TYPE_CHECKING and inside functions count."""

import ast
from pathlib import Path

from syntax import nodes_of


def module_name(file: Path, src: Path) -> str:
    return ".".join(file.relative_to(src).with_suffix("").parts).removesuffix(".__init__")


def import_graph(src: Path) -> dict[str, set[str]]:
    """For each module under `src`, the modules under `src` that it imports."""
    files = {module_name(file, src): file for file in src.rglob("*.py")}
    return {name: _imports(file, files.keys()) - {name} for name, file in files.items()}


def _imports(file: Path, modules) -> set[str]:
    found: set[str] = set()
    for node in nodes_of(file.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in modules else node.module for name in names)
    return found & set(modules)


def import_cycles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """Strongly connected groups of modules (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            first = stack.index(name)
            group = frozenset(stack[first:])
            del stack[first:]
            if len(group) > 1:
                cycles.append(group)

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return cycles
