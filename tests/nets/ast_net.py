"""The AST net: finds calls in the device half by which the host would wait for the device.

It reads source text and needs no GPU. It sees the calls that are written down, not those behind them; the FakeTensor
net is for those. A call is fine inside `with sync_allowed("why"):`. Functions defined in such a block run later and
are not covered by it.

What is numpy is on the host and may be read. The net knows `np`, `plan`, `pool_plan` and `admission` (plans are
numpy), and the names that a function annotates as numpy: `widths: Ints = ...`. `tensor_names.py` says which names are
tensors, for `if`, `bool()` and the like.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nets.tensor_looks import looks_at
from nets.tensor_names import FUNCTIONS, Names, is_kernel, tensor_fields
from syntax import children, parse, walk

FOLDERS = ("runner", "nn", "ops")
ALLOWED_FILES = (
    "runner/results.py",  # the crossing out: waiting for results is its task
    *(f"nn/weights/{name}.py" for name in ("gguf", "load", "source", "stacked")),  # at start: no step is in flight
)

WAITS = {
    "item", "tolist", "cpu", "numpy", "cuda", "synchronize",
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "multinomial",
}  # fmt: skip
HOST_NAMES = frozenset({"np", "numpy", "plan", "pool_plan", "admission"})
HOST_TYPES = ("NDArray", "np.ndarray", "Ints", "Bools", "Floats")  # how an annotation of a numpy array begins


class Finding(NamedTuple):
    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def find_in_tree(root: Path) -> list[Finding]:
    """Every finding under src/slipstream, given that folder."""
    sources = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }
    fields = tensor_fields(map(parse, sources.values()))
    findings: list[Finding] = []
    for name, source in sources.items():
        if not name.startswith(ALLOWED_FILES):
            findings += find_in_source(source, name, fields)
    return findings


def find_in_source(source: str, path: str = "<snippet>", fields: frozenset[str] = frozenset()) -> list[Finding]:
    tree = parse(source)
    names = Names(frozenset(), fields | tensor_fields([tree]), HOST_NAMES)
    return [Finding(path, line, what) for line, what in _walk(tree, names, allowed=False)]


def _walk(node: ast.AST, names: Names, *, allowed: bool) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            if _is_marker(item.context_expr):
                yield from _check_reason(item.context_expr)
            else:
                yield from _walk(item, names, allowed=allowed)
        inside = allowed or any(_is_marker(item.context_expr) for item in node.items)
        for statement in node.body:
            yield from _walk(statement, names, allowed=inside)
        return
    if isinstance(node, FUNCTIONS):
        if is_kernel(node):
            return
        allowed = False
        names = names.inside(node, names.host | _annotated_as_numpy(node))
    if not allowed:
        for what in _waits(node, names):
            line = next(child.lineno for child in walk(node) if hasattr(child, "lineno"))
            yield line, f"{what} makes the host wait; keep it on the device or say why in sync_allowed"
    for child in children(node):
        if not _is_error(node, child):
            yield from _walk(child, names, allowed=allowed)


def _is_error(node: ast.AST, child: ast.AST) -> bool:
    """What only an error says may read what it likes."""
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Assert) and child is node.msg)


def _waits(node: ast.AST, names: Names) -> Iterator[str]:
    yield from looks_at(node, names)
    if isinstance(node, ast.Call) and (what := _wait(node, names.host)):
        yield what


def _wait(call: ast.Call, host: frozenset[str]) -> str | None:
    """The name of a call that waits, or None."""
    if not isinstance(call.func, ast.Attribute) or (root := _root(call.func)) in host:
        return None
    name = call.func.attr
    keywords = {keyword.arg for keyword in call.keywords}
    if name in WAITS:
        return f"{name}()"
    if name == "to" and any(isinstance(arg, ast.Constant) and arg.value == "cpu" for arg in _all_arguments(call)):
        return 'to("cpu")'
    if name in ("tensor", "as_tensor") and root == "torch" and "device" in keywords:
        return f"torch.{name}(..., device=)"
    if name == "repeat_interleave" and "output_size" not in keywords:
        return "repeat_interleave() without output_size"
    if name == "where" and root == "torch" and len(call.args) == 1 and not keywords:
        return "torch.where(condition)"
    return None


def _all_arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _annotated_as_numpy(function: ast.AST) -> frozenset[str]:
    names = set()
    for node in walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None:
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        else:
            continue
        if ast.unparse(annotation).startswith(HOST_TYPES):
            names.add(name)
    return frozenset(names)


def _root(node: ast.expr) -> str | None:
    """The name at the start of `a.b[c].d`; a call in between breaks the chain."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_marker(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    ) == "sync_allowed"


def _check_reason(node: ast.expr) -> Iterator[tuple[int, str]]:
    assert isinstance(node, ast.Call)
    reason = node.args[0] if len(node.args) == 1 and not node.keywords else None
    if not (isinstance(reason, ast.Constant) and isinstance(reason.value, str) and reason.value.strip()):
        yield node.lineno, "sync_allowed() takes one literal string that says why the host may wait"
