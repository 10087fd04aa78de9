"""Standard streams that are closed, not UTF-8, or in another encoding than UTF-8."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from child import child_env
from serve.fake_llm import FakeLLM
from slipstream.serve.cli.main import main


def stream(data: bytes = b"", encoding: str = "ascii", tty: bool = False) -> io.TextIOWrapper:
    made = io.TextIOWrapper(io.BytesIO(data), encoding=encoding)
    made.isatty = lambda: tty
    return made


def run(monkeypatch, *argv: str, stdin: io.TextIOWrapper, stdout: io.TextIOWrapper) -> tuple[int, bytes]:
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stdout", stdout)
    code = main(argv, FakeLLM)
    stdout.flush()
    return code, stdout.buffer.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_pipes_carry_utf_8_whatever_the_locale(monkeypatch, command, encoding):
    code, out = run(monkeypatch, command, stdin=stream("日本 é".encode(), encoding), stdout=stream(encoding=encoding))
    assert code == 0 and "日本 é" in out.decode()
    marked = stream("日本 é".encode("utf-8-sig"), encoding)
    assert run(monkeypatch, command, stdin=marked, stdout=stream(encoding=encoding)) == (0, out)


def test_a_terminal_shows_escapes_for_what_it_lacks(monkeypatch):
    out = stream(encoding="latin-1", tty=True)
    code, data = run(monkeypatch, "chat", "日 é", stdin=stream(), stdout=out)
    assert code == 0 and b"\\u65e5 \xe9" in data


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_input_that_is_not_utf_8_is_one_line(monkeypatch, capsys, command):
    code, out = run(monkeypatch, command, stdin=stream(b"caf\xe9\n", "utf-8"), stdout=stream())
    assert (code, out) == (2, b"")
    assert capsys.readouterr().err == (
        "slipstream: standard input is not UTF-8 text: it has the byte 0xe9; convert it first\n"
    )


def closed(*numbers: int):
    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


@pytest.mark.parametrize("numbers", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_the_null_device(numbers, tmp_path):
    """Through the real program, which must not crash, nor write what it prints into a file that got the number."""
    command = [sys.executable, "-m", "slipstream.serve.cli.main", "generate"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", env=child_env(),
        preexec_fn=closed(*numbers),
    )  # fmt: skip
    told = "" if 2 in numbers else "slipstream: there is no prompt; "
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr[: len(told) or None] == told and "Traceback" not in done.stderr
