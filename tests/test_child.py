"""Processes that tests start see what the tests see."""

from __future__ import annotations

import subprocess
import sys

from child import child_env


def test_a_child_imports_from_where_we_do_and_keeps_our_environment(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "only_by_path.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.syspath_prepend(tmp_path / "package")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    code = "import os, only_by_path, slipstream; print(os.environ['SLIPSTREAM_DEVICE'], os.environ['MORE'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=child_env(MORE="3"), capture_output=True, encoding="utf-8"
    )
    assert (done.stdout, done.stderr) == ("-1\ncpu 3\n", "")
