"""Which weight files a folder has, and the error for a folder without readable ones.

Only names are read; no file is opened except indices and adapter_config.json.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from slipstream.config.json_file import load_json
from slipstream.errors import BadCheckpoint, ModelError, UnsupportedModel

log = logging.getLogger(__name__)

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WHOLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
ADAPTER = "adapter_config.json"

# weights of other programs, and their names
_OTHERS = {
    "tf_model.h5": "TensorFlow's", "flax_model.msgpack": "Flax's", "*.ckpt*": "a TensorFlow or Lightning checkpoint's",
    "*.onnx": "ONNX's", "onnx/*.onnx": "ONNX's", "openvino/*.xml": "OpenVINO's", "consolidated*": "the makers' own",
    "*.pth": "torch's, under a name of their own", "*.safetensors": "in safetensors, under a name of their own",
}  # fmt: skip


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (WHOLE, INDEX, TORCH_WHOLE, TORCH_INDEX))


def weight_paths(folder: Path) -> tuple[Literal["safetensors", "pytorch"], list[Path]]:
    """The weight files of a folder: safetensors files, else files of torch.save."""
    has_ours = any((folder / name).exists() for name in (WHOLE, INDEX))
    if not has_ours and any((folder / name).exists() for name in (TORCH_WHOLE, TORCH_INDEX)):
        return "pytorch", _files(folder, TORCH_WHOLE, TORCH_INDEX)
    return "safetensors", _files(folder, WHOLE, INDEX)


def _files(folder: Path, whole: str, index: str) -> list[Path]:
    if (folder / whole).is_file():
        return [folder / whole]  # preferred to an index, as in transformers
    if (folder / index).exists():
        try:
            shards = set(load_json(folder / index)["weight_map"].values())
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


def require_weights(folder: Path) -> None:
    """Raises an error if a model's folder has no readable weights. Warns of an adapter beside them."""
    if not has_weights(folder):
        raise no_weights(folder)
    if (folder / ADAPTER).is_file():
        log.warning("%s also holds a PEFT adapter, which is not applied: the folder's own weights run", folder)


def no_weights(folder: Path) -> ModelError:
    """The error for a folder without weights."""
    if not folder.is_dir():
        return BadCheckpoint(f"there is no folder {folder}; give the folder of a model")
    if (folder / ADAPTER).is_file():
        return _adapter(folder)
    for pattern, kind in _OTHERS.items():
        if found := sorted(folder.glob(pattern)):
            return BadCheckpoint(
                f"{folder} has no {WHOLE} and no {TORCH_WHOLE}, whole or with an index; its weights are {kind} "
                f"({found[0].relative_to(folder)}): convert them to {WHOLE} with transformers' save_pretrained, or set "
                "load_format to dummy to run random ones"
            )
    return BadCheckpoint(
        f"{folder} has no weights: neither {WHOLE} nor {TORCH_WHOLE}, whole or with an index; download the rest of the "
        "model, or set load_format to dummy to run random weights"
    )


def _adapter(folder: Path) -> UnsupportedModel:
    try:
        found: Any = load_json(folder / ADAPTER)
    except (OSError, ValueError):
        found = None
    settings: dict[str, Any] = found if isinstance(found, dict) else {}
    kind = settings.get("peft_type") or "PEFT"
    base = settings.get("base_model_name_or_path") or "a model that it does not name"
    return UnsupportedModel(
        f"{folder} is a PEFT adapter ({kind}) for {base}, not a model; give its base model with "
        "enable_lora, and this folder as LoRARequest of requests, or merge the two"
    )
