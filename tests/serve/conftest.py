import io
import sys

import pytest

from serve.fake_llm import FakeLLM
from slipstream.serve.cli.main import main


class Terminal:
    """Runs `slipstream` in this process with a fake LLM and a stdin of choice."""

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.llm = None
        self.kind = FakeLLM

    def open(self, **options):
        self.llm = self.kind(**options)
        return self.llm

    def run(self, *argv, stdin="", tty=False):
        """(exit code, stdout, stderr)"""
        stream = io.StringIO(stdin)
        stream.isatty = lambda: tty
        self.monkeypatch.setattr(sys, "stdin", stream)
        code = main(argv, self.open)
        out, err = self.capsys.readouterr()
        return code, out, err


@pytest.fixture
def terminal(monkeypatch, capsys):
    return Terminal(monkeypatch, capsys)
