"""Law 10: one implementation at a time. A rewrite leaves no file, no function and no switch of what it replaced."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from import_graph import import_graph, module_name
from slipstream.config.options import Options
from slipstream.serve.cli.commands import MODULES
from slipstream.serve.http.settings import ServerSettings

SRC = Path(__file__).parents[2] / "src"

STARTED = {"slipstream.serve.cli.main", "slipstream.device.sync_check.__main__"}  # by pyproject.toml, by python -m
USED_BY_OTHERS = {  # top-level names that no code of the package uses: reason
    "slipstream.logits_processor.process_dict_updates": "users' logits processors call it, as vLLM's",
    "slipstream.ops.dispatch.validating": "for debugging: compares kernels with their references in a running engine",
    "slipstream.ops.quantized.reference.scaled_linear": "the oracle of the kernels (law 8); the layer dequantises",
    "slipstream.ops.quantized.reference.integer_linear": "likewise",
}
# Variables that are no option of `serve`, whose environment variables are named after the option.
SWITCHES = {
    "SLIPSTREAM_NATIVE": "0: no C compiler is used, and the references run",
    "SLIPSTREAM_RANKS_SHARE_GPU": "tests of several ranks on one GPU",
    "SLIPSTREAM_SYNC_CHECK": "the sync detector",
    "SLIPSTREAM_PARENT_PID": "passed to a child process",
}
OLD = {"old", "legacy", "deprecated", "obsolete", "former", "experimental", "fallback", "v0", "v1", "v2", "v3"}


class Package:
    """Modules under a folder, with the modules and top-level names that they use."""

    def __init__(self, src: Path) -> None:
        self.text = {module_name(file, src): file.read_text(encoding="utf-8") for file in src.rglob("*.py")}
        self.users: dict[str, set[str]] = defaultdict(set)  # modules by one that they import or name in a string
        for name, imported in import_graph(src).items():
            strings = set(re.findall(r"[\"']([\w.]+)[\"']", self.text[name]))
            for other in imported | (strings & self.text.keys()) - {name}:
                self.users[other].add(name)
        self._words = {name: Counter(re.findall(r"\w+", text)) for name, text in self.text.items()}

    def unused_modules(self, started: set[str]) -> list[str]:
        packages = {name.rpartition(".")[0] for name in self.text}
        return sorted(self.text.keys() - packages - self.users.keys() - started)

    def unused_names(self) -> list[str]:
        """Top-level names that occur once in their module and not at all in the modules that use it."""
        return [
            f"{module}.{name}"
            for module, text in sorted(self.text.items())
            for name in _top_level(text)
            if self._words[module][name] == 1 and not any(self._words[user][name] for user in self.users[module])
        ]


def _top_level(text: str) -> list[str]:
    names = []
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [each.id for each in targets if isinstance(each, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return [name for name in names if not name.startswith("__")]


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


def test_every_function_class_and_constant_is_used_by_the_package(package: Package) -> None:
    unused = {name for name in package.unused_names() if not name.endswith(".add_command")}  # called by name
    assert unused - USED_BY_OTHERS.keys() == set()
    assert USED_BY_OTHERS.keys() - unused == set(), "exceptions that are not needed any more"


def test_no_environment_variable_selects_an_implementation(package: Package) -> None:
    assert switches(package) == SWITCHES.keys()


def test_no_option_and_no_file_is_named_for_a_replaced_implementation(package: Package) -> None:
    files = [name.rpartition(".")[2] for name in package.text]
    assert old_names([*all_options(), *SWITCHES, *files]) == []


def test_leftovers_are_found(tmp_path: Path) -> None:
    files = {
        "main": 'from pack.new import run, LIMIT\nimport pack.by_name\nkernel = load("pack.kernel")\nrun(kernel)\n',
        "new": "def run(x): return _inner(x)\ndef _inner(x): ...\ndef run_slowly(x): ...\nLIMIT = 1\nSPARE: int = 2\n",
        "by_name": "",
        "kernel": 'import os\nos.environ.get("SLIPSTREAM_OLD_LOOP")\n',
        "replaced": "from pack.new import run\nclass Runner: ...\n",
    }
    (tmp_path / "pack").mkdir()
    for name, text in {"__init__": "", **files}.items():
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    package = Package(tmp_path)
    assert package.unused_modules({"pack.main"}) == ["pack.replaced"]
    assert package.unused_names() == ["pack.new.run_slowly", "pack.new.SPARE", "pack.replaced.Runner"]
    assert switches(package) == {"SLIPSTREAM_OLD_LOOP"}
    assert old_names(["SLIPSTREAM_OLD_LOOP", "sampler_v2", "legacy_pool", "threshold", "async_llm"]) == [
        "SLIPSTREAM_OLD_LOOP", "sampler_v2", "legacy_pool",
    ]  # fmt: skip
