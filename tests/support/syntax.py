"""Syntax trees of sources, made once in a process: a dozen tests read every file of the package, and change none."""

from __future__ import annotations

import ast
import gc
from functools import cache


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes_of(source: str) -> list[ast.AST]:
    nodes = walk(parse(source))
    gc.freeze()  # the trees stay: collections would traverse them, which takes as long as the nets
    return nodes


def walk(tree: ast.AST) -> list[ast.AST]:
    """As ast.walk, in a third of the time."""
    nodes = [tree]
    for node in nodes:
        nodes += children(node)
    return nodes


def children(node: ast.AST) -> list[ast.AST]:
    """As ast.iter_child_nodes."""
    found: list[ast.AST] = []
    for value in node.__dict__.values():  # the fields, and numbers of lines and columns
        if isinstance(value, ast.AST):
            found.append(value)
        elif isinstance(value, list):
            found += [each for each in value if isinstance(each, ast.AST)]
    return found
