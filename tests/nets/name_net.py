"""The name net: finds names of slipstream modules that tests and benchmarks use and that do not exist.

Most tests fail by themselves when a name moves. Those that need a GPU, and benchmarks, are not run on every machine:
this net reads them instead. It imports nothing: what a module defines is read from its source as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from syntax import children, nodes_of, parse, walk

SOURCE = Path(__file__).parents[2] / "src"
IMPORTERS = ("import_module", "importorskip")  # their first argument is the name of a module


def find_unknown_in(*roots: Path) -> list[str]:
    return [
        finding
        for root in roots
        for file in sorted(root.rglob("*.py"))
        for finding in find_unknown(file.read_text(encoding="utf-8"), file.relative_to(root.parent).as_posix())
    ]


def find_unknown(source: str, path: str = "<snippet>") -> list[str]:
    nodes = nodes_of(source)
    modules = dict(_bindings(nodes))
    for name in _bound_otherwise(nodes):  # a name that is also a variable may mean something else where it is used
        modules.pop(name, None)
    absent = {node for block in nodes if _expects_absence(block) for node in walk(block)}
    looked_up = [node for node in nodes if node not in absent]
    uses = [*_uses(looked_up, modules), *_made_names(nodes)]
    return [f"{path}:{line}: there is no {name}" for line, name in uses if not _exists(name)]


def _expects_absence(node: ast.AST) -> bool:
    """Whether this is a block in which a test expects that an import fails."""
    kinds = ("ImportError", "ModuleNotFoundError")
    return isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith(
        tuple(f"pytest.raises({kind}" for kind in kinds)
    )


def borrowed_helpers(tests: Path) -> list[str]:
    """Imports by mere name of a module that lies beside other tests: they fail unless those tests are run too."""
    folders_of_tests = {file.parent for file in tests.rglob("test_*.py")} - {tests}
    files = [file for folder in sorted(folders_of_tests) for file in sorted(folder.glob("*.py"))]
    folders = {file.stem: file.parent for file in files if not file.name.startswith(("test_", "__", "conftest"))}
    found = []
    for file in files:
        for node in nodes_of(file.read_text(encoding="utf-8")):
            match node:
                case ast.ImportFrom(module=str(module), level=0):
                    names = [module]
                case ast.Import(names=aliases):
                    names = [each.name for each in aliases]
                case _:
                    names = []
            lent = [name for name in names if folders.get(name, file.parent) != file.parent]
            found += [f"{file.relative_to(tests).as_posix()}: {name}" for name in lent]
    return found


def _made_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Lines and names of f-strings: a part that a loop around it takes from a list of strings is each of them; before
    any other part the name of a package must end."""
    lists: dict[tuple[ast.AST, str], list[str]] = {}
    for node in nodes:
        match node:
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=items) | ast.List(elts=items)):
                given = [each.value for each in items if isinstance(each, ast.Constant)]
                lists |= {(inner, name): given for inner in walk(node)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            names = [""]
            for part in node.values:
                match part:
                    case ast.Constant(value=str(text)):
                        names = [name + text for name in names]
                    case ast.FormattedValue(value=ast.Name(id=variable)) if given := lists.get((node, variable)):
                        names = [f"{name}{each}" for name in names for each in given]
                    case _:
                        names = [name.rpartition(".")[0] for name in names]
                        break
            yield from ((node.lineno, name) for name in names if name.startswith("slipstream.") and " " not in name)


def _bindings(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Local names of slipstream modules."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((each.asname, each.name) for each in names if each.asname and _is_module(each.name))
            case ast.ImportFrom(module=str(module), level=0, names=names):
                pairs = ((each.asname or each.name, _submodule(module, each.name)) for each in names)
                yield from ((local, name) for local, name in pairs if name)
            case ast.Assign(targets=[ast.Name(id=local)], value=value) if name := _imported(value):
                if _is_module(name):
                    yield local, name


def _bound_otherwise(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.arg(arg=name):
                yield name
            case ast.Assign(targets=targets, value=value) if not _imported(value):
                yield from (each.id for each in targets if isinstance(each, ast.Name))
            case ast.For(target=target) | ast.comprehension(target=target):
                yield from (each.id for each in walk(target) if isinstance(each, ast.Name))


def _uses(nodes: list[ast.AST], modules: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Lines and full names: attributes of modules, imports, and strings that monkeypatch or importlib looks up."""
    for node in nodes:
        match node:
            case ast.Attribute(attr=attr, lineno=line) if module := _module_of(node.value, modules):
                yield line, f"{module}.{attr}"
            case ast.Import(names=names, lineno=line):
                yield from ((line, each.name) for each in names if each.name.startswith("slipstream."))
            case ast.ImportFrom(module=str(module), level=0, names=names, lineno=line) if _is_ours(module):
                yield from ((line, f"{module}.{each.name}") for each in names)
            case ast.Call(args=[ast.Constant(value=str(name))], lineno=line) if _imported(node) and _is_ours(name):
                yield line, name
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=args, lineno=line):
                match args:
                    case [ast.Constant(value=str(name)), *_] if _is_ours(name):
                        yield line, name
                    case [owner, ast.Constant(value=str(attr)), *_] if module := _module_of(owner, modules):
                        yield line, f"{module}.{attr}"


def _imported(node: ast.expr) -> str:
    """The name in importlib.import_module("name") and pytest.importorskip("name", reason=...)."""
    match node:
        case ast.Call(func=ast.Attribute(attr=attr), args=[ast.Constant(value=str(name)), *_]) if attr in IMPORTERS:
            return name
    return ""


def _module_of(node: ast.expr, modules: dict[str, str]) -> str:
    match node:
        case ast.Name(id=name):
            return modules.get(name, "")
        case ast.Attribute(value=value, attr=attr) if outer := _module_of(value, modules):
            return _submodule(outer, attr)
    return ""


def _submodule(package: str, attr: str) -> str:
    """The full name of a module of a package, unless the package has a function or a class of that name instead."""
    name = f"{package}.{attr}"
    return name if _is_module(name) and _defined(package).get(attr, True) else ""


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "slipstream"


def _exists(name: str) -> bool:
    """A module, or a name that a module defines; attributes of classes and of instances are not looked at."""
    if _is_module(name):
        return True
    module, _, attr = name.rpartition(".")
    if _is_module(module):
        return attr.startswith("__") or attr in _defined(module)
    return bool(module) and _exists(module)


def _is_module(name: str) -> bool:
    return _is_ours(name) and _file_of(name) is not None


@cache
def _file_of(module: str) -> Path | None:
    path = SOURCE.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def _defined(module: str) -> dict[str, bool]:
    """The names that a module defines or imports; whether each is, or may be, a module itself."""
    file = _file_of(module)
    assert file is not None
    tree = parse(file.read_text(encoding="utf-8"))
    names: dict[str, bool] = {}
    for node in _module_level(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                names[name] = False
                if name == "__getattr__":  # it makes names that the module lists as strings
                    strings = (each.value for each in walk(tree) if isinstance(each, ast.Constant))
                    names |= {each: False for each in strings if isinstance(each, str)}
            case ast.Import(names=imported):
                names |= {each.asname or each.name.split(".")[0]: True for each in imported}
            case ast.ImportFrom(module=origin, names=imported):
                names |= {each.asname or each.name: _is_module(f"{origin}.{each.name}") for each in imported}
            case ast.Name(id=name, ctx=ast.Store()):
                names[name] = False
    return names


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: the bodies of if, try and with too, those of functions and classes not."""
    for child in children(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _module_level(child)
