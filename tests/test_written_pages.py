"""Generated parts of the pages are what scripts/pages makes of docs/benchmark.json and of the code."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("pages_script", str(ROOT / "scripts/pages"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


MAX_WORDS = 50_000  # of all pages, generated ones too
MAX_BYTES = {"CHANGELOG.md": 4_000, "docs/performance.md": 10_000, "docs/log": 30_000}


def over_budget(root: Path) -> list[str]:
    """Pages, or all of them, that are longer than they may be, with their size."""
    num_words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages_in(root))
    found = [f"all pages: {num_words} words"] if num_words > MAX_WORDS else []
    for name, limit in MAX_BYTES.items():
        size = sum(page.stat().st_size for page in pages_in(root) if (root / name) in (page, page.parent))
        found += [f"{name}: {size} bytes"] if size > limit else []
    return found


def pages_in(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def stale(script: ModuleType, root: Path) -> list[str]:
    return sorted(name for name, text in script.files(root).items() if not script.is_current(root / name, text))


def test_the_pages_are_what_the_script_writes(script: ModuleType) -> None:
    assert stale(script, ROOT) == [], "run scripts/pages"


def test_a_figure_that_differs_is_noticed(script: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png", "log"))
    shutil.copy(ROOT / "README.md", tmp_path)
    figures = json.loads((tmp_path / "docs/benchmark.json").read_text())
    figures["tables"]["generation"]["rows"][0]["ours"] = 0.001
    (tmp_path / "docs/benchmark.json").write_text(json.dumps(figures))
    assert stale(script, tmp_path) == ["README.md", "docs/benchmark.svg", "docs/performance.md"]


def test_every_table_of_figures_is_on_a_page(script: ModuleType) -> None:
    tables = json.loads((ROOT / "docs/benchmark.json").read_text())["tables"]
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert [name for name in tables if f"<!-- pages: {name} -->" not in page] == []


def test_the_pages_are_within_their_budgets() -> None:
    assert over_budget(ROOT) == [], "cut what its reader does not need; the limits are in this file"


def test_a_page_over_its_budget_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs/log").mkdir(parents=True)
    (tmp_path / "README.md").write_text("word " * MAX_WORDS)
    (tmp_path / "docs/log/index.md").write_text("x" * 30_000)
    assert over_budget(tmp_path) == ["all pages: 50001 words"]
    (tmp_path / "docs/log/second.md").write_text("x")
    (tmp_path / "CHANGELOG.md").write_text("é" * 2_001)
    assert over_budget(tmp_path)[1:] == ["CHANGELOG.md: 4002 bytes", "docs/log: 30001 bytes"]


def test_every_package_says_what_it_is_for() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page.partition("<!-- pages: packages -->")[2].partition("<!-- end -->")[0]
    assert "|  |\n" not in table.partition("|---|")[2], "a package without a docstring in its __init__.py"


def test_sizes_of_packages_stay_on_the_page_while_they_are_about_right(script: ModuleType) -> None:
    row = next(line for line in script.package_table("").splitlines() if "`scheduler/`" in line)
    files, lines = (cell.strip(" k") for cell in row.split("|")[2:4])
    near = row.replace(f"| {lines}k |", f"| {float(lines) * 1.1:.1f}k |")
    far = row.replace(f"| {files} |", f"| {int(files) * 2} |")
    assert near in script.package_table(near)
    assert row in script.package_table(far)


CPU = '<properties><property name="cpu" value="%s"/></properties></testcase>'
RUN = f"""<testsuites><testsuite>
<testcase classname="tests.ops.test_a" name="one" time="9.5">{CPU % 1.5}
<testcase classname="tests.ops.test_a.TestB" name="two" time="9.0">{CPU % 2.0}
<testcase classname="tests.nn.models.test_c" name="three" time="1">{CPU % 1200}
<testcase classname="tests.test_d" name="four" time="0.4">{CPU % 0.4}
<testcase classname="tests.ops.test_e" name="five" time="99"><skipped/></testcase></testsuite></testsuites>"""


def test_seconds_of_a_run_are_summed_by_folder(script: ModuleType) -> None:
    assert script.seconds_table(RUN).splitlines()[2:] == [
        "| `tests/nn/` | 1 | 1,200 | `tests/nn/models/test_c.py`, 1,200 |",
        "| `tests/ops/` | 2 | 4 | `tests/ops/test_a.py`, 4 |",
        "| `tests/` | 1 | 0 | `tests/test_d.py`, 0 |",
        "| all | 4 | 1,204 |  |",
    ]


def test_seconds_of_a_run_stay_until_the_next_run(script: ModuleType) -> None:
    page = "Before\n<!-- pages: seconds -->\n\nold\n\n<!-- end -->\nafter"
    assert script.filled(page, {}) == page
    assert script.with_part(page, "seconds", "new") == page.replace("old", "new")
