"""File names of a GGUF model that is split into several files: NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)


def part_paths(path: Path) -> list[Path]:
    """All files of the model that this file belongs to; this file alone if its name is not that of a part."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['name']}-{n:05}-of-{count:05}{match['ending']}") for n in range(1, count + 1)]


def model_name(path: Path) -> str:
    """The name of a model, whole or in parts."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["name"]


def first_parts(paths: list[Path]) -> list[Path]:
    """The files by which models are opened: whole files and first parts."""
    return list(dict.fromkeys(part_paths(path)[0] for path in paths))
