"""Hooks of mkdocs.yml: pages of the repository's root join the site, and links between them and docs/ keep working.

README, ARCHITECTURE, CONTRIBUTING and CHANGELOG stay in the root. In the site they are pages beside those of docs/.
Links to files that are not pages (source, examples, deploy) become plain text there. A comment `site: NAME` becomes a
part that scripts/pages makes.
"""

from __future__ import annotations

import functools
import posixpath
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PART = re.compile(r"<!-- site: (\S+) -->")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    path = page.file.src_uri  # in the site; pages of docs/ lie one folder deeper in the repository
    place = path if path in ROOT_PAGES else f"docs/{path}"

    def replace(match: re.Match[str]) -> str:
        picture, words, link = match.groups()
        target, mark, anchor = link.partition("#")
        if "://" in link or not target:
            return match.group(0)
        found = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if found.startswith("docs/"):
            found = found.removeprefix("docs/")
        elif found not in ROOT_PAGES:
            return words
        if files.get_file_from_path(found) is None and not (ROOT / "docs" / found).exists():
            return match.group(0)  # mkdocs reports it
        return f"{picture}[{words}]({posixpath.relpath(found, posixpath.dirname(path) or '.')}{mark}{anchor})"

    return PART.sub(lambda match: _parts()[match[1]](), LINK.sub(replace, markdown))


@functools.cache
def _parts() -> dict[str, Any]:
    path = str(ROOT / "scripts" / "pages")
    loader = SourceFileLoader("pages", path)
    module = module_from_spec(spec_from_loader("pages", loader))
    loader.exec_module(module)
    return module.PARTS
