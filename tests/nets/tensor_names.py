"""Which names and expressions of a function are tensors, as far as its text tells.

Known are arguments and variables annotated as `torch.Tensor`, what is made of them by operators and methods, results of
torch's functions, and fields that classes annotate as tensors. A guess is left out rather than made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from syntax import walk

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# of a tensor, and not tensors themselves
PLAIN_METHODS = frozenset({
    "dim", "stride", "size", "numel", "nelement", "is_contiguous", "data_ptr", "element_size", "storage_offset",
    "untyped_storage", "get_device", "type", "is_pinned", "is_floating_point", "is_inference", "split", "chunk",
    "unbind", "item", "tolist", "numpy",
})  # fmt: skip
TENSOR_FIELDS = frozenset({"T", "mT", "data", "real", "imag"})
# of torch, and not of tensors
PLAIN_FUNCTIONS = frozenset({
    "device", "dtype", "finfo", "iinfo", "is_tensor", "is_floating_point", "numel", "get_num_threads", "inference_mode",
    "no_grad", "set_num_threads", "promote_types", "result_type", "get_default_dtype", "split", "chunk", "unbind",
    "compile", "typename", "set_flush_denormal", "is_grad_enabled", "equal", "allclose",
})  # fmt: skip
PLAIN_PREFIXES = ("is", "get", "set")


def is_kernel(function: ast.AST) -> bool:
    """Whether the device runs it: what looks like Python there is compiled."""
    decorators = getattr(function, "decorator_list", [])
    return any(".jit" in ast.unparse(decorator) for decorator in decorators)


def is_tensor_annotation(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).removesuffix(" | None") in ("torch.Tensor", "Tensor")


def tensor_fields(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Names of fields that are tensors in every class that has them."""
    tensors: set[str] = set()
    others: set[str] = set()
    for tree in trees:
        for node in walk(tree):
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        (tensors if is_tensor_annotation(line.annotation) else others).add(line.target.id)
    return frozenset(tensors - others)


class Names:
    """What is a tensor inside one function."""

    def __init__(self, known: frozenset[str], fields: frozenset[str], host: frozenset[str]) -> None:
        self.known = known
        self.fields = fields
        self.host = host  # names of numpy arrays and plans

    def inside(self, function: ast.AST, host: frozenset[str]) -> Names:
        """Of a function within this one: its own, and those around it that it does not name itself."""
        own = {node.arg for node in walk(function) if isinstance(node, ast.arg)}
        found = Names(self.known - own, self.fields, host)
        found.known |= {
            node.arg for node in walk(function) if isinstance(node, ast.arg) and is_tensor_annotation(node.annotation)
        }
        size = -1
        while size != len(found.known):  # what is made of what was found
            size = len(found.known)
            for node in walk(function):
                found._learn(node)
        return found

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if is_tensor_annotation(node.annotation):
                self.known |= {node.target.id}
        elif isinstance(node, ast.Assign) and self.is_tensor(node.value):
            self.known |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) == len(node.value.elts):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    self.known |= {t.id for t, value in pairs if isinstance(t, ast.Name) and self.is_tensor(value)}

    def is_tensor(self, node: ast.expr | None) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.known and name not in self.host
            case ast.Attribute(value=value, attr=attr):
                if self.is_tensor(value):
                    return attr in TENSOR_FIELDS
                return attr in self.fields and _root(value) not in self.host
            case ast.Subscript(value=value):
                return self.is_tensor(value)
            case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
                return self.is_tensor(operand)
            case ast.BinOp(left=left, right=right):
                return self.is_tensor(left) or self.is_tensor(right)
            case ast.Compare(ops=ops):
                if any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in ops):
                    return False
                return any(map(self.is_tensor, [node.left, *node.comparators]))
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_tensor(body) or self.is_tensor(orelse)
            case ast.NamedExpr(value=value):
                return self.is_tensor(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), keywords=keywords):
                if attr in ("tensor", "as_tensor", "from_numpy"):  # of the host's numbers: on the host unless told
                    return any(keyword.arg == "device" for keyword in keywords)
                is_plain = attr in PLAIN_FUNCTIONS or attr.partition("_")[0] in PLAIN_PREFIXES
                return attr[0].islower() and not is_plain
            case ast.Call(func=ast.Attribute(value=ast.Name(id="F"))):
                return True
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                return self.is_tensor(value) and attr not in PLAIN_METHODS and not attr.startswith("is_")
        return False


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
