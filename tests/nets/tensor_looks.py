"""How Python's own words look at a tensor: `bool(t)`, `int(t)`, `if t`, `not t`, `t and ...`, `max(t)`, `x[:t]`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nets.tensor_names import Names

READING_CALLS = frozenset({
    "bool", "int", "float", "complex", "range", "str", "repr", "min", "max", "any", "all", "sorted", "round", "set",
    "print", "format",
})  # fmt: skip


def looks_at(node: ast.AST, names: Names) -> Iterator[str]:
    """What of this node itself, not of those inside it, looks at a tensor's value."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=args) if name in READING_CALLS:
            if any(names.is_tensor(_element(arg)) for arg in args):
                yield f"{name}() of a tensor"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            if _is_asked(test, names):
                word = {ast.While: "while", ast.Assert: "assert"}.get(type(node), "if")
                yield f"`{word}` of a tensor"
        case ast.UnaryOp(op=ast.Not(), operand=operand) if names.is_tensor(operand):
            yield "`not` of a tensor"
        case ast.BoolOp(values=values) if any(map(names.is_tensor, values[:-1])):
            yield "`and` or `or` of a tensor"
        case ast.Compare(ops=ops, comparators=comparators):
            operands = [node.left, *comparators]
            if len(ops) > 1 and any(map(names.is_tensor, operands)) and names.is_tensor(node):
                yield "a chain of comparisons of a tensor"
            if isinstance(ops[-1], ast.In | ast.NotIn) and names.is_tensor(comparators[-1]):
                yield "`in` a tensor"
        case ast.comprehension(ifs=ifs) if any(_is_asked(test, names) for test in ifs):
            yield "`if` of a tensor"
        case ast.Slice(lower=lower, upper=upper, step=step) if any(map(names.is_tensor, (lower, upper, step))):
            yield "a slice up to a tensor"
        case ast.Subscript(slice=ast.Compare() as mask) if names.is_tensor(mask):
            yield "an index by a mask"
        case ast.FormattedValue(value=value) if names.is_tensor(value):
            yield "the text of a tensor"


def _is_asked(test: ast.expr, names: Names) -> bool:
    """Whether the truth of a test is that of a tensor; `not` and `and` are looked at by themselves."""
    return names.is_tensor(test.values[-1] if isinstance(test, ast.BoolOp) else test)


def _element(argument: ast.expr) -> ast.expr:
    """What is looked at of `any(x > 0 for x in ...)`."""
    return argument.elt if isinstance(argument, ast.GeneratorExp | ast.ListComp) else argument
