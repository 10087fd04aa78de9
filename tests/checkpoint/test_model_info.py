from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.errors import BadCheckpoint, ModelError, UnsupportedModel
from slipstream.checkpoint.architecture import OF_MODEL_TYPE
from slipstream.checkpoint.locate import has_weights, locate
from slipstream.checkpoint.model_info import (
    ModelInfo,
    check_info,
    family_name,
    model_info_from_config,
    read_model_info,
)
from slipstream.nn.registry import BIDIRECTIONAL, DECODERS, ENCODER_FAMILIES, find_family

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}


def info(**changes: Any) -> ModelInfo:
    return model_info_from_config({**CONFIG, **changes})


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": [1, 2], "torch_dtype": "bfloat16"}))
    found = read_model_info(tmp_path)
    assert (found.architecture, found.head_dim, found.num_kv_heads) == ("LlamaForCausalLM", 16, 4)
    assert (found.eos_token_ids, found.dtype, found.tied_embeddings) == ((1, 2), "bfloat16", False)


def test_old_and_new_ways_to_write_rope_mean_the_same() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    old = info(rope_theta=5e5, rope_scaling=scaling).rope
    new = info(rope_parameters={**scaling, "rope_theta": 5e5}).rope
    assert old == new
    assert (old.theta, old.kind, old.factors) == (5e5, "llama3", {"factor": 8.0})
    assert info(rope_scaling=None).rope.kind == "default"


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"architectures": []}, BadCheckpoint, "neither an architecture nor a model_type"),
        ({"architectures": None, "model_type": ""}, BadCheckpoint, "neither an architecture nor a model_type"),
        ({"architectures": "LlamaForCausalLM"}, BadCheckpoint, "architectures is 'LlamaForCausalLM', not a list"),
        ({"architectures": [5]}, BadCheckpoint, "not a list of names"),
        ({"architectures": None, "model_type": "whisper"}, UnsupportedModel, "model_type whisper .*; docs/models.md"),
        ({"vocab_size": "many"}, BadCheckpoint, "wrong value"),
        ({"num_attention_heads": 0}, BadCheckpoint, "wrong value"),
        ({"rope_scaling": [8]}, BadCheckpoint, "wrong value"),
        ({"dtype": ["float32"]}, BadCheckpoint, "wrong value: dtype is .*not a name"),
        ({"intermediate_size": None, "n_embd": "many"}, BadCheckpoint, "wrong value"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], kind: type[ModelError], words: str) -> None:
    with pytest.raises(kind, match=words):
        info(**changes)


def test_without_architectures_the_model_type_counts() -> None:
    for kind, architecture in OF_MODEL_TYPE.items():
        assert info(architectures=None, model_type=kind).architecture == architecture
        find_family(info(architectures=[architecture]))  # each of them runs here
    assert info(architectures=["BertForMaskedLM"], model_type="llama").architecture == "BertForMaskedLM"
    named = {family_name(architecture) for architecture in OF_MODEL_TYPE.values()}
    # these have the model_type of another family, or one that ends with _text
    others = {
        "GPT2",
        "HF_ColBERT",
        "JinaBert",
        "LlamaBidirectional",
        "StaticEmbedding",  # a module of sentence-transformers
        *(name for name in DECODERS if name.endswith("Text")),
    }
    assert {*DECODERS, *ENCODER_FAMILIES, *BIDIRECTIONAL} <= named | others


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({"embedding.weight": [7, 4]}, None, ""),
        ({"embedding.weight": [7, 4, 2]}, UnsupportedModel, "one matrix embedding.weight or embeddings"),
        (
            {"embeddings": [7, 4], "mapping": [9]},
            UnsupportedModel,
            "the tensors embeddings, mapping;.*save it again",
        ),
        ({"embedding.weight": [-7, 4]}, BadCheckpoint, "StaticEmbeddingModel has a vocab_size of -7"),
        ({"embedding.weight": "huge"}, BadCheckpoint, "corrupt or truncated"),
        (None, BadCheckpoint, "corrupt or truncated"),
    ],
)
def test_the_sizes_of_a_static_embedding_are_those_of_its_matrix(
    tmp_path: Path, tensors: dict[str, Any] | None, error: type[ModelError] | None, words: str
) -> None:
    module = {"type": "sentence_transformers.models.StaticEmbedding", "path": "0_StaticEmbedding"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in (tensors or {}).items()}).encode()
    weights = tmp_path / "0_StaticEmbedding" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"" if tensors is None else len(header).to_bytes(8, "little") + header)
    if error is None:
        found = check_info(read_model_info(tmp_path))
        assert (found.vocab_size, found.hidden_size, found.num_layers, found.is_causal) == (7, 4, 0, False)
        assert locate(str(tmp_path)).kind == "folder" and has_weights(tmp_path)
        return
    with pytest.raises(error, match=words):
        check_info(read_model_info(tmp_path))


def test_a_missing_fact_means_a_model_we_do_not_know() -> None:
    with pytest.raises(UnsupportedModel, match="lacks 'hidden_size'"):
        model_info_from_config({key: value for key, value in CONFIG.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no config.json"),
        (b"{", "cannot be read"),
        (b"[]", "an object"),
        (b'{"a":' * 9999, "nested too deeply"),
        (b'{"a": "\\uD800"}', "surrogates not allowed"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=words):
        read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"quantization_config": {"quant_method": "quip"}}, "quip"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors with 0 different schemes"),
        ({"quantization_config": {}}, "an unnamed method"),
    ],
)
def test_a_quantised_checkpoint_is_refused_before_anything_is_planned(facts: dict[str, Any], kind: str) -> None:
    """Also where no weight is read: a benchmark of random weights would be of another model."""
    with pytest.raises(UnsupportedModel, match=f"quantised by {kind}.*which is not supported.*; give the unquantised"):
        info(**facts)
    assert info(quantization_config=None).hidden_size == 64
