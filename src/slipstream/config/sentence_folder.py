"""SentenceFolder: what the files of a sentence-transformers folder say in addition to config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.config.pooling_info import Similarity
from slipstream.config.sentence_modules import Modules, read_json, take_modules
from slipstream.config.tokenizer_class import gives_types
from slipstream.config.torch_names import HALVING, torch_class
from slipstream.errors import BadCheckpoint, UnsupportedModel

_CLASS_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}  # those with a name of ours
_SIMILARITIES: dict[str, Similarity] = {
    "cosine": "cosine", "dot": "dot", "dot_product": "dot", "euclidean": "euclidean", "manhattan": "manhattan",
}  # fmt: skip
# files with the transformer's settings; folders of the first releases name them after the family
_LENGTH_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


class SentenceFolder(Modules, kw_only=True):
    late_settings: dict[str, Any] = {}  # settings of token vectors from the folder's main file, for `late_info.py`
    class_activation: str | None = None
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity: Similarity = "cosine"
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    max_seq_length: int | None = None
    lower_case: bool = False
    gives_types: bool = True  # the tokenizer sends token types, which distinguish the two texts of a pair


def read_sentence_folder(
    folder: Path, config: dict[str, Any], *, any_method: bool = False, any_activation: bool = False
) -> SentenceFolder:
    """`config`: the folder's config.json, where cross-encoders have their activation. `any_method`, `any_activation`:
    an option sets them, so that the folder's may be unsupported."""
    found = SentenceFolder()
    take_modules(found, folder, any_method)
    own: dict[str, Any] = next((read for name in _LENGTH_FILES if (read := read_json(folder / name, dict))), {})
    tokenizer = read_json(folder / "tokenizer_config.json", dict) or {}
    found.gives_types = gives_types(tokenizer, config)
    _take_lengths(found, folder, own, tokenizer)
    formats = own.get("modality_config")
    if found.methods and isinstance(formats, dict) and "message" in formats:
        raise UnsupportedModel(
            f"{folder.name} has its chat template write each text before it is embedded (modality_config: message), "
            "which does not run here; texts as they are do: where the model was trained so, take message out"
        )
    settings = read_json(folder / "config_sentence_transformers.json", dict) or {}
    _take_prompts(found, settings)
    found.truncate_dim = _size(settings, "truncate_dim")
    found.max_active_dims = _size(settings, "max_active_dims")
    if not any_activation:
        _take_activation(found, settings, config)
    found.late_settings = settings
    found.module_settings = own | found.module_settings
    return found


def _take_lengths(found: SentenceFolder, folder: Path, settings: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    found.lower_case = bool(settings.get("do_lower_case", False))
    length = settings.get("max_seq_length")
    if length is None and found.has_modules:
        # newer folders leave it to the tokenizer; huge numbers there mean that it is not set
        length = tokenizer.get("model_max_length")
        length = None if not isinstance(length, int | float) or length > 10**9 else int(length)
    if length is not None and (type(length) is not int or length < 1):
        raise BadCheckpoint(f"{folder.name}: max_seq_length is {length!r}")
    found.max_seq_length = length


def _take_prompts(found: SentenceFolder, settings: dict[str, Any]) -> None:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BadCheckpoint("config_sentence_transformers.json: prompts is not an object of texts; download it again")
    for role in ("query", "document"):  # the prompts of older folders of token vectors
        if isinstance(prefix := settings.get(f"{role}_prefix"), str):
            prompts = prompts | {role: prefix + prompts.get(role, "").removeprefix(prefix)}
    name = settings.get("default_prompt_name")
    if isinstance(name, str) and name in ("query", "document"):  # every model has these; empty if nothing is said
        prompts = {name: ""} | prompts
    if name is not None and not (isinstance(name, str) and name in prompts):
        raise BadCheckpoint(f"config_sentence_transformers.json: default_prompt_name {name!r} is not among its prompts")
    found.prompts, found.default_prompt_name = prompts, name
    similarity = settings.get("similarity_fn_name") or "cosine"
    if not isinstance(similarity, str) or similarity.lower() not in (*_SIMILARITIES, "maxsim"):
        raise BadCheckpoint(
            f"config_sentence_transformers.json: similarity_fn_name is {similarity!r}; give one of "
            f"{', '.join(_SIMILARITIES)}"
        )
    found.similarity = _SIMILARITIES.get(similarity.lower(), "cosine")  # MaxSim follows from the modules


def _size(settings: dict[str, Any], key: str) -> int | None:
    value = settings.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise BadCheckpoint(
            f"config_sentence_transformers.json: {key} is {value!r}, not a number from 1 up; download it again"
        )
    return value


def _take_activation(found: SentenceFolder, settings: dict[str, Any], config: dict[str, Any]) -> None:
    nested = config.get("sentence_transformers")
    activation = (
        settings.get("activation_fn")
        or (nested.get("activation_fn") if isinstance(nested, dict) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    if activation is not None:
        kind = torch_class(activation)
        if kind is None or kind == HALVING:
            raise UnsupportedModel(
                f"the folder asks for the activation {activation}, which does not run here; activations of torch.nn "
                "that take no arguments do: set classify_activation"
            )
        found.class_activation = _CLASS_ACTIVATIONS.get(kind, kind)
