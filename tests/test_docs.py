"""Files, links, flags and classes that the docs name exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.config.options import Options
from slipstream.parsers.families import NO_PARSER, REASONING_FORMATS, TOOL_CALL_FORMATS
from slipstream.serve.http.server.settings import ServerSettings
from syntax import nodes_of, walk

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PLACES = [ROOT, ROOT / "src/slipstream"]
NOT_OURS = {"2_Dense/", "2_LayerNorm/", "2_MultiVectorMask/"}  # folders of checkpoints
OTHER_NAMES = {  # of other APIs, of checkpoints, and metrics whose names are made of two parts
    "redacted_thinking", "in_proj_qkvz", "sentence_roberta_config", "modules_to_not_convert", "requests_aborted",
    "requests_refused", "slipstream_replica_open_requests", "slipstream_replica_rerouted_requests", "process_open_fds",
    "corpus_id",
}  # fmt: skip

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def missing_files(text: str) -> list[str]:
    """Paths in backticks that do not exist, complete or relative to the package or the tests; planned ones may be
    missing."""
    missing = []
    for line in text.splitlines():
        if line.lower().startswith(("planned", "later")):
            continue
        for path in re.findall(r"`([\w./*-]+(?:\.py|\.md|\.c|\.h|/))`", line):
            if path not in NOT_OURS and not files_at(path, [*PLACES, ROOT / "benchmarks", ROOT / "examples"]):
                missing.append(path)
    return missing


def missing_sources(text: str, beside: Path) -> list[str]:
    """Source files in backticks that do not exist, also not beside the file that names them."""
    places = [*PLACES, ROOT / "src", ROOT / "benchmarks", beside]
    return [path for path in re.findall(r"`([\w./*-]+\.(?:py|c|h))`", text) if not files_at(path, places)]


def files_at(path: str, places: Sequence[Path]) -> list[Path]:
    """Files and folders that a page means by a path from one of these places, or by a mere name anywhere under them."""
    if "/" not in path.rstrip("/"):
        places = [*places, *PLACES[1].rglob("*/"), *(ROOT / "tests").rglob("*/")]
    return [found for place in places for found in place.glob(path.rstrip("/"))]


def misplaced_names(text: str) -> list[str]:
    """Names that a page says are in a file, as `NAME` of `file.py` or `Name` (`file.py`), and that the file lacks."""
    found = re.findall(r"`(?:\w+\.)*(\w+)`(?: \(| of | in )`([\w/]+\.(?:py|c|h))`", re.sub(r"\s+", " ", text))
    files = [(name, files_at(path, PLACES)) for name, path in found]
    return [
        name
        for name, meant in files
        if meant and not any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in meant)
    ]


def headings(text: str) -> set[str]:
    """The anchors that GitHub and mkdocs generate from the headings of a page."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


def broken_links(text: str, folder: Path) -> list[str]:
    """Links to files that do not exist, and to headings that their page does not have."""
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        page = folder / path
        if "://" in link:
            continue
        if not page.exists():
            broken.append(path)
        elif anchor and anchor not in headings(page.read_text(encoding="utf-8") if path else text):
            broken.append(link)
    return broken


def unknown_flags(text: str, known: str) -> list[str]:
    options = {name.replace("_", "-") for kind in (Options, ServerSettings) for name in kind.__struct_fields__}
    flags = re.findall(r"(?<![\w-])--([a-z][a-z-]+)", re.sub(r"^docker .*", "", text, flags=re.MULTILINE))
    return [flag for flag in flags if flag.removeprefix("no-") not in options and f"--{flag}" not in known]


def unknown_classes(text: str, known: set[str]) -> list[str]:
    """CamelCase names in backticks that occur in no Python file of the project."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return [name for span in spans for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", span) if name not in known]


def unknown_identifiers(text: str, known: set[str]) -> list[str]:
    """snake_case names in backticks that occur in no source file, also not as metrics (slipstream_NAME, NAME_total)."""
    found = []
    for span in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(r"(?<![\w./*-])[a-z]+(?:_[a-z0-9]+)+(?![\w*])", span):
            plain = name.removesuffix("_total")
            if not {name, plain, f"slipstream_{plain}"} & known and plain not in OTHER_NAMES:
                found.append(name)
    return found


def broken_imports(text: str) -> list[str]:
    """Names that an example imports from our package and that are not there."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        for module, names in re.findall(r"^from (slipstream[\w.]*) import ([\w, ]+)", block, re.M):
            there = importlib.import_module(module) if importlib.util.find_spec(module) else None
            found += [f"{module}.{name}" for name in re.split(r",\s*", names) if not hasattr(there, name.strip())]
    return found


class Definitions:
    """Names that Python files define: members by class, with inherited ones, and all names."""

    def __init__(self, sources: list[str]) -> None:
        self.names: set[str] = set()
        self._members: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        for source in sources:
            for node in nodes_of(source):
                if isinstance(node, ast.ClassDef):
                    self._add_class(node)
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    self.names.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.names.add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    self.names.add(node.attr)

    def _add_class(self, node: ast.ClassDef) -> None:
        members = self._members[node.name]
        self._bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        for child in walk(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                members.add(child.name)
            elif isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
                members.add(child.id if isinstance(child, ast.Name) else child.attr)

    def has_member(self, name: str, member: str) -> bool:
        if member in self._members.get(name, ()):
            return True
        ours = [base for base in self._bases[name] if base in self._members]
        return any(self.has_member(base, member) for base in ours)


def unknown_members(text: str, ours: Definitions) -> list[str]:
    """`Class.member` without such a member, and `_names` that no file defines."""
    unknown = []
    for span in re.findall(r"`([^`\n]+)`", text):
        for name, member in re.findall(r"(?<![\w./])([A-Z]\w*)\.([a-z_]\w*)", span):
            if not ours.has_member(name, member):
                unknown.append(f"{name}.{member}")
        if (private := re.match(r"(_[A-Za-z]\w*)(\(.*\))?$", span)) and private[1] not in ours.names:
            unknown.append(private[1])
    return unknown


@pytest.fixture(scope="module")
def definitions() -> Definitions:
    files = [file for folder in ("src", "tests", "benchmarks") for file in ROOT.glob(f"{folder}/**/*.py")]
    return Definitions([file.read_text(encoding="utf-8") for file in files])


@pytest.fixture(scope="module")
def our_words() -> set[str]:
    folders = ("src", "tests", "benchmarks")
    files = [file for folder in folders for kind in ("py", "c", "h") for file in ROOT.glob(f"{folder}/**/*.{kind}")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    return words | {file.stem for file in files}


@pytest.fixture(scope="module")
def sources() -> str:
    """All sources that define flags: the command line, scripts and benchmarks."""
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("scripts/*"), *ROOT.glob("benchmarks/**/*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


@pages
def test_the_files_it_names_are_there(page: Path) -> None:
    assert not missing_files(page.read_text(encoding="utf-8"))


def test_no_cell_of_a_table_lists_a_file_twice() -> None:
    rows = [(page.name, row) for page in PAGES for row in page.read_text().splitlines() if row.startswith("| ")]
    assert len(rows) > 500
    assert [row for row in rows if re.search(r"(`[\w/]+\.py`), \1", row[1])] == []


def test_the_session_of_the_first_hour_shows_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/first-hour.md").read_text(), re.S)
    exec(block, {})
    first, second, third = capsys.readouterr().out.splitlines()
    assert "tokens 3+1 computed 3" in first and "tokens 3+2 computed 4" in second and "tokens 4+1" in third
    assert all(text in block for text in ("tokens 3+1 computed 3", "tokens 3+2 computed 4", "tokens 4+1"))


def test_the_files_that_sources_name_are_there() -> None:
    files = [file for kind in ("py", "c", "h") for file in ROOT.glob(f"src/**/*.{kind}")]
    missing = [(file.name, path) for file in files for path in missing_sources(file.read_text("utf-8"), file.parent)]
    assert missing == []


@pages
def test_names_are_in_the_files_that_it_gives_for_them(page: Path) -> None:
    assert not misplaced_names(page.read_text(encoding="utf-8"))


@pages
def test_its_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page.read_text(encoding="utf-8"), page.parent)


@pages
def test_the_flags_it_names_exist(page: Path, sources: str) -> None:
    assert not unknown_flags(page.read_text(encoding="utf-8"), sources)


PRESENT = [
    page for page in PAGES if page.parent.name != "log" and page.name != "CHANGELOG.md"
]  # history is not checked


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_the_classes_it_names_exist(page: Path, our_words: set[str]) -> None:
    assert not unknown_classes(page.read_text(encoding="utf-8"), our_words)


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_the_members_and_private_names_exist(page: Path, definitions: Definitions) -> None:
    assert not unknown_members(page.read_text(encoding="utf-8"), definitions)


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_the_identifiers_it_names_exist(page: Path, our_words: set[str]) -> None:
    if page.name != "vllm.md":  # vLLM's names; `api/test_vllm_names.py` checks them
        assert not unknown_identifiers(page.read_text(encoding="utf-8"), our_words)


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_its_examples_import_what_exists(page: Path) -> None:
    assert not broken_imports(page.read_text(encoding="utf-8"))


def source_files(text: str) -> list[str]:
    """Files of the package in backticks."""
    return [path for path in re.findall(r"`([\w./]+\.(?:py|c|h))`", text) if files_at(path, [PLACES[1]])]


def test_pages_for_users_name_no_source_files() -> None:
    """Engineers find them on the pages about how it works."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("How it works:")[0]
    pages = [ROOT / "docs" / name for name in re.findall(r": ([\w-]+\.md)", nav)]
    assert len(pages) > 15
    named = {page.name: source_files(page.read_text(encoding="utf-8")) for page in pages if page.name != "README.md"}
    assert {name: found for name, found in named.items() if found} == {}
    assert source_files("`scheduler/waiting.py`, `waiting.py`, `tests/test_docs.py`") == [
        "scheduler/waiting.py", "waiting.py"
    ]  # fmt: skip


def test_the_parsers_of_the_docs_are_those_of_the_engine() -> None:
    page = (ROOT / "docs/tools-and-reasoning.md").read_text(encoding="utf-8")
    for flag, formats in (("--tool-call-parser", TOOL_CALL_FORMATS), ("--reasoning-parser", REASONING_FORMATS)):
        (row,) = re.findall(rf"^\| `{flag}` \|(.+)\|$", page, re.M)
        assert sorted(re.findall(r"`([\w-]+)`", row)) == sorted([*formats, NO_PARSER])
    num_names, num_formats = len(TOOL_CALL_FORMATS), len(set(map(repr, TOOL_CALL_FORMATS.values())))
    assert f"{num_formats} output formats under vLLM's {num_names} names" in page


def test_a_member_or_private_name_that_is_gone_is_noticed() -> None:
    ours = Definitions(
        ["class Base:\n def kept(self): self.field = 1\nclass Ring(Base, Protocol):\n size: int = 0\ndef _open(): ..."]
    )
    text = "`Ring.size`, `Ring.kept`, `Ring.field`, `Ring.gone`, `_open`, `_open(a)`, `_shut`, `Block.split`, `a.b`"
    assert unknown_members(text, ours) == ["Ring.gone", "_shut", "Block.split"]


def test_what_is_not_there_is_noticed(sources: str, our_words: set[str]) -> None:
    text = (
        "See `engine/nowhere.py`, `step.py` and `runner/`, [this](docs/nothing.md), [that](README.md#nothing), "
        f"with `--no-such-flag` or `--depth`; `StepPlan.rows` and `{'Step'}Plank`."
    )
    assert missing_files(text) == ["engine/nowhere.py"]
    assert missing_sources(f"{text} `tiles.py` `triton/row.py`", ROOT) == ["engine/nowhere.py", "triton/row.py"]
    assert misplaced_names("`StepPlan` (`step.py`), `DrawEdits` in `step.py`, `NO_SUCH` of `step.py`") == ["NO_SUCH"]
    assert broken_links(text, ROOT) == ["docs/nothing.md", "README.md#nothing"]
    assert unknown_flags(text, sources) == ["no-such-flag"]
    planted = f"`steps_total`, `max_model_len=5`, `{'no_such'}_plank(x)`, `GET /v1/no_matter`"
    assert unknown_identifiers(planted, our_words) == [f"{'no_such'}_plank"]
    block = "```python\nfrom slipstream import LLM, Nothing\nfrom slipstream.nowhere import LLM\n```"
    assert broken_imports(block) == ["slipstream.Nothing", "slipstream.nowhere.LLM"]
    assert unknown_classes(text, our_words) == [f"{'Step'}Plank"]  # in two parts, since this file is searched too
