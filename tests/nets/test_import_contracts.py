"""The import contracts hold, and each is broken by an import that is planted into a copy of the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from child import child_env

ROOT = Path(__file__).parents[2]

pytest.importorskip("importlinter", reason="import-linter is not installed")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run(['--no-cache']))"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=child_env(PYTHONPATH=os.pathsep.join([str(folder / "src"), *filter(None, sys.path)])),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src" / "slipstream", tmp_path / "src" / "slipstream")
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def test_the_contracts_hold(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout


PLANTED = {
    "Imports point down": ("scheduler/outputs.py", "from slipstream.runner import results"),
    "Inside the runner": ("runner/rows.py", "from slipstream.runner import drafter"),
    "Inside ops": ("ops/elementwise/reference.py", "from slipstream.ops.gemm import dequant"),
    "Inside nn": ("nn/layers/norm.py", "from slipstream.nn.families import decoder"),
    "Inside the HTTP server": ("serve/http/server/app.py", "from slipstream.serve.http import table"),
    "The host half never imports torch": ("scheduler/planners.py", "import torch"),
}


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(copy: Path, contract: str) -> None:
    file, line = PLANTED[contract]
    path = copy / "src" / "slipstream" / file
    path.write_text(path.read_text() + f"\n{line}\n")
    done = lint(copy)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout
