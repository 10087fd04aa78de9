"""Tiny encoders for tests: two or three layers, random weights, with a tokenizer that adds [CLS] and [SEP].

The model classes of transformers make the weights, so a folder is what `save_pretrained` writes, and the oracle reads
the same folder. No downloads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from tiny_tokenizer import byte_tokenizer

VOCAB_SIZE = 304  # larger than the tokenizer's vocabulary, as in real checkpoints
PAD, UNK, CLS, SEP, MASK = range(256, 261)
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "num_labels": 3,
}
# RoBERTa counts positions from the pad id + 1, so real checkpoints have more positions than usable ones
_ROBERTA = {
    "pad_token_id": 1, "max_position_embeddings": 130, "type_vocab_size": 1, "bos_token_id": CLS, "eos_token_id": SEP,
}  # fmt: skip
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"type_vocab_size": 2}),
    "roberta": ("Roberta", _ROBERTA),
    "xlm-roberta": ("XLMRoberta", _ROBERTA),
    "distilbert": (
        "DistilBert",
        {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 3, "qa_dropout": 0.0, "seq_classif_dropout": 0.0},
    ),
    "mpnet": ("MPNet", {"pad_token_id": 1, "max_position_embeddings": 130, "relative_attention_num_buckets": 32}),
    "modernbert": (
        "ModernBert",
        {"local_attention": 12, "global_attn_every_n_layers": 3, "num_hidden_layers": 4, "cls_token_id": CLS,
         "sep_token_id": SEP, "bos_token_id": CLS, "eos_token_id": SEP,
         "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5_000.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}},
    ),
    "nomic": ("NomicBert", {"type_vocab_size": 2}),
    "xlm-roberta-xl": ("XLMRobertaXL", _ROBERTA),
    "electra": ("Electra", {"type_vocab_size": 2, "embedding_size": 32}),
    "albert": ("Albert", {"type_vocab_size": 2, "embedding_size": 32}),
    # fewer buckets than distances
    "deberta": (
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": "p2c|c2p", "share_att_key": True, "norm_rel_ebd": "layer_norm",
         "position_buckets": 16, "position_biased_input": False, "layer_norm_eps": 1e-7},
    ),
    "eurobert": ("EuroBert", {"num_attention_heads": 4, "num_key_value_heads": 2, "classifier_pooling": "mean"}),
    "t5": (
        "T5Encoder",
        {"d_model": 48, "d_kv": 24, "d_ff": 80, "num_layers": 3, "num_heads": 3, "relative_attention_num_buckets": 16,
         "relative_attention_max_distance": 40, "n_positions": 128},
    ),
}  # fmt: skip


def write_tiny_encoder(
    folder: Path,
    family: str = "bert",
    task: str = "Model",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint into the folder. `task`: suffix of the architecture's name (Model, ForSequenceClassification,
    ForTokenClassification or ForMaskedLM). Overrides are fields of its config.json."""
    import transformers

    prefix, facts = _FAMILIES[family]
    settings = {**_COMMON, **facts, **overrides}
    if family == "distilbert":
        settings = {key: value for key, value in settings.items() if key not in _COMMON or key in _DISTIL}
    if family == "t5":
        settings = {key: value for key, value in settings.items() if key not in _COMMON or key == "vocab_size"}
    config = getattr(transformers, f"{prefix.removesuffix('Encoder')}Config")(**settings)
    model = getattr(transformers, prefix + task)(config)
    scatter(model, seed)
    model.to(dtype).save_pretrained(folder)
    write_pair_tokenizer(folder, types=family in ("bert", "nomic"))
    return folder


_DISTIL = ("vocab_size", "max_position_embeddings", "pad_token_id", "num_labels")


def scatter(model: nn.Module, seed: int) -> None:
    """Random weights with a spread at which outputs differ clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name.lower() and name.endswith("weight")
            spread = 0.5 if "embeddings" in name and not is_scale else 0.15
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread + float(is_scale)
            parameter.copy_(values)


def pair_tokenizer() -> Tokenizer:
    """One token per byte, [CLS] before and [SEP] after each text; the second text of a pair has token type 1."""
    tokenizer = Tokenizer(models.BPE(vocab=json.loads(byte_tokenizer().to_str())["model"]["vocab"], merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return tokenizer


def write_pair_tokenizer(folder: Path, types: bool = True) -> None:
    """`types`: whether tokenizer_config.json lists token types as a model input."""
    folder.mkdir(parents=True, exist_ok=True)
    pair_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
    }
    if types:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_modules(
    folder: Path,
    pooling: str = "mean",
    dense: tuple[tuple[int, int, str], ...] = (),
    normalize: bool = True,
    seed: int = 0,
) -> Path:
    """Adds the files of sentence-transformers to a folder: pooling (cls, mean or lasttoken), projections (in, out,
    activation class of torch.nn), and normalization."""
    generator = torch.Generator().manual_seed(seed)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    hidden = json.loads((folder / "config.json").read_text()).get("hidden_size", 48)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    chosen = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}[pooling]
    _write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": hidden, **{f"pooling_mode_{mode}": mode == chosen for mode in modes}},
    )
    for number, (num_in, num_out, activation) in enumerate(dense, 2):
        path = folder / f"{number}_Dense"
        facts = {"in_features": num_in, "out_features": num_out, "bias": True,
                 "activation_function": f"torch.nn.modules.{_home(activation)}.{activation}"}  # fmt: skip
        _write_json(path / "config.json", facts)
        weights = {
            "linear.weight": torch.randn(num_out, num_in, generator=generator) * 0.2,
            "linear.bias": torch.randn(num_out, generator=generator) * 0.2,
        }
        save_file(weights, path / "model.safetensors")
        modules.append((path.name, "Dense"))
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    _write_json(folder / "modules.json", listed)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})
    return folder


def write_static(folder: Path, path: str, tensor: str, dense: tuple[tuple[int, int, str], ...] = ()) -> Path:
    """A folder whose first module is a StaticEmbedding of size 48. `path`: of that module; `tensor`: its name, of
    sentence-transformers or of model2vec, which also writes a config.json of its own."""
    _write_json(folder / "config.json", {"model_type": "model2vec", "architectures": ["StaticModel"]})
    write_modules(folder, dense=dense)
    (folder / "sentence_bert_config.json").unlink()
    if tensor == "embedding.weight":
        (folder / "config.json").unlink()
    listed = json.loads((folder / "modules.json").read_text())
    first = {"idx": 0, "name": "0", "path": path, "type": "sentence_transformers.models.StaticEmbedding"}
    _write_json(folder / "modules.json", [first, *listed[2:]])
    tokenizer = pair_tokenizer()
    (folder / path).mkdir(exist_ok=True)
    tokenizer.save(str(folder / path / "tokenizer.json"))
    weight = torch.randn(tokenizer.get_vocab_size(), 48, generator=torch.Generator().manual_seed(3))
    save_file({tensor: weight}, folder / path / "model.safetensors")
    return folder


def _home(activation: str) -> str:
    return "linear" if activation == "Identity" else "activation"


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))


def write_splade(folder: Path, strategy: str, activation: str) -> Path:
    """The modules of a sparse encoder beside a masked language model."""
    kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
    listed = [{"path": path, "type": f"sentence_transformers.sparse_encoder.models.{kinds[path]}"} for path in kinds]
    named = [{"idx": index, "name": str(index), **module} for index, module in enumerate(listed)]
    (folder / "modules.json").write_text(json.dumps(named))
    (folder / "1_SpladePooling").mkdir()
    settings = {"pooling_strategy": strategy, "activation_function": activation, "word_embedding_dimension": 304}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    return folder
