"""Law 10: one implementation at a time. A rewrite leaves no file, no function and no switch of what it replaced."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import slipstream
from import_graph import import_graph, module_name
from slipstream.config.options import Options
from slipstream.serve.cli.commands import MODULES
from slipstream.serve.http.server.settings import ServerSettings
from syntax import children, nodes_of, parse, walk

SRC = Path(__file__).parents[2] / "src"

STARTED = {
    "slipstream.serve.cli.main",  # by pyproject.toml
    "slipstream.device.sync_check.__main__",  # by python -m
    *("slipstream.images.loader", "slipstream.images.prompt"),  # by the interfaces, when towers run
}
BY_NAME = {"add_command", "ROUTES", "attend_tiles"}  # top-level names of modules that a table lists
USED_BY_OTHERS = {  # top-level names that no code of the package uses: reason
    "processors.TokenEdit": "the type of what users' logits processors return",
    "dispatch.validating": "for debugging: compares kernels with their references in a running engine",
    "matrix.scaled_linear": "the oracle of the kernels (law 8); the layer dequantises",
    "matrix.integer_linear": "likewise",
    **dict.fromkeys(
        ["prompt.expand_text", "prompt.spell_video"], "videos, and families with words around images, will"
    ),
}
CLASSES_OF_OTHERS = {  # whose methods others call, beside the public classes
    **dict.fromkeys(["StepEngine", "EngineMethods", "UnfinishedRequests"], "bases of public classes"),
    **dict.fromkeys(["ModelConfigView", "LogprobList"], "what scripts for vLLM read"),
    "ScriptTokenizer": "what scripts call of transformers' tokenizers",
    **dict.fromkeys(["ProxiedRequest", "ProxiedAnswer"], "httptools calls them"),
    "Metrics": "prometheus_client calls collect",
    "Server": "uvicorn's, whose signals it replaces",
    "_Machine": "methods are named after the opcodes",
    "MaskPool": "num_found, a counter in C that shows in tests that masks are kept",
}
READ_BY_OTHERS = {  # attributes that are set and that no code of the package reads
    **dict.fromkeys(["num_arrived", "num_asked", "num_padding_steps", "num_waits"], "counters, for debugging"),
    **dict.fromkeys(["_closing", "_comment", "_taken"], "keeps an object alive"),
    "_newest": "a list that is filled for its other holders",
    "__cuda_array_interface__": "torch reads it",
    **dict.fromkeys(["encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params"], "vLLM's RequestOutput"),
}
PASSED_BY_OTHERS = {  # arguments with a default that no call of the package passes
    **dict.fromkeys(["sys", "proc", "environ", "clock", "sleep", "threads"], "a machine of a test"),
    "tile": "tests run each tile at small sizes",
}
# Variables that are no option of `serve`, whose environment variables are named after the option.
SWITCHES = {
    "SLIPSTREAM_NATIVE": "0: no C compiler is used, and the references run",
    "SLIPSTREAM_RANKS_SHARE_GPU": "tests of several ranks on one GPU",
    "SLIPSTREAM_SYNC_CHECK": "the sync detector",
    "SLIPSTREAM_PARENT_PID": "passed to a child process",
}
OLD = {"old", "legacy", "deprecated", "obsolete", "former", "experimental", "fallback", "v0", "v1", "v2", "v3"}


class Module:
    """What the code of a module defines, uses of itself, and names of others."""

    def __init__(self, text: str) -> None:
        self.tree = parse(text)
        self.nodes = nodes_of(text)
        self.own: dict[str, set[str]] = {}  # names that a definition reads; under "" those of all other statements
        self.named: set[str] = set()  # imported names, attributes of imported modules, words of short strings
        self.read: set[str] = set()  # names of attributes, words of short strings
        self.read_outside: set[str] = set()  # those of `read`, without a method's own by itself
        self.stored: set[str] = set()  # attributes of `self` that are set
        nodes = self.nodes
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        bound = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
        self.named.update(alias.name for node in imports for alias in node.names if isinstance(node, ast.ImportFrom))
        for node in nodes:
            match node:
                case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                    self.read.add(name)
                    while isinstance(value, ast.Attribute):
                        value = value.value
                    if isinstance(value, ast.Name) and value.id in bound:
                        self.named.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    self.stored.add(name)
                case ast.Constant(value=value):
                    for names in (self.named, self.read):
                        names.update(_words(value))
        self._read_outside(self.tree, frozenset())
        for statement in self.tree.body:
            self.own.setdefault(getattr(statement, "name", ""), set()).update(_names_read(statement))

    def _read_outside(self, node: ast.AST, functions: frozenset[str]) -> None:
        """`functions`: the names of those around the node."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions |= {node.name}
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Load()):
                self.read_outside |= {name} - (functions if _name_of(owner) == "self" else set())
            case ast.Constant(value=value):
                self.read_outside.update(_words(value))
        for child in children(node):
            self._read_outside(child, functions)

    def top_level(self) -> list[str]:
        names = []
        for node in self.tree.body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.append(name)
                case ast.Assign(targets=targets):
                    names += [each.id for each in targets if isinstance(each, ast.Name)]
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.append(name)
        return [name for name in names if not name.startswith("__")]

    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]


class Package:
    """Modules under a folder, with the modules and names that they use."""

    def __init__(self, src: Path) -> None:
        self.text = {module_name(file, src): file.read_text(encoding="utf-8") for file in src.rglob("*.py")}
        self.modules = {name: Module(text) for name, text in self.text.items()}
        self.users: dict[str, set[str]] = defaultdict(set)  # modules by one that they import or name in a string
        for name, imported in import_graph(src).items():
            strings = set(re.findall(r"[\"']([\w.]+)[\"']", self.text[name]))
            for other in imported | (strings & self.text.keys()) - {name}:
                self.users[other].add(name)

    def unused_modules(self, started: set[str]) -> list[str]:
        packages = {name.rpartition(".")[0] for name in self.text}
        return sorted(self.text.keys() - packages - self.users.keys() - started)

    def unused_names(self, used: Iterable[str] = ()) -> list[str]:
        """Top-level names that no module that uses theirs names, and that their own module reads only in definitions
        which are not used either, such as their own. `used`: names that others use."""
        found = []
        for name, module in sorted(self.modules.items()):
            short, tops = name.rpartition(".")[2], module.top_level()
            named = set().union(*(self.modules[user].named for user in self.users[name]))
            live = {top for top in tops if top in named or f"{short}.{top}" in used or top in used}
            reached = live | {""}
            while reached:
                reached = set().union(*(module.own.get(each, set()) for each in reached)).intersection(tops) - live
                live |= reached
            found += [f"{short}.{top}" for top in tops if top not in live]
        return found

    def unused_methods(self, used: Iterable[str] = ()) -> list[str]:
        """Methods and properties whose name no code of the package reads, but perhaps the method itself. `used`:
        classes that others use."""
        read = set().union(*(module.read_outside for module in self.modules.values()))
        return sorted(
            f"{kind.name}.{node.name}"
            for module in self.modules.values()
            for kind in module.classes()
            if kind.name not in set(used)
            for node in kind.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if not node.name.startswith("__") and node.name not in read
        )

    def unread_attributes(self) -> set[str]:
        """Attributes of `self` that code of the package sets and none reads."""
        read = set().union(*(module.read for module in self.modules.values()))
        return set().union(*(module.stored for module in self.modules.values())) - read

    def unused_defaults(self) -> dict[str, list[str]]:
        """Arguments with a default that no call passes, by function. A function that is also a value may be called
        with anything."""
        nodes = [node for module in self.modules.values() for node in module.nodes]
        calls: dict[str, list[ast.Call]] = defaultdict(list)
        for node in nodes:
            if isinstance(node, ast.Call):
                calls[_name_of(node.func)].append(node)
        called = {node.func for same in calls.values() for node in same}
        values = {_name_of(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute) and node not in called}
        values |= {word for node in nodes if isinstance(node, ast.Constant) for word in _words(node.value)}
        found = {}
        for kind, function in _functions(nodes):
            name = kind if function.name == "__init__" else function.name
            if calls[name] and name not in values and not name.startswith("__"):
                unused = [
                    arg
                    for arg, place in _with_default(function, bool(kind))
                    if not any(_passes(call, arg, place) for call in calls[name])
                ]
                if unused:
                    found[f"{kind}.{function.name}"] = unused
        return found


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, Function]]:
    """Functions with the name of their class, or an empty one."""
    for node in nodes:
        kind = node.name if isinstance(node, ast.ClassDef) else ""
        yield from ((kind, child) for child in children(node) if isinstance(child, Function))


def _with_default(function: Function, is_method: bool) -> list[tuple[str, int]]:
    """Arguments that have a default, and their places in a call."""
    by_place = [*function.args.posonlyargs, *function.args.args]
    first = len(by_place) - len(function.args.defaults)
    is_bound = is_method and not any(_name_of(each) == "staticmethod" for each in function.decorator_list)
    by_name = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return [(arg.arg, place - is_bound) for place, arg in enumerate(by_place) if place >= first] + [
        (arg.arg, 1000) for arg, default in by_name if default is not None
    ]


def _passes(call: ast.Call, arg: str, place: int) -> bool:
    if any(keyword.arg in (None, arg) for keyword in call.keywords):
        return True
    return len(call.args) > place or any(isinstance(each, ast.Starred) for each in call.args)


def _name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _names_read(statement: ast.stmt) -> Iterator[str]:
    for node in walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                yield name
            case ast.Constant(value=value):
                yield from _words(value)


def _words(value: object) -> list[str]:
    return re.findall(r"\w+", value) if isinstance(value, str) and len(value) < 100 else []


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(SRC)


def switches(package: Package) -> set[str]:
    """Environment variables of ours that the package names, and that are no option of `serve`."""
    named = {name for text in package.text.values() for name in re.findall(r"\bSLIPSTREAM_[A-Z_]+[A-Z]\b", text)}
    return named - {f"SLIPSTREAM_{option.upper()}" for option in all_options()}


def all_options() -> list[str]:
    return [name for settings in (Options, ServerSettings) for name in settings.__struct_fields__]


def old_names(names: list[str]) -> list[str]:
    """Names with a word for a replaced implementation, or for a version of one."""
    return [name for name in names if OLD.intersection(re.split(r"[^a-z0-9]", name.lower()))]


def test_every_module_is_used(package: Package) -> None:
    commands = {f"slipstream.serve.cli.{name}" for name in MODULES.values()}
    assert package.unused_modules(STARTED | commands) == []


def check(found: set[str], exceptions: Iterable[str]) -> None:
    assert found - set(exceptions) == set(), "no code of the package uses them"
    assert set(exceptions) - found == set(), "exceptions that are not needed any more"


def test_every_function_class_and_constant_is_used_by_the_package(package: Package) -> None:
    assert package.unused_names({*BY_NAME, *USED_BY_OTHERS}) == []
    found = set(package.unused_names(BY_NAME))
    assert USED_BY_OTHERS.keys() <= found, "exceptions that are not needed any more"


def test_every_method_is_called_by_the_package(package: Package) -> None:
    assert package.unused_methods({*slipstream.__all__, *CLASSES_OF_OTHERS}) == []
    needed = {name.partition(".")[0] for name in package.unused_methods()}
    assert CLASSES_OF_OTHERS.keys() <= needed, "exceptions that are not needed any more"


def test_every_attribute_is_read_by_the_package(package: Package) -> None:
    check(package.unread_attributes(), READ_BY_OTHERS)


def test_every_argument_with_a_default_is_passed_by_the_package(package: Package) -> None:
    check({name for names in package.unused_defaults().values() for name in names}, PASSED_BY_OTHERS)


def test_no_environment_variable_selects_an_implementation(package: Package) -> None:
    assert switches(package) == SWITCHES.keys()


def test_no_option_and_no_file_is_named_for_a_replaced_implementation(package: Package) -> None:
    files = [name.rpartition(".")[2] for name in package.text]
    assert old_names([*all_options(), *SWITCHES, *files]) == []


def test_leftovers_are_found(tmp_path: Path) -> None:
    files = {
        "main": 'from pack.new import run, LIMIT\nimport pack.by_name\nkernel = load("pack.kernel")\nrun(kernel)\n',
        "new": "def run(x): return _inner(x)\ndef _inner(x): ...\ndef run_slowly(x): return run_slowly(x) or _slow(x)\n"
        "def _slow(x): return Slow(x)\nclass Slow: ...\nLIMIT = 1\nSPARE: int = 2\n",
        "by_name": "",
        "kernel": 'import os\nos.environ.get("SLIPSTREAM_OLD_LOOP")\n',
        "replaced": "from pack.new import run\nclass Runner: ...\n",
        "shapes": "import pack.main\nfrom pack.specs import of\nof(1).specs(2)\n",
        "specs": "import pack.shapes\ndef of(x): return Shape(x)\ndef specs(x): ...\nclass Shape:\n"
        "    def __init__(self, x, y=0): self.x, self.count = x, y\n"
        "    def specs(self, size, depth=0, *, is_late=False): return self.size\n"
        "    @property\n    def half(self): return self.x\n"
        "    def again(self): return self.again()\n",
    }
    (tmp_path / "pack").mkdir()
    for name, text in {"__init__": "", **files}.items():
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    package = Package(tmp_path)
    assert package.unused_modules({"pack.main"}) == ["pack.replaced"]
    assert package.unused_names() == [
        "new.run_slowly", "new._slow", "new.Slow", "new.SPARE", "replaced.Runner", "specs.specs",
    ]  # fmt: skip
    assert package.unused_names({"new.run_slowly", "SPARE"}) == ["replaced.Runner", "specs.specs"]
    assert package.unused_methods() == ["Shape.again", "Shape.half"] and package.unread_attributes() == {"count"}
    assert package.unused_defaults() == {"Shape.__init__": ["y"], "Shape.specs": ["depth", "is_late"]}
    assert switches(package) == {"SLIPSTREAM_OLD_LOOP"}
    assert old_names(["SLIPSTREAM_OLD_LOOP", "sampler_v2", "legacy_pool", "threshold", "async_llm"]) == [
        "SLIPSTREAM_OLD_LOOP", "sampler_v2", "legacy_pool",
    ]  # fmt: skip
