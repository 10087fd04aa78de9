"""Reads the JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load_json(path: Path) -> Any:
    """Returns the content of a file. Raises OSError, or ValueError if the file is not JSON or is nested too deeply."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:  # no ValueError, which callers turn into an error that names the file
        raise ValueError("it is nested too deeply") from None
