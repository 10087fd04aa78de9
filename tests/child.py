"""The environment of Python processes that tests start."""

from __future__ import annotations

import os
import sys


def child_env(*folders: str, **more: str) -> dict[str, str]:
    """The environment of this process, so that the child uses the same device, with all import paths in PYTHONPATH: the
    package may be found through pytest's `pythonpath`, which a child does not inherit. `folders` come before them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *filter(None, sys.path)]), **more}
