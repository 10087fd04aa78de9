"""Weights from a folder of safetensors files, whole or sharded, through a memory map."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.errors import BadCheckpoint
from slipstream.nn.weights.source import SourceTensor

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    def __init__(self, folder: Path) -> None:
        self.files = _files(folder)

    def __iter__(self) -> Iterator[SourceTensor]:
        """File by file. A file stays open as long as one of its tensors is still to be read."""
        for path in self.files:
            with _named(path):
                file: Any = safe_open(path, framework="pt")
                names = list(file.keys())
            for name in names:
                with _named(path):
                    header = file.get_slice(name)
                    shape, kind = tuple(header.get_shape()), header.get_dtype()
                yield SourceTensor(name, shape, kind, partial(_read, file, path, name))


def _read(file: Any, path: Path, name: str) -> torch.Tensor:
    with _named(path):
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        try:
            shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            files = [folder / shard for shard in sorted(shards)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise BadCheckpoint(f"{folder / INDEX} is broken; download it again") from None
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadCheckpoint(
                f"{folder} lacks {len(missing)} of {len(files)} weight files, {missing[0]} first; download them again"
            )
        return files
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    raise BadCheckpoint(
        f"{folder} has neither {WHOLE} nor {INDEX}; convert its weights to safetensors, "
        "or set load_format to dummy to run random ones"
    )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns what the library says of a file into our error with the file's name."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BadCheckpoint(f"{path} is broken or cut short ({error}); download it again") from None
