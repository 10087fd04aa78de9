"""WeightSource: the tensors of a checkpoint, in the order that is cheapest to read; each is read when it is needed."""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.locate import weight_paths
from slipstream.checkpoint.torch_files import NotPlain, StoredTensor, read_entry, read_torch_zip
from slipstream.nn.weights.weight_format import WeightTarget

PART = 2**24  # elements


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint that has not been read; a `CheckpointTensor` of `nn/weights/weight_format.py`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]
    blocks: Callable[[], torch.Tensor] | None = None
    make: Callable[[torch.Tensor], None] | None = None  # generates the values in place of `read`

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    def write_to(self, target: torch.Tensor) -> None:
        """Copies in parts. A part of another dtype is moved to the device of the target and converted there. Raises for
        integers in place of floating-point numbers: a packed weight would be taken for its values."""
        if self.make is not None:
            self.make(target)
            return
        stored = self.read()
        if target.is_floating_point() and not stored.is_floating_point():
            raise BadCheckpoint(
                f"{self.name} has numbers of type {self.kind} and should have floating-point ones; if the checkpoint "
                "is quantised, its config.json lacks quantization_config"
            )
        for own, part in zip(in_parts(target), in_parts(stored), strict=True):
            own.copy_(part)


def in_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Splits along the first dimension into parts of about PART elements."""
    return tensor.split(max(1, PART // max(1, tensor[:1].numel()))) if tensor.dim() else (tensor,)


class WeightSource(Protocol):
    def __iter__(self) -> Iterator[SourceTensor]: ...


# Rules: map the tensor names of a checkpoint to the target names of our model.
#
# A rule is a pair of names in which `{n}` matches one part between dots and `*` matches anything; None as the second
# name means that the tensor is not needed. The first matching rule counts. Merged projections need no rule of their
# own: each part has its own target (`attention.qkv.q.weight`).


class Rules:
    def __init__(self, names: Mapping[str, str | None]) -> None:
        self._rules = [(_pattern(stored), target) for stored, target in names.items()]

    def __or__(self, others: Rules) -> Rules:
        """Rules that apply these rules first, then the others."""
        both = Rules({})
        both._rules = self._rules + others._rules
        return both

    def rename(self, name: str) -> str | None:
        """The target of a tensor, or None if it is not needed. Raises KeyError if no rule matches."""
        for pattern, target in self._rules:
            if match := pattern.fullmatch(name):
                return None if target is None else target.format(**match.groupdict())
        raise KeyError(name)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^.]+)", re.escape(name)).replace(r"\*", ".*"))


# Weights of a folder of safetensors files, single or sharded, through a memory map.


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


# Weights of files that torch.save wrote, read without executing code in them (`checkpoint/torch_files.py`).
#
# A tensor is read when it is needed. Files from before torch 1.6 are not zips and are refused.


class TorchFileSource:
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __iter__(self) -> Iterator[SourceTensor]:
        for path in self.paths:
            for name, tensor in _open(path).items():
                yield SourceTensor(name, tensor.shape, tensor.storage.dtype, partial(_torch_file_read, path, tensor))


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


def _torch_file_read(path: Path, tensor: StoredTensor) -> torch.Tensor:
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


# Seeded random weights for benchmarks and tests: any model from its config alone.

SPREAD = 0.02  # standard deviation of a usual initialization


class DummySource:
    """A tensor for each target of a model. Its values depend on seed, name, shape and device type."""

    def __init__(self, targets: Mapping[str, WeightTarget], seed: int, device: torch.device) -> None:
        self.targets = targets
        self.seed = seed
        self.device = device

    def __iter__(self) -> Iterator[SourceTensor]:
        for name, target in self.targets.items():
            make = partial(self._make, name)
            yield SourceTensor(name, target.shape, "F32", partial(self._read, make, target.shape), make=make)

    def _read(self, make: Callable[[torch.Tensor], None], shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, device=self.device, dtype=torch.float32)
        make(made)
        return made

    def _make(self, name: str, target: torch.Tensor) -> None:
        if "norm" in name or name.endswith("_scale"):
            target.fill_(1)
            return
        seed = zlib.crc32(f"{self.seed} {name} {tuple(target.shape)}".encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        bound = SPREAD * math.sqrt(3)  # a uniform distribution is several times faster to generate than a normal one
        for part in in_parts(target):
            part.copy_(
                torch.empty(part.shape, device=self.device, dtype=torch.float32).uniform_(
                    -bound, bound, generator=generator
                )
            )


# Tensors of a checkpoint that do not change what the model computes: they are skipped, and the log names them.
#
# These are buffers that are computed here, scales of a quantized KV cache, layers beyond the number in config.json, and
# heads of other tasks (v_head of a trained policy, qa_outputs). A tensor inside a layer that runs is never skipped:
# without a bias or a norm the results would be those of another model, so it is an error.

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blk|blocks?|h)\.(\d+)\.")
_BUFFER = re.compile(
    r"(?:^|\.)(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|position_ids|masked_bias|(?:q|k|v|kv|prob)_scale"
    r"|[kv]_proj\.output_scale)$"
)


def is_unused(name: str, num_layers: int) -> bool:
    """Whether a tensor that no rule matches may be skipped."""
    return is_buffer(name) or _LAYER.search(name) is None or is_past_layers(name, num_layers)


def is_buffer(name: str) -> bool:
    return _BUFFER.search(name) is not None


def is_past_layers(name: str, num_layers: int) -> bool:
    found = _LAYER.search(name)
    return found is not None and int(found[1]) >= num_layers


def count_layers(targets: Iterable[str]) -> int:
    """The number of layers, from the target names of a model."""
    return max((int(found[1]) + 1 for name in targets if (found := _LAYER.search(name))), default=0)
