"""One idea per word: a public class name is used once in the package."""

import ast
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "slipstream"

ALLOWED = {  # name: reason
    "Request": "the scheduler's request, and the HTTP request under the name that Starlette gives it",
}


def public_classes(src: Path) -> dict[str, list[str]]:
    """Files by the name of the public class that they define at module level."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(src.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(src)))
    return found


def test_no_two_public_classes_share_a_name():
    classes = public_classes(SRC)
    assert len(classes) > 100
    assert {name: files for name, files in classes.items() if len(files) > 1 and name not in ALLOWED} == {}


def test_two_classes_of_one_name_are_found(tmp_path):
    (tmp_path / "one.py").write_text("class Twice: ...\nclass Once: ...\nclass _Private: ...\n")
    (tmp_path / "two.py").write_text("class Twice: ...\nclass _Private: ...\n")
    assert public_classes(tmp_path) == {"Twice": ["one.py", "two.py"], "Once": ["one.py"]}
