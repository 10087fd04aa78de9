"""Weights of a folder of safetensors files, single or sharded, through a memory map; chooses the files of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.config.weight_files import INDEX, TORCH_INDEX, TORCH_WHOLE, WHOLE, no_weights
from slipstream.errors import BadCheckpoint
from slipstream.nn.weights.source import SourceTensor, WeightSource
from slipstream.nn.weights.torch_file import TorchFileSource


def open_folder(folder: Path) -> WeightSource:
    """The weights of a folder: safetensors files, else files of torch.save."""
    has_ours = any((folder / name).exists() for name in (WHOLE, INDEX))
    if not has_ours and any((folder / name).exists() for name in (TORCH_WHOLE, TORCH_INDEX)):
        return TorchFileSource(_files(folder, TORCH_WHOLE, TORCH_INDEX))
    return SafetensorsSource(folder)


def open_file(stem: Path) -> WeightSource | None:
    """A file of a few tensors, by its path without the suffix; None if there is none."""
    whole = stem.with_name(f"{stem.name}.safetensors")
    if whole.is_file():
        return SafetensorsSource(stem.parent, [whole])
    for ending in ("pt", "bin"):
        path = stem.with_name(f"{stem.name}.{ending}")
        if path.is_file():
            return TorchFileSource([path])
    return None


class SafetensorsSource:
    def __init__(self, folder: Path, files: list[Path] | None = None) -> None:
        self.files = _files(folder, WHOLE, INDEX) if files is None else files

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


def _files(folder: Path, whole: str, index: str) -> list[Path]:
    if (folder / whole).is_file():
        return [folder / whole]  # preferred to an index, as in transformers
    if (folder / index).exists():
        try:
            shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / shard for shard in sorted(shards)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise BadCheckpoint(f"{folder / index} is not valid; download it again") from None
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadCheckpoint(
                f"{folder} lacks {len(missing)} of {len(files)} weight files, such as {missing[0]}; download them again"
            )
        return files
    raise no_weights(folder)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raises errors of the library as BadCheckpoint with the name of the file."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BadCheckpoint(f"{path} is corrupt or truncated ({error}); download it again") from None
