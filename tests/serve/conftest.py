import io
import sys

import pytest

from serve.fake_llm import FakeLLM
from serve.server_process import ServerProcess
from slipstream.serve.cli.main import main
from tiny import write_tiny
from tiny_tokenizer import write_byte_tokenizer


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All that a front end reads of a model: its tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="session")
def tiny_server(tiny_folder, tmp_path_factory):
    """A server process for all tests that leave it as it was. Its end is a test too: it counts its pages and rows."""
    server = ServerProcess(
        f"tiny={tiny_folder}", "--max-model-len", "256", "--api-key", "key", "--admin-key", "root", "--dtype",
        "float64", "--batch-dir", str(tmp_path_factory.mktemp("batches") / "store"),
    )  # fmt: skip
    yield server
    assert server.stop() == 0, server.lines[-5:]


@pytest.fixture(scope="session")
def pooling_folders(tmp_path_factory):
    """A model of each kind: of vectors, classes, one score, weights of words, and one that continues text."""
    from tiny_encoder import write_tiny_encoder  # torch and transformers, which most tests here do without

    root = tmp_path_factory.mktemp("pooling")
    kinds = {"classes": dict(task="ForSequenceClassification"), "vectors": {}, "words": dict(task="ForMaskedLM")}
    kinds["ranker"] = dict(task="ForSequenceClassification", num_labels=1)
    return {
        name: str(write_tiny_encoder(root / name, seed=place, **how)) for place, (name, how) in enumerate(kinds.items())
    }


@pytest.fixture(scope="session")
def pooling_server(tiny_folder, pooling_folders):
    server = ServerProcess(
        f"chat={tiny_folder}", *(f"{name}={folder}" for name, folder in pooling_folders.items()), "--dtype", "float32",
        "--num-pages", "64", "--max-inputs", "64", "--log-level", "info",
    )  # fmt: skip
    yield server
    assert server.stop() == 0, server.lines[-5:]
