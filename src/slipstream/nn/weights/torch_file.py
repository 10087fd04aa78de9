"""Weights of files that torch.save wrote, read without executing code in them (`checkpoint/torch_files.py`).

A tensor is read when it is needed. Files from before torch 1.6 are not zips and are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.torch_files import NotPlain, StoredTensor, read_entry, read_torch_zip
from slipstream.nn.weights.source import SourceTensor


class TorchFileSource:
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __iter__(self) -> Iterator[SourceTensor]:
        for path in self.paths:
            for name, tensor in _open(path).items():
                yield SourceTensor(name, tensor.shape, tensor.storage.dtype, partial(_read, path, tensor))


def _open(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, without reading them."""
    hint = "convert it to safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            found = read_torch_zip(archive)
    except zipfile.BadZipFile:
        raise BadCheckpoint(f"{path} is not a zip file: it is corrupt, or older than torch 1.6; {hint}") from None
    except NotPlain as error:
        raise BadCheckpoint(
            f"{path} contains {error}, not only tensors; Slipstream does not execute code of checkpoints; {hint}"
        ) from None
    except (OSError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in found.items()
    ):
        raise BadCheckpoint(f"{path} is not a dictionary of tensors; {hint}")
    return found


def _read(path: Path, tensor: StoredTensor) -> torch.Tensor:
    entry, dtype = tensor.storage.entry, getattr(torch, tensor.storage.dtype)
    try:
        with zipfile.ZipFile(path) as archive:
            values = torch.frombuffer(bytearray(read_entry(archive, entry)), dtype=dtype)
    except NotPlain as error:
        raise BadCheckpoint(f"{path}: {entry} is {error}; convert it to safetensors") from None
    except (OSError, KeyError, ValueError, NotImplementedError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise BadCheckpoint(f"{path}: {entry} cannot be read: {error}; download it again") from None
    if tensor.num_needed > len(values):
        raise BadCheckpoint(f"{path} is truncated; download it again")
    return values.as_strided(tensor.shape, tensor.strides, tensor.offset)
