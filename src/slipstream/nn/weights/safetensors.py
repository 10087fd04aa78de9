"""Weights of a folder of safetensors files, single or sharded, through a memory map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.locate import weight_paths
from slipstream.nn.weights.source import SourceTensor, WeightSource
from slipstream.nn.weights.torch_file import TorchFileSource


def open_folder(folder: Path) -> WeightSource:
    """The weights of a folder: safetensors files, else files of torch.save."""
    kind, files = weight_paths(folder)
    return SafetensorsSource(files) if kind == "safetensors" else TorchFileSource(files)


def open_file(stem: Path) -> WeightSource | None:
    """A file of a few tensors, by its path without the suffix; None if there is none."""
    whole = stem.with_name(f"{stem.name}.safetensors")
    if whole.is_file():
        return SafetensorsSource([whole])
    for ending in ("pt", "bin"):
        path = stem.with_name(f"{stem.name}.{ending}")
        if path.is_file():
            return TorchFileSource([path])
    return None


class SafetensorsSource:
    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[SourceTensor]:
        """File by file. A file stays open until all its tensors are read."""
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


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raises errors of the library as BadCheckpoint with the name of the file."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BadCheckpoint(f"{path} is corrupt or truncated ({error}); download it again") from None
