"""The host half, the package and the command line load without torch. There are no import cycles."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from child import child_env
from import_graph import import_cycles, import_graph
from slipstream.serve.cli.commands import MODULES
from syntax import parse

SRC = Path(__file__).parents[1] / "src"

PROBE = """
import json, sys
sys.path.insert(0, {src!r})

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ImportError(f"{{name}} was imported")

sys.meta_path.insert(0, Forbid())
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def load(code: str, forbidden: tuple[str, ...] = ("torch", "triton", "transformers")) -> list[str]:
    """Modules that `code` loads in a fresh interpreter in which `forbidden` cannot be imported."""
    script = PROBE.format(src=str(SRC), forbidden=forbidden, code=code)
    done = subprocess.run([sys.executable, "-c", script], env=child_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def modules_in(*places: str) -> list[str]:
    """Names of all modules of some packages, and of single modules, under src/slipstream."""
    names = []
    for place in places:
        path = SRC / "slipstream" / place
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for file in sorted(files):
            assert file.exists(), file
            if file.name != "in_process.py":  # builds the device half
                names.append(".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"))
    assert names
    return names


def test_the_hook_catches_an_import_of_torch():
    with pytest.raises(AssertionError, match="torch was imported"):
        load("import torch")


def test_importing_slipstream_loads_next_to_nothing():
    loaded = load("import slipstream", ("torch", "numpy", "msgspec", "rich"))
    assert {name for name in loaded if name.startswith("slipstream")} == {"slipstream", "slipstream.base"}
    assert len(loaded) < 40, loaded


def test_a_server_handles_signals_before_it_imports_anything_else():
    loaded = load("import slipstream.serve.cli.main", ("torch", "numpy", "msgspec", "rich", "ssl", "pathlib"))
    packages = {"slipstream", "slipstream.base", "slipstream.serve", "slipstream.serve.cli"}
    ours = {name for name in loaded if name.startswith("slipstream")}
    assert ours == packages | {"slipstream.serve.cli.main", "slipstream.serve.signals"}
    assert len(loaded) < 50, loaded


def test_sampling_params_come_without_torch():
    load("from slipstream import SamplingParams, RequestOutput, CompletionOutput; SamplingParams(temperature=0.5)")


@pytest.mark.parametrize(
    "places",
    [
        ("base", "params", "contracts"),
        ("checkpoint", "config"),
        ("text", "parsers"),
        ("metrics",),
        ("scheduler",),
        ("engine/core", "engine/lanes", "engine/model_description", "engine/pacing"),
        ("record",),
        ("front", "transport"),
        ("serve",),
    ],
    ids=lambda places: places[0],
)
def test_the_host_half_loads_without_torch(places):
    load("\n".join(f"import {name}" for name in modules_in(*places)))


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        *([name, "--help"] for name in ("chat", "generate", "serve", "run-batch", "bench", "plan", "doctor")),
        ["version"],
        ["chat", "--x"],
    ],
)
def test_the_command_line_answers_without_anything_heavy(argv):
    code = f"from slipstream.serve.cli.main import main\nmain({argv!r})"
    loaded = load(code, ("torch", "numpy", "rich", "jinja2", "tokenizers", "gguf", "safetensors"))
    assert len(loaded) < 200, len(loaded)


def test_a_command_loads_no_other_command():
    loaded = load("from slipstream.serve.cli.main import main\nmain(['chat', '--help'])")
    commands = {f"slipstream.serve.cli.{name}" for name in MODULES.values()}
    assert commands.intersection(loaded) == {"slipstream.serve.cli.chat"}


def test_an_engine_loads_nothing_that_only_structured_output_needs():
    modules = ("scheduler.scheduler", "engine.core", "record.recorder", "front.inputs", "transport.inline")
    loaded = load("\n".join(f"import slipstream.{name}" for name in modules), ("torch", "llguidance"))
    rest = ("slipstream.scheduler.grammar.translate", "slipstream.scheduler.grammar.schema_nodes", "numpy.random")
    assert not set(rest).intersection(loaded)


def test_no_module_imports_itself_through_others():
    cycles = import_cycles(import_graph(SRC))
    assert not cycles, f"import cycles (imports under TYPE_CHECKING count): {[sorted(cycle) for cycle in cycles]}"


def test_an_import_cycle_under_type_checking_is_found(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from pack.two import Two\n")
    (package / "two.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack import three\n")
    (package / "three.py").write_text("def f():\n    import pack.one\n")
    (package / "four.py").write_text("import pack.one, os\n")
    assert import_cycles(import_graph(tmp_path)) == [frozenset({"pack.one", "pack.two", "pack.three"})]


def hidden_names(src: Path) -> list[str]:
    """Names that a package defines and that are also modules of it: importing the module replaces what was defined. A
    package that imports a name from the module of that name has imported the module before."""
    found = []
    for init in sorted(src.rglob("__init__.py")):
        modules = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
        for node in parse(init.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(targets=targets):
                    names = [target.id for target in targets if isinstance(target, ast.Name)]
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names = [name]
                case ast.ImportFrom(module=str(module), names=aliases):
                    package = ".".join(init.parent.relative_to(src).parts)
                    names = [each.asname or each.name for each in aliases if module != package]
                    names = [name for name in names if module != f"{package}.{name}"]
                case _:
                    names = []
            found += [f"{init.parent.relative_to(src).as_posix()}: {name}" for name in names if name in modules]
    return found


def test_no_module_hides_a_name_of_its_package():
    assert hidden_names(SRC) == []


def test_a_name_that_a_module_hides_is_found(tmp_path):
    (tmp_path / "pack").mkdir()
    for module in ("route", "draw", "near", "far", "used"):
        (tmp_path / "pack" / f"{module}.py").touch()
    (tmp_path / "pack" / "__init__.py").write_text(
        "from pack import used\nfrom pack.near import near\nfrom pack.used import far\n"
        "route = by_device(used.route)\ndef draw(): ...\n"
    )
    assert hidden_names(tmp_path) == ["pack: far", "pack: route", "pack: draw"]


def test_an_unknown_name_is_named():
    import slipstream

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        slipstream.Nothing  # noqa: B018
    assert {"LLM", "AsyncEngine", "SamplingParams"} <= set(dir(slipstream))
