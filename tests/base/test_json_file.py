"""Files of a model's folder: pipes, devices and endless files are refused at once."""

from __future__ import annotations

import os

import pytest

from slipstream.base.errors import BadCheckpoint, BadTokenizer
from slipstream.base.files import MAX_READ, load_json, read_utf8
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.locate import locate
from slipstream.ranks.ranks import RankAdapters
from slipstream.text.tokenizer import Tokenizer


def test_a_pipe_or_a_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe.gguf", "zero.json", "."):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            load_json(tmp_path / name)
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        GgufFile.open(locate(str(tmp_path)).path)


def test_a_pipe_beside_a_tokenizer_or_an_adapter_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(BadTokenizer, match="not a regular file"):
        Tokenizer.load(tmp_path)

    class Memory:
        def read(self, buffer: int, path: str) -> bytes:
            return b"digest"

    os.mkfifo(tmp_path / "adapter_model.bin")
    assert RankAdapters(Memory()).read(0, str(tmp_path))


def test_a_file_without_end_is_not_read(tmp_path):
    with open(tmp_path / "sparse.json", "wb") as file:
        file.truncate(MAX_READ + 1)
    with pytest.raises(OSError, match="at most"):
        load_json(tmp_path / "sparse.json")


def test_line_ends_and_links(tmp_path):
    (tmp_path / "a").write_bytes(b"one\r\ntwo\rthree\n")
    (tmp_path / "b").symlink_to("a")
    assert read_utf8(tmp_path / "b") == (tmp_path / "a").read_text()
