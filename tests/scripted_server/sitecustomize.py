"""Processes with this folder in PYTHONPATH have cores of tests/scripted_server/build.py, without torch."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path


class ScriptedBuild:
    """Finds our build.py in place of slipstream.engine.build."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "slipstream.engine.build":
            return None
        return spec_from_file_location(name, Path(__file__).with_name("build.py"))


sys.meta_path.insert(0, ScriptedBuild)
