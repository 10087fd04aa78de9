"""Reads modules.json of a sentence-transformers folder: the modules that process a text, in order.

Each module has a folder with its settings. A module is identified by the last part of its class name, which stayed the
same while packages were renamed. No code named there is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.json_file import load_json
from slipstream.config.pooling_info import DenseInfo, LayerNormInfo, Method, ModuleInfo, UnitNormInfo
from slipstream.config.torch_names import HALVING, OVER_LAST_DIM, torch_class
from slipstream.errors import BadCheckpoint, UnsupportedModel

METHODS: dict[str, Method] = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
# in the order in which their vectors are concatenated
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_LOGS = {"relu": 1, "log1p_relu": 2}  # of SPLADE: each takes log(1 + x) once more than its name says
_PASSED_OVER = {"Dropout"}
_MAX_SIZE = 2**24  # of a vector, far beyond any model


class Modules(msgspec.Struct, kw_only=True):
    has_modules: bool = False
    methods: tuple[Method, ...] = ()  # empty: no pooling
    include_prompt: bool = True
    normalize: bool = False
    modules: tuple[ModuleInfo, ...] = ()  # after the pooling, or for tokens if there is no pooling
    scores: bool = False  # the last module computes scores
    sparse: bool = False
    sparse_sums: bool = False
    sparse_logs: int = 1
    late: bool = False
    masks: bool = False  # a module says which token vectors are compared
    module_settings: dict[str, Any] = {}  # settings of token vectors, for `late_info.py`
    yes_no: tuple[int, int] | None = None


def take_modules(found: Modules, folder: Path, any_method: bool = False) -> None:
    """`any_method`: an option sets the pooling method, so that the folder's may be unsupported."""
    listed = read_json(folder / "modules.json", list)
    if listed is None:
        return
    found.has_modules = True
    for module in listed:
        _take_module(found, folder, module, any_method)
    # projections without a pooling are for tokens
    found.late = found.late or (not found.methods and not found.sparse and bool(found.modules))


def _take_module(found: Modules, folder: Path, module: Any, any_method: bool) -> None:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise BadCheckpoint(f"modules.json of {folder.name} lists {module!r}, which names no type; download it again")
    kind, path = module["type"].rsplit(".", 1)[-1], str(module.get("path") or "")
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise BadCheckpoint(f"modules.json of {folder.name} points outside the folder: {path}")
    settings: dict[str, Any] = (read_json(folder / path / "config.json", dict) if path else None) or {}
    if kind in ("Transformer", "MLMTransformer") or kind in _PASSED_OVER:
        return
    if found.scores:
        raise UnsupportedModel(
            f"modules.json of {folder.name}: {kind} comes after a Dense that makes scores, which does not run here"
        )
    if kind == "Pooling":
        if found.modules or found.normalize or found.methods:
            raise UnsupportedModel(
                f"modules.json of {folder.name}: Pooling comes after {_last(found)}, which does not run here; pooling "
                "comes first, then projections and norms"
            )
        found.methods = ("mean",) if any_method else _methods(settings, path)
        found.include_prompt = bool(settings.get("include_prompt", True))
    elif kind == "Dense":
        _take_behind(found, _dense(settings, path, found))
    elif kind == "LayerNorm":
        _take_behind(found, _layer_norm(settings, path, found))
    elif kind == "Normalize":
        if found.methods and settings.get("module_input_name", "sentence_embedding") != "sentence_embedding":
            raise UnsupportedModel(f"{path} scales {settings['module_input_name']}; vectors alone is what runs here")
        found.normalize = True
    elif kind == "SpladePooling":
        how = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
        if how[0] not in ("max", "sum") or how[1] not in _LOGS:
            raise UnsupportedModel(
                f"{path}: SPLADE pooling by {how[0]} and {how[1]}; max or sum, of relu or log1p_relu"
            )
        found.sparse, found.sparse_sums, found.sparse_logs = True, how[0] == "sum", _LOGS[how[1]]
    elif kind == "MultiVectorMask":
        found.late = found.masks = True
        found.module_settings = settings
    elif kind == "LogitScore":
        yes, no = settings.get("true_token_id"), settings.get("false_token_id")
        if type(yes) is not int or type(no) is not int:
            raise UnsupportedModel(f"{path} scores by one token alone; models that say yes and no run here")
        found.yes_no = yes, no
    else:
        known = "Transformer, Pooling, Dense, LayerNorm, Normalize, SpladePooling, MultiVectorMask and LogitScore"
        raise UnsupportedModel(
            f"modules.json of {folder.name} has a module {kind}, which does not run here: {known} do"
        )


def _take_behind(found: Modules, module: ModuleInfo) -> None:
    """A module that processes vectors. A normalisation before it becomes a module of its own."""
    of_tokens = isinstance(module, DenseInfo) and module.per_token
    if found.normalize and not found.methods:
        raise UnsupportedModel("modules.json has a projection behind a norm of token vectors, which does not run here")
    if found.normalize and not of_tokens:
        found.modules += (UnitNormInfo(),)
        found.normalize = False
    found.modules += (module,)


def _last(found: Modules) -> str:
    if found.normalize or not found.modules:
        return "Normalize" if found.normalize else "Pooling"
    return "LayerNorm" if isinstance(found.modules[-1], LayerNormInfo) else "Dense"


def _methods(settings: dict[str, Any], path: str) -> tuple[Method, ...]:
    """The newer `pooling_mode`, one name or several, or the old switches; the mean if none is on."""
    given = settings.get("pooling_mode")
    if given is None:
        given = [name for key, name in _OLD_MODES.items() if settings.get(key)] or ["mean"]
    modes: list[Any] = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else [given]
    if not modes or any(not isinstance(mode, str) or mode not in METHODS for mode in modes):
        raise UnsupportedModel(f"{path}/config.json pools by {given!r}; {', '.join(METHODS)} run here, one or several")
    return tuple(METHODS[mode] for mode in modes)


def _dense(settings: dict[str, Any], path: str, found: Modules) -> DenseInfo:
    source = settings.get("module_input_name", "sentence_embedding")
    target = settings.get("module_output_name") or source
    per_token = source == "token_embeddings" or not found.methods
    if target == "scores" and source == "sentence_embedding" and found.methods:
        found.scores = True
    elif target != source or source not in ("sentence_embedding", "token_embeddings"):
        raise UnsupportedModel(
            f"{path} makes {target} of {source}, which is not supported; supported are vector to vector and vector to "
            "scores"
        )
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = torch_class(name)
    if kind is None or (per_token and (kind in OVER_LAST_DIM or kind == HALVING)):
        raise UnsupportedModel(
            f"{path} has the activation {name}{' of token vectors' if per_token and kind else ''}, which is not "
            "supported; activations of torch.nn that take no arguments are"
        )
    for name in ("in_features", "out_features"):
        if type(size := settings.get(name)) is not int or not 1 <= size <= _MAX_SIZE:
            fact = f"{path}/config.json: {name} is {size!r}, not a number from 1 to {_MAX_SIZE:,}"
            raise BadCheckpoint(f"{fact}; download it again")
    return DenseInfo(
        path,
        settings["in_features"],
        settings["out_features"],
        bool(settings.get("bias", True)),
        kind,
        per_token,
        bool(settings.get("use_residual", False)),
    )


def _layer_norm(settings: dict[str, Any], path: str, found: Modules) -> LayerNormInfo:
    if not found.methods:
        raise UnsupportedModel(
            f"{path} is a LayerNorm before any Pooling, which is not supported; put it after the Pooling"
        )
    size = settings.get("dimension")
    if type(size) is not int or size < 1:
        raise BadCheckpoint(f"{path}/config.json: dimension is {size!r}, not a number from 1 up; download it again")
    return LayerNormInfo(path, size)


def read_json(path: Path, kind: type) -> Any:
    """The content of a JSON file; None if there is no file."""
    try:
        value = load_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download the model again") from None
    if not isinstance(value, kind):
        raise BadCheckpoint(f"{path} does not hold {'a list' if kind is list else 'an object'}; download it again")
    return value
