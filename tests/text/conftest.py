from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.locate import LocatedModel
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="session")
def smollm_file(default_model: LocatedModel) -> GgufFile:
    return GgufFile(default_model.path)


@pytest.fixture(scope="session")
def smollm(smollm_file: GgufFile) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_file)


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    return tmp_path
