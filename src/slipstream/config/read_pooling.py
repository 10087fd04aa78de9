"""Reads a model's PoolingInfo. An option overrides the folder's files, which override the architecture's defaults.

Every model gets one: a causal LM can also embed, by its last token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.base.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from slipstream.checkpoint.architecture import ENCODERS, continues_text
from slipstream.checkpoint.late_interaction import late_interaction_info, read_vocabulary
from slipstream.checkpoint.model_info import ModelInfo, family_name
from slipstream.checkpoint.pooling_info import METHODS as ALL_METHODS
from slipstream.checkpoint.pooling_info import DenseInfo, Method, PoolingInfo, UnitNormInfo
from slipstream.checkpoint.sentence_modules import METHODS, SentenceFolder, read_sentence_folder
from slipstream.config.options import Options
from slipstream.params.pooling import TASKS, Task

_METHOD_NAMES: dict[str, Method] = METHODS | {name: name for name in ALL_METHODS}
_CLASSIFY_TASKS = {"classify": "classify", "score": "classify", "rerank": "classify"}

# Qwen3-Reranker: the texts that its authors trained it with
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def read_pooling(options: Options, info: ModelInfo, path: Path) -> tuple[PoolingInfo, ModelInfo]:
    """The model's PoolingInfo, and the part of the model that it uses: all of it, or its backbone only. `path`: a
    folder, or a .gguf file, which has no other files."""
    folder = SentenceFolder()
    if path.is_dir():
        by_flag = {
            "any_method": options.pooling_type is not None,
            "any_activation": options.classify_activation is not None,
        }
        folder = read_sentence_folder(path, info.extra, **by_flag)
    if options.pooling_type is not None and folder.methods:
        folder.methods = _named_methods(options.pooling_type)
    if _is_backbone_alone(options, info, folder):
        info = msgspec.structs.replace(info, architecture=f"{family_name(info.architecture)}Model")
    pooling = _of_model(options, info, path, folder)
    changes: dict[str, Any] = {}
    if options.pooling_type is not None:
        changes["methods"] = _asked_methods(options.pooling_type, pooling)
        changes["embed_size"] = _embed_size(info, folder, changes["methods"])
    normalize, activation = options.normalize, options.classify_activation
    if options.use_activation is not None:
        if options.use_activation != (normalize if normalize is not None else options.use_activation):
            raise InvalidOption("use_activation and normalize differ; remove one of them")
        normalize = options.use_activation
        if not options.use_activation and pooling.num_labels and activation is None:
            activation = "identity"
    if normalize is not None:
        changes["normalize"] = normalize
        changes["cuts_normalized"] = False  # if the user requests normalised vectors
    if activation is not None:
        if not pooling.num_labels:
            raise InvalidOption(f"classify_activation is set, and {info.architecture} has no classes; leave it out")
        changes["classify_activation"] = activation
    if isinstance(options.max_model_len, int) and options.max_model_len > 0 and pooling.max_seq_length is not None:
        changes["max_seq_length"] = options.max_model_len
    pooling = msgspec.structs.replace(pooling, **changes)
    return _with_task(options, info, pooling), info


def _is_backbone_alone(options: Options, info: ModelInfo, folder: SentenceFolder) -> bool:
    """Whether a checkpoint for another task shall embed: its folder pools hidden states, or the task says so. A causal
    LM embeds as it is."""
    name = info.architecture
    if name.endswith("Model") or continues_text(name) or family_name(name) == name:
        return False
    return bool(folder.methods) or (options.task in ("embed", "token_embed") and not folder.has_modules)


def _of_model(options: Options, info: ModelInfo, path: Path, folder: SentenceFolder) -> PoolingInfo:
    name, config = info.architecture, info.extra
    encoder = family_name(name) in ENCODERS or bool(info.backend_folder and not info.is_causal)
    common: dict[str, Any] = dict(
        is_causal=info.is_causal,
        modules=folder.modules,
        include_prompt=folder.include_prompt,
        embed_size=_embed_size(info, folder, folder.methods or ("mean",)),
        token_size=next((d.size for d in reversed(_dense(folder, per_token=True))), info.hidden_size),
        truncate_dim=folder.truncate_dim,
        cuts_normalized=folder.normalize,
        max_active_dims=folder.max_active_dims,
        matryoshka=_matryoshka(config),
        prompts=folder.prompts,
        default_prompt_name=folder.default_prompt_name,
        similarity=folder.similarity,
        lower_case=folder.lower_case,
        has_types=info.num_types > 1,
        types_pairs=info.num_types > 1 and folder.gives_types,
        max_seq_length=None if folder.max_seq_length is None else min(folder.max_seq_length, info.max_positions),
    )
    if folder.scores:
        size = _dense(folder)[-1].size
        return PoolingInfo(
            tasks=("classify",),
            methods=folder.methods,
            scores_by_modules=True,
            **_classes({**config, "num_labels": size}, folder),
            **common,
        )
    # the classifier of a decoder takes the hidden state of any token
    by_token = name.endswith("ForSequenceClassification") and options.task == "token_classify" and not encoder
    if name.endswith("ForSequenceClassification") and not by_token:
        return PoolingInfo(
            tasks=("classify",), methods=(_classify_method(config, encoder),), **_classes(config, folder), **common
        )
    if name.endswith("ForTokenClassification") or by_token:
        return PoolingInfo(tasks=("token_classify",), methods=("all",), **_classes(config, folder), **common)
    if name.endswith("RewardModel"):
        is_step = "Process" in name
        return PoolingInfo(
            tasks=("token_classify",),
            methods=("step" if is_step else "all",),
            step_tag_id=config.get("step_tag_id"),
            num_labels=int(config.get("num_labels") or (2 if is_step else 1)),
            classify_activation="softmax" if is_step else "identity",
            **common,
        )
    if folder.late_interaction or "ColBERT" in name:
        reach = int(config["local_attention"]) // 2 if "local_attention" in config else None  # ModernBERT counts both
        read = late_interaction_info(path, folder, is_causal=info.is_causal, reach=reach)
        # older folders do not say that token vectors are normalised
        normalize = folder.normalize or not folder.masks
        return PoolingInfo(
            tasks=("token_embed",), methods=("all",), late_interaction=True, normalize=normalize, **(common | read)
        )
    yes_no = folder.yes_no
    if yes_no is None and not folder.has_modules:
        yes_no = _yes_no(options, info, path)
    if yes_no is not None:
        if name != "Qwen3ForCausalLM":
            raise UnsupportedModel(
                f"{name} scores by the words yes and no; of those, Qwen3-Reranker's template is known"
            )
        return PoolingInfo(
            tasks=("classify",),
            methods=("last",),
            num_labels=1,
            yes_no=yes_no,
            generates=True,
            classify_activation=folder.class_activation or "sigmoid",
            pair_template=_QWEN3_RERANKER,
            instruction=folder.prompts.get(folder.default_prompt_name or "", _QWEN3_INSTRUCTION),
            # its prompts are instructions inside the template, not prefixes of texts
            **(common | {"default_prompt_name": None}),
        )
    if folder.sparse or (name.endswith("ForMaskedLM") and not folder.has_modules):
        how: dict[str, Any] = {"sparse_sums": folder.sparse_sums, "sparse_logs": folder.sparse_logs}
        return PoolingInfo(tasks=("sparse",), methods=("all",), **how, **common)
    if encoder:
        return _embedder(path, config, folder, common)
    continues = continues_text(name) and common["is_causal"]
    return PoolingInfo(
        methods=folder.methods or (_gguf_method(config, path) or "last",),
        normalize=folder.normalize or not folder.has_modules,
        generates=continues and info.has_lm_head,
        why_no_generation="its weights have no lm_head.weight" if continues and not info.has_lm_head else "",
        **common,
    )


def _embedder(path: Path, config: dict[str, Any], folder: SentenceFolder, common: dict[str, Any]) -> PoolingInfo:
    """An embedding encoder. BGE-M3 also has projections for sparse weights and for tokens, in files of their own."""
    tasks: tuple[Task, ...] = ("embed", "token_embed")
    changes: dict[str, Any] = {}
    if _has_weight(path, "sparse_linear"):
        tasks = (*tasks, "sparse")
        ends = [config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")]
        # the id of the unknown token is not in config.json; in this family it follows the other three
        changes["sparse_skip_ids"] = tuple(sorted({*(i for i in ends if isinstance(i, int)), 3}))
    if _has_weight(path, "colbert_linear"):
        changes["late_interaction"] = True
    return PoolingInfo(
        tasks=tasks,
        # the mean by default, as in sentence-transformers
        methods=folder.methods or (_gguf_method(config, path) or "mean",),
        normalize=folder.normalize or not folder.has_modules,
        **common,
        **changes,
    )


def _with_task(options: Options, info: ModelInfo, pooling: PoolingInfo) -> PoolingInfo:
    """The requested task comes first."""
    if options.task in ("auto", "generate"):
        if options.task == "generate" and not pooling.generates:
            does = ", ".join(pooling.tasks)
            why = f" ({pooling.why_no_generation})" if pooling.why_no_generation else ""
            raise InvalidOption(
                f"task is generate, and {info.architecture} does not continue text{why}; it does {does}"
            )
        return pooling
    task = cast(Task, _CLASSIFY_TASKS.get(options.task, options.task))
    if options.task in ("score", "rerank") and task not in pooling.tasks:
        return pooling  # vectors and token vectors can also be compared
    if task not in pooling.tasks:
        can = (*pooling.tasks, "generate") if pooling.generates else pooling.tasks
        raise InvalidOption(
            f"task is {options.task}, and {info.architecture} does {', '.join(can)}; choose one of them"
        )
    assert task in TASKS
    return msgspec.structs.replace(pooling, tasks=(task, *(other for other in pooling.tasks if other != task)))


def _asked_methods(name: str, pooling: PoolingInfo) -> tuple[Method, ...]:
    """One method, or several joined by +."""
    methods = _named_methods(name)
    single = {"embed", "classify"} & set(pooling.tasks)
    of_tokens = [method for method in methods if method in ("all", "step")]
    if bool(of_tokens) == bool(single) or (of_tokens and len(methods) > 1):
        kinds = "first, last, mean, max, mean_sqrt_len or weightedmean" if single else "all or step"
        raise InvalidOption(
            f"pooling_type is {name!r}, and the model does {', '.join(pooling.tasks)}: that takes {kinds}; "
            "for a vector per token use encode with token_embed or token_classify"
        )
    if len(methods) > 1 and "classify" in pooling.tasks and not pooling.scores_by_modules:
        raise InvalidOption(f"pooling_type is {name!r}, and the classifier was made for one of them; give one")
    return methods


def _named_methods(name: str) -> tuple[Method, ...]:
    asked = [_METHOD_NAMES.get(part.strip()) for part in name.lower().split("+")]
    methods = tuple(method for method in asked if method is not None)
    if len(methods) < len(asked):
        known = ", ".join(dict.fromkeys(_METHOD_NAMES.values()))
        raise InvalidOption(f"pooling_type is {name!r}; give one of {known} (cls is first), or several, as mean+max")
    return methods


def _dense(folder: SentenceFolder, per_token: bool = False) -> list[DenseInfo]:
    found = [module for module in folder.modules if isinstance(module, DenseInfo)]
    return [module for module in found if module.per_token is per_token]


def _embed_size(info: ModelInfo, folder: SentenceFolder, methods: tuple[Method, ...]) -> int:
    """Size of a vector after the modules; each module must accept the size of the one before it."""
    size = info.hidden_size * len(methods)
    for module in folder.modules:
        if isinstance(module, UnitNormInfo) or (isinstance(module, DenseInfo) and module.per_token):
            continue
        takes = module.in_features if isinstance(module, DenseInfo) else module.size
        if takes != size:
            raise BadCheckpoint(
                f"{module.path} takes vectors of size {takes}, and its input has size {size} ({'+'.join(methods)} "
                f"of {info.hidden_size}); check that its config and the pooling belong together"
            )
        size = module.size
    return size


def _matryoshka(config: dict[str, Any]) -> tuple[int, ...] | str | None:
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return None if config.get("is_matryoshka") is False else "any"
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise BadCheckpoint(f"config.json: matryoshka_dimensions is {sizes!r}, not a list of sizes")
    return tuple(sorted(sizes))


def _classify_method(config: dict[str, Any], encoder: bool) -> Method:
    if not encoder:
        return "last"
    return "mean" if config.get("classifier_pooling") == "mean" else "first"  # ModernBERT says which


def _classes(config: dict[str, Any], folder: SentenceFolder) -> dict[str, Any]:
    """num_labels, labels, and the activation of their scores."""
    names = config.get("id2label") or {}
    if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
        raise BadCheckpoint(f"config.json: id2label is {names!r}, not an object of numbers and names")
    num = int(config.get("num_labels") or len(names) or 2)
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(num))
    kind = config.get("problem_type")
    activation = folder.class_activation or (
        "identity"
        if kind == "regression"
        else "sigmoid"
        if num == 1 or kind == "multi_label_classification"
        else "softmax"
    )
    return {"num_labels": num, "labels": labels, "classify_activation": activation}


def _gguf_method(config: dict[str, Any], path: Path) -> Method | None:
    """The method number of a .gguf file: 0 is none, 4 a reranker's."""
    kind = next((value for key, value in config.items() if key.endswith(".pooling_type")), 0)
    if kind == 4:
        raise UnsupportedModel(f"{path.name} is a reranker, which runs here from a folder with safetensors")
    methods: dict[object, Method] = {1: "mean", 2: "first", 3: "last"}
    return methods.get(kind)


def _has_weight(path: Path, name: str) -> bool:
    return any((path / f"{name}.{ending}").is_file() for ending in ("pt", "safetensors", "bin"))


def _yes_no(options: Options, info: ModelInfo, path: Path) -> tuple[int, int] | None:
    """Qwen3-Reranker is published as a plain Qwen3ForCausalLM; its name, the task or vLLM's fields identify it."""
    words = info.extra.get("classifier_from_token")
    is_known = info.architecture == "Qwen3ForCausalLM" and info.extra.get("method") in (None, "from_2_way_softmax")
    if words and not (is_known and isinstance(words, list) and len(words) == 2):
        raise UnsupportedModel(
            f"classifier_from_token {words!r:.100} of {info.architecture}: it is for Qwen3-Reranker, with two tokens "
            "and the method from_2_way_softmax; give a checkpoint that was converted to a classifier"
        )
    if info.architecture != "Qwen3ForCausalLM" or not path.is_dir():
        return None
    named = (
        "reranker" in path.resolve().as_posix().lower().rsplit("/", 1)[-1]
        or "reranker" in (options.model or "").lower()
    )
    is_one = named or words or info.extra.get("is_original_qwen3_reranker")
    if is_one and not info.has_lm_head:
        raise BadCheckpoint(f"{path} is a Qwen3-Reranker, and its weights have no lm_head.weight; download them again")
    asked = options.task in _CLASSIFY_TASKS and info.has_lm_head
    if not (is_one or asked):
        return None
    vocabulary = read_vocabulary(path)
    if words:
        if missing := [word for word in words if word not in vocabulary]:
            raise InvalidOption(f"classifier_from_token: {missing[0]!r} is no token of {path}; give tokens that are")
        return vocabulary[words[1]], vocabulary[words[0]]
    if "yes" not in vocabulary or "no" not in vocabulary:
        raise BadCheckpoint(f"{path} has no tokens for yes and no, so it is no Qwen3-Reranker; leave out the task")
    return vocabulary["yes"], vocabulary["no"]
