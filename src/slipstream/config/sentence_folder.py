"""SentenceFolder: what the files of a sentence-transformers folder say beside config.json.

modules.json lists what happens to a text, one module after another, each with a folder for its settings. Modules are
known by the last word of their class name, which has stayed while packages were renamed. Nothing named there is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.pooling_info import Activation, DenseInfo, Method, Similarity
from slipstream.config.tokenizer_class import gives_types
from slipstream.errors import BadCheckpoint, UnsupportedModel

_METHODS: dict[str, Method] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# class names of torch.nn -> our words; no other name is looked at, let alone imported
_DENSE_ACTIVATIONS = {
    "Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
}  # fmt: skip
_CLASS_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_SIMILARITIES: dict[str, Similarity] = {
    "cosine": "cosine", "dot": "dot", "dot_product": "dot", "euclidean": "euclidean", "manhattan": "manhattan",
}  # fmt: skip
_PASSED_OVER = {"Dropout"}
# of the transformer's own settings; folders of the first releases name the file after the family
_LENGTH_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


class SentenceFolder(msgspec.Struct, kw_only=True):
    has_modules: bool = False
    method: Method | None = None
    include_prompt: bool = True
    normalize: bool = False
    dense: tuple[DenseInfo, ...] = ()
    sparse: bool = False
    late: bool = False
    masks: bool = False  # a module says which token vectors are compared
    # of token vectors, for `late_info.py`: from the folder's first file, and from those of its modules
    late_settings: dict[str, Any] = {}
    module_settings: dict[str, Any] = {}
    yes_no: tuple[int, int] | None = None
    class_activation: Activation | None = None
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity: Similarity = "cosine"
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    max_seq_length: int | None = None
    lower_case: bool = False
    gives_types: bool = True  # the tokenizer sends token types, by which the two texts of a pair are told apart


def read_sentence_folder(
    folder: Path, config: dict[str, Any], *, any_method: bool = False, any_activation: bool = False
) -> SentenceFolder:
    """`config` is the folder's config.json, where cross-encoders keep their activation. `any_method` and
    `any_activation`: a flag says which, so that the folder's may be one that does not run here."""
    found = SentenceFolder()
    modules = _read(folder / "modules.json", list)
    if modules is not None:
        found.has_modules = True
        for module in modules:
            _take_module(found, folder, module, any_method)
        # projections with no pooling behind them are for tokens
        found.late = found.late or (found.method is None and not found.sparse and bool(found.dense))
    own: dict[str, Any] = next((read for name in _LENGTH_FILES if (read := _read(folder / name, dict))), {})
    tokenizer = _read(folder / "tokenizer_config.json", dict) or {}
    found.gives_types = gives_types(tokenizer, config)
    _take_lengths(found, folder, own, tokenizer)
    settings = _read(folder / "config_sentence_transformers.json", dict) or {}
    _take_prompts(found, settings)
    found.truncate_dim = _size(settings, "truncate_dim")
    found.max_active_dims = _size(settings, "max_active_dims")
    if not any_activation:
        _take_activation(found, settings, config)
    found.late_settings = settings
    found.module_settings = own | found.module_settings
    return found


def _take_module(found: SentenceFolder, folder: Path, module: Any, any_method: bool) -> None:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise BadCheckpoint(f"modules.json of {folder.name} lists {module!r}, which names no type; download it again")
    kind, path = module["type"].rsplit(".", 1)[-1], str(module.get("path") or "")
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise BadCheckpoint(f"modules.json of {folder.name} points outside the folder: {path}")
    settings: dict[str, Any] = (_read(folder / path / "config.json", dict) if path else None) or {}
    if kind in ("Transformer", "MLMTransformer") or kind in _PASSED_OVER:
        return
    # here vectors are pooled, then projected, then normalised
    before = ["Dense"] * bool(found.dense and kind == "Pooling") + ["Normalize"] * found.normalize
    if kind in ("Pooling", "Dense") and before:
        raise UnsupportedModel(
            f"modules.json of {folder.name}: {kind} comes after {' and '.join(before)}, which does not run here; "
            "pooling, projections and a norm do, in that order"
        )
    if kind == "Pooling":
        found.method = "mean" if any_method else _method(settings, path)
        found.include_prompt = bool(settings.get("include_prompt", True))
    elif kind == "Dense":
        found.dense += (_dense(settings, path, found),)
    elif kind == "Normalize":
        found.normalize = True
    elif kind == "SpladePooling":
        how = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
        if how != ("max", "relu"):
            raise UnsupportedModel(f"{path}: SPLADE pooling by {how[0]} and {how[1]}; max and relu is what runs here")
        found.sparse = True
    elif kind == "MultiVectorMask":
        found.late = found.masks = True
        found.module_settings = settings
    elif kind == "LogitScore":
        yes, no = settings.get("true_token_id"), settings.get("false_token_id")
        if type(yes) is not int or type(no) is not int:
            raise UnsupportedModel(f"{path} scores by one token alone; models that say yes and no run here")
        found.yes_no = yes, no
    else:
        known = "Transformer, Pooling, Dense, Normalize, SpladePooling, MultiVectorMask and LogitScore"
        raise UnsupportedModel(
            f"modules.json of {folder.name} has a module {kind}, which does not run here: {known} do"
        )


def _method(settings: dict[str, Any], path: str) -> Method:
    """The newer `pooling_mode`, or the old switches, of which one is on."""
    mode = settings.get("pooling_mode")
    if mode is None:
        modes = [name for key, name in _OLD_MODES.items() if settings.get(key)]
    else:
        modes = [mode] if isinstance(mode, str) else list(mode)
    if not modes:
        raise BadCheckpoint(f"{path}/config.json turns no pooling mode on; set pooling_type to first, last or mean")
    if len(modes) > 1 or modes[0] not in _METHODS:
        raise UnsupportedModel(
            f"{path}/config.json pools by {' and '.join(map(str, modes))}; {', '.join(_METHODS)} run here, one at a "
            "time: set pooling_type only if the model was trained so"
        )
    return _METHODS[modes[0]]


def _dense(settings: dict[str, Any], path: str, found: SentenceFolder) -> DenseInfo:
    if settings.get("use_residual"):
        raise UnsupportedModel(f"{path} adds its input to its output (use_residual), which does not run here")
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = name.rsplit(".", 1)[-1]
    if not name.startswith("torch.nn.") or kind not in _DENSE_ACTIVATIONS:
        raise UnsupportedModel(
            f"{path} has the activation {name}; {', '.join(_DENSE_ACTIVATIONS)} of torch.nn run here"
        )
    per_token = settings.get("module_input_name", "sentence_embedding") == "token_embeddings" or found.method is None
    try:
        return DenseInfo(
            path,
            int(settings["in_features"]),
            int(settings["out_features"]),
            bool(settings.get("bias", True)),
            _DENSE_ACTIVATIONS[kind],
            per_token,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{path}/config.json: {error} is missing or no number; download it again") from None


def _take_lengths(found: SentenceFolder, folder: Path, settings: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    found.lower_case = bool(settings.get("do_lower_case", False))
    length = settings.get("max_seq_length")
    if length is None and found.has_modules:
        # newer folders leave it to the tokenizer; huge numbers there mean that nobody said
        length = tokenizer.get("model_max_length")
        length = None if not isinstance(length, int | float) or length > 10**9 else int(length)
    if length is not None and (type(length) is not int or length < 1):
        raise BadCheckpoint(f"{folder.name}: max_seq_length is {length!r}")
    found.max_seq_length = length


def _take_prompts(found: SentenceFolder, settings: dict[str, Any]) -> None:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BadCheckpoint("config_sentence_transformers.json: prompts is not an object of texts; download it again")
    for role in ("query", "document"):  # where older folders of token vectors keep theirs
        if isinstance(prefix := settings.get(f"{role}_prefix"), str):
            prompts = prompts | {role: prefix + prompts.get(role, "").removeprefix(prefix)}
    name = settings.get("default_prompt_name")
    if name is not None and name not in prompts:
        raise BadCheckpoint(f"config_sentence_transformers.json: default_prompt_name {name!r} is not among its prompts")
    found.prompts, found.default_prompt_name = prompts, name
    similarity = settings.get("similarity_fn_name") or "cosine"
    found.similarity = _SIMILARITIES.get(similarity, "cosine")  # MaxSim is said by the modules


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
        kind = str(activation).rsplit(".", 1)[-1]
        if not str(activation).startswith("torch.nn.") or kind not in _CLASS_ACTIVATIONS:
            raise UnsupportedModel(
                f"the folder asks for the activation {activation}; {', '.join(_CLASS_ACTIVATIONS)} of torch.nn run "
                "here: set classify_activation"
            )
        found.class_activation = _CLASS_ACTIVATIONS[kind]


def _read(path: Path, kind: type) -> Any:
    """A JSON file, or None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download the model again") from None
    if not isinstance(value, kind):
        raise BadCheckpoint(f"{path} does not hold {'a list' if kind is list else 'an object'}; download it again")
    return value
