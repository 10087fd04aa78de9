"""No process of ours runs code from the current directory: a model's folder may bring a dis.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from child import child_env
from serve.server_process import ServerProcess
from slipstream.base.processes import child_environment
from slipstream.serve.bench import tables

# modules of the standard library that some process of ours imports, early or late
NAMES = ("dis", "inspect", "uuid", "queue", "selectors", "socket", "asyncio", "torch", "slipstream", "sitecustomize")
PLANT = """
import os, sys
with open({marks!r}, "a") as file:
    file.write(" ".join(["{name}", *sys.argv]) + "\\n")
raise ImportError("{name} of the current directory was run")
"""
SCRIPT = """#!{python}
import sys
from slipstream.serve.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def planted(tmp_path, tiny_folder):
    """A model's folder with code in it, and the file that the code writes to when it is run."""
    folder, marks = tmp_path / "model", tmp_path / "marks"
    shutil.copytree(tiny_folder, folder)
    for name in NAMES:
        (folder / f"{name}.py").write_text(PLANT.format(name=name, marks=str(marks)))
    return folder, marks


@pytest.fixture
def script(tmp_path):
    """The console script as pip writes it."""
    path = tmp_path / "bin" / "slipstream"
    path.parent.mkdir()
    path.write_text(SCRIPT.format(python=sys.executable))
    return [sys.executable, str(path)]


def test_planted_code_is_run_where_the_current_directory_is_searched(planted):
    """The net itself: what `python -m` does with such a folder. Without site (-S), because a .pth file of an installed
    package may import `inspect` at start-up, and a module that is loaded is not searched for."""
    folder, marks = planted
    done = subprocess.run(
        [sys.executable, "-S", "-m", "inspect"], cwd=folder, env=child_env(), capture_output=True, text=True
    )
    assert "inspect of the current directory was run" in done.stderr
    assert marks.read_text().startswith("inspect")


def test_a_server_started_in_a_models_folder_runs_none_of_its_code(planted, script):
    """Its own process, the core, and two front ends."""
    folder, marks = planted
    server = ServerProcess(".", "--workers", "2", "--max-model-len", "64", command=script, cwd=folder)
    server.until("ready: serving")  # the other one
    status, answer = server.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
    assert status == 200, answer
    assert server.stop() == 0, server.lines[-5:]
    assert not marks.exists(), marks.read_text()


def test_an_empty_entry_of_pythonpath_is_not_handed_on(planted, monkeypatch):
    """`PYTHONPATH=$PYTHONPATH:/x` leaves one, and Python reads it as the current directory."""
    folder, marks = planted
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", *sys.path[1:], ""]))
    program = "import dis, json, sys; print(json.dumps(sys.path))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=child_environment(), capture_output=True, text=True
    )
    assert str(folder) not in json.loads(done.stdout) and not marks.exists(), done.stderr


def test_a_measured_start_runs_none_of_the_folders_code(planted, monkeypatch):
    folder, marks = planted
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tables, "_PROGRAM", "import dis, slipstream; print('[\"nothing\", 0, 0, 0]')")
    assert [start.cold for start in tables.measure_startup({})] == [True, False]
    assert not marks.exists(), marks.read_text()
