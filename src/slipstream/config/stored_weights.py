"""StoredWeights: what a model's files say about its weights, for answers to clients. No file is read whole."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import msgspec

from slipstream.base.errors import ModelError
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.locate import part_paths, stored_shapes, weight_paths
from slipstream.config.config import ModelConfig

# mixtures of tensor types, by general.file_type; other files are named by the type of most of their weights
_MIXTURES = {
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 21: "Q2_K_S",
    22: "IQ3_XS", 27: "IQ3_M", 29: "IQ2_M",
}  # fmt: skip
_SHORT = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


class StoredWeights(msgspec.Struct, frozen=True):
    format: str = ""  # gguf, safetensors or pytorch; empty: there are no files
    num_bytes: int = 0  # of the files
    num_params: int = 0  # 0: not known
    quantization: str = ""  # Q4_1, BF16, fp8 ...

    @classmethod
    def of(cls, config: ModelConfig) -> StoredWeights:
        try:
            path = Path(config.path)
            return _of_gguf(path) if path.is_file() else _of_folder(path, config)
        except (OSError, ModelError):
            return cls()  # the loader reports what is wrong, if it reads them at all


def _of_gguf(path: Path) -> StoredWeights:
    file = GgufFile.open(path)
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.kind] += math.prod(tensor.shape)
    mixture = _MIXTURES.get(file.fields.get("general.file_type", -1))
    kind = mixture or max(counts, key=counts.__getitem__, default="")
    return StoredWeights("gguf", _sum_of_sizes(part_paths(path)), counts.total(), kind)


def _of_folder(folder: Path, config: ModelConfig) -> StoredWeights:
    format, files = weight_paths(folder)
    stored = config.info.quantization
    kind = _SHORT.get(config.info.dtype or "", "") if stored is None else stored.method
    # packed weights hold several parameters in a number
    is_plain = format == "safetensors" and stored is None
    shapes = [shape for path in files for shape in stored_shapes(path).values()] if is_plain else []
    return StoredWeights(format, _sum_of_sizes(files), sum(map(math.prod, shapes)), kind)


def _sum_of_sizes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)
