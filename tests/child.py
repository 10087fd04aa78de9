"""The environment of Python processes that tests start."""

from __future__ import annotations

import os
import sys


def child_env(**more: str) -> dict[str, str]:
    """All of ours, so that a hidden GPU stays hidden and the device is the tests', and every place we import from: the
    package may be installed, or reached by PYTHONPATH or pytest's `pythonpath`, which a child does not see."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
