"""Reads modules.json of a sentence-transformers folder: the modules that process a text, in order.

Each module has a folder with its settings. A module is identified by the last part of its class name, which stayed the
same while packages were renamed. No code named there is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.base.files import load_json
from slipstream.checkpoint.pooling_info import (
    DenseInfo,
    LayerNormInfo,
    Method,
    ModuleInfo,
    Similarity,
    UnitNormInfo,
)

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
_ROUTERS = {"Router", "Asym"}
_MAX_SIZE = 2**24  # of a vector, far beyond any model
STATIC = "StaticEmbedding"  # the mean of one vector per token, without a network


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
    late_interaction: bool = False
    masks: bool = False  # a module says which token vectors are compared
    module_settings: dict[str, Any] = {}  # settings of token vectors, for `late_interaction.py`
    yes_no: tuple[int, int] | None = None


def take_modules(found: Modules, folder: Path, any_method: bool = False) -> None:
    """`any_method`: an option sets the pooling method, so that the folder's may be unsupported."""
    listed = read_json(folder / "modules.json", list)
    if listed is None:
        return
    found.has_modules = True
    for number, module in enumerate(listed):
        _take_module(found, folder, module, any_method, is_first=not number)
    # projections without a pooling are for tokens
    found.late_interaction = found.late_interaction or (not found.methods and not found.sparse and bool(found.modules))


def static_folder(folder: Path) -> Path | None:
    """The folder with weights and tokenizer of a StaticEmbedding; None for any other model. Such a model has no
    config.json, or one that says nothing about it."""
    listed = read_json(folder / "modules.json", list)
    if not listed:
        return None
    kind, path = _kind_and_path(folder, listed[0])
    return folder / path if kind == STATIC else None


def _kind_and_path(folder: Path, module: Any) -> tuple[str, str]:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise BadCheckpoint(f"modules.json of {folder.name} lists {module!r}, which names no type; download it again")
    kind, path = module["type"].rsplit(".", 1)[-1], str(module.get("path") or "")
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise BadCheckpoint(f"modules.json of {folder.name} points outside the folder: {path}")
    return kind, path


def _routed(folder: Path, kind: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"modules.json of {folder.name} has a {kind}, which runs other modules for queries than for documents; one "
        "route runs here: save it with sentence-transformers as a model of its own, for documents "
        'SentenceTransformer(modules=list(model[0].sub_modules["document"])).save(...)'
    )


def _take_module(found: Modules, folder: Path, module: Any, any_method: bool, *, is_first: bool) -> None:
    kind, path = _kind_and_path(folder, module)
    settings: dict[str, Any] = (read_json(folder / path / "config.json", dict) if path else None) or {}
    if kind in ("Transformer", "MLMTransformer") or kind in _PASSED_OVER:
        return
    if kind in _ROUTERS:
        raise _routed(folder, kind)
    if found.scores:
        raise UnsupportedModel(
            f"modules.json of {folder.name}: {kind} comes after a Dense that makes scores, which does not run here"
        )
    if kind == STATIC and is_first:
        found.methods = ("mean",)
    elif kind == "Pooling":
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
        found.late_interaction = found.masks = True
        found.module_settings = settings
    elif kind == "LogitScore":
        yes, no = settings.get("true_token_id"), settings.get("false_token_id")
        if type(yes) is not int or type(no) is not int:
            raise UnsupportedModel(f"{path} scores by one token alone; models that say yes and no run here")
        found.yes_no = yes, no
    else:
        raise UnsupportedModel(
            f"modules.json of {folder.name} has a module {kind}, which does not run here: Transformer, StaticEmbedding "
            "(first), Pooling, Dense, LayerNorm, Normalize, SpladePooling, MultiVectorMask and LogitScore do"
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


# SentenceFolder: what the files of a sentence-transformers folder say in addition to config.json.

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
    # settings of token vectors from the folder's main file, for `late_interaction.py`
    late_interaction_settings: dict[str, Any] = {}
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
    found.late_interaction_settings = settings
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


# Classes of torch.nn that a folder may name as an activation.
#
# No other name is looked up. Each can be constructed without arguments and processes every vector separately.

ELEMENTWISE = frozenset((
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid",
    "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink",
))  # fmt: skip
OVER_LAST_DIM = frozenset(("LogSoftmax", "Softmax", "Softmin"))
"""These normalise over the elements of a vector. For token vectors torch would use the batch: not supported."""
HALVING = "GLU"
"""This halves the size of a vector."""


def torch_class(name: object) -> str | None:
    """The name of the class, if the full name is one of torch.nn and on the list."""
    text = str(name)
    kind = text.rsplit(".", 1)[-1]
    known = kind in ELEMENTWISE or kind in OVER_LAST_DIM or kind == HALVING
    return kind if text.startswith("torch.nn.") and known else None


# The tokenizer class that transformers 5 would use for a folder, and what follows from it.
#
# Only two things follow here: whether the token types of a pair reach the model, and how a folder with only a vocab.txt
# splits words. The class is named by tokenizer_config.json, by config.json, or by the model_type.

GENERIC = "TokenizersBackend"

# by model_type, if neither file names a class
_REGISTERED = {
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "nomic_bert": "BertTokenizer", "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer", "camembert": "CamembertTokenizer",
    "modernbert": GENERIC,
}  # fmt: skip
# model types whose files name a class that transformers ignores
_NOT_TRUSTED = frozenset(("modernbert",))
BERT_LIKE = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Bert", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "Electra", "Lxmert", "MobileBert", "SqueezeBert",
    )
)  # fmt: skip
"""Other names of BertTokenizer, except DistilBertTokenizer, which gives no token types."""
_GIVE_TYPES = BERT_LIKE | {"DebertaTokenizer", "DebertaV2Tokenizer", "FNetTokenizer"}


def tokenizer_class(tokenizer_config: dict[str, Any], config: dict[str, Any]) -> str:
    """The name of the class, without "Fast" at its end."""
    kind = str(config.get("model_type"))
    registered = _REGISTERED.get(kind, GENERIC)
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(named, str) or kind in _NOT_TRUSTED:
        return registered
    name = named.removesuffix("Fast")
    return GENERIC if name in ("PreTrainedTokenizer", GENERIC) else name


def gives_types(tokenizer_config: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether the token types of a pair are sent to the model."""
    names = tokenizer_config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return tokenizer_class(tokenizer_config, config) in _GIVE_TYPES
