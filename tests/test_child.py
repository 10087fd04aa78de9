"""Child processes of tests get the environment of the tests, and are seen to end."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from child import child_env, is_alive
from syntax import nodes_of


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


def test_a_process_lives_until_its_last_thread_ends():
    code = (
        "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start();"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=child_env()) as child:
        stat = Path(f"/proc/{child.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":  # its first thread has ended
            assert child.poll() is None
        assert is_alive(child.pid)
        child.kill()
    assert not is_alive(child.pid)


MAKERS = ("run", "Popen", "check_call", "check_output", "call")


def bare_children(source: str) -> list[int]:
    """Lines that start Python without `child_env`."""
    found = []
    for node in nodes_of(source):
        match node:
            case ast.Dict(keys=keys) if any(
                isinstance(key, ast.Constant) and key.value == "PYTHONPATH" for key in keys
            ):
                found.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr=name), args=[command, *_], keywords=keywords) if name in MAKERS:
                starts_python = "sys.executable" in ast.unparse(command)
                if starts_python and not any(keyword.arg == "env" for keyword in keywords):
                    found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run([sys.executable, '-c', code], check=True)",
        "subprocess.Popen([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': 'src'})",
        "env = {'PYTHONPATH': os.pathsep.join(sys.path)}",
    ],
)
def test_children_with_another_import_path_are_found(source):
    assert bare_children(source) == [1]
    assert not bare_children("subprocess.run([sys.executable, '-c', code], env=child_env())")


def test_every_child_of_a_test_imports_from_where_the_test_does():
    tests = Path(__file__).parent
    found = {
        str(path.relative_to(tests)): lines
        for path in sorted(tests.rglob("*.py"))
        if path.name != "child.py" and (lines := bare_children(path.read_text(encoding="utf-8")))
    }
    assert found == {}
