"""modules.json: what happens to a vector behind the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentence_files import BERT, IDENTITY, NEW, OLD, modules, read, write
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.locate import locate
from slipstream.checkpoint.pooling_info import DenseInfo, LayerNormInfo, PoolingInfo, UnitNormInfo


@pytest.mark.parametrize(
    ("settings", "methods"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ["first"]),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, ["mean"]),
        ({"pooling_mode_lasttoken": True}, ["last"]),
        ({"pooling_mode_max_tokens": True}, ["max"]),
        ({"pooling_mode": "cls"}, ["first"]),
        ({"pooling_mode": "mean"}, ["mean"]),
        ({"pooling_mode": ["lasttoken"]}, ["last"]),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ["mean_sqrt_len"]),
        ({"pooling_mode": ["weightedmean", "cls"]}, ["weightedmean", "first"]),
        # the old switches have an order of their own
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
         ["first", "max", "mean"]),
        ({"pooling_mode_cls_token": False}, ["mean"]),
        ({}, ["mean"]),
    ],
)  # fmt: skip
def test_both_ways_of_writing_the_pooling_mode(tmp_path: Path, settings: dict[str, Any], methods: list[str]) -> None:
    pooling = read(tmp_path, BERT, modules=modules("Transformer", "Pooling"), **{"1_Pooling__config": settings})
    assert list(pooling.methods) == methods and pooling.embed_size == 32 * len(methods)


@pytest.mark.parametrize("mode", ["median", [], ["cls", 5], 3, {}])
def test_other_pooling_modes_are_refused(tmp_path: Path, mode: Any) -> None:
    settings = {"1_Pooling__config": {"pooling_mode": mode}}
    with pytest.raises(UnsupportedModel, match="1_Pooling/config.json pools by .*cls, max, mean, .* one or several"):
        read(tmp_path, BERT, modules=modules("Transformer", "Pooling"), **settings)


def test_normalize_is_a_module(tmp_path: Path) -> None:
    mean = {"1_Pooling__config": {"pooling_mode": "mean"}}
    assert not read(tmp_path, BERT, modules=modules("Transformer", "Pooling"), **mean).normalize
    assert read(tmp_path, BERT, modules=modules("Transformer", "Pooling", "Normalize"), **mean).normalize


def test_newer_names_of_modules_are_known(tmp_path: Path) -> None:
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
              {"idx": 1, "path": "1_Pooling", "type": NEW + "Pooling"}]  # fmt: skip
    assert read(tmp_path, BERT, modules=listed, **{"1_Pooling__config": {"pooling_mode": "cls"}}).methods == ("first",)


def test_a_projection_behind_the_pooling(tmp_path: Path) -> None:
    dense = {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    pooling = read(
        tmp_path, BERT, modules=modules("Transformer", "Pooling", "Dense"),
        **{"1_Pooling__config": {"pooling_mode": "mean"}, "2_Dense__config": dense},
    )  # fmt: skip
    assert pooling.modules == (DenseInfo("2_Dense", 32, 8, True, "Tanh"),)
    assert pooling.embed_size == 8 and pooling.token_size == 32


def test_modules_behind_the_pooling_keep_their_order(tmp_path: Path) -> None:
    kinds = ("Pooling", "LayerNorm", "Normalize", "Dense", "Normalize")
    dense = {"in_features": 64, "out_features": 8, "use_residual": True, "activation_function": IDENTITY}
    files: dict[str, Any] = {
        "1_Pooling__config": {"pooling_mode": ["cls", "mean"]}, "2_LayerNorm__config": {"dimension": 64},
        "3_Normalize__config": {}, "4_Dense__config": dense,
    }  # fmt: skip
    pooling = read(tmp_path, BERT, modules=modules("Transformer", *kinds), **files)
    first, second, third = pooling.modules
    assert (first, second) == (LayerNormInfo("2_LayerNorm", 64), UnitNormInfo())
    assert third == DenseInfo("4_Dense", 64, 8, True, "Identity", residual=True)
    assert pooling.normalize and pooling.embed_size == 8
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pooling), type=PoolingInfo) == pooling  # front ends get it so
    files["2_LayerNorm__config"] = {"dimension": 32}
    with pytest.raises(BadCheckpoint, match="2_LayerNorm takes vectors of size 32, and its input has size 64"):
        read(tmp_path, BERT, modules=modules("Transformer", *kinds), **files)
    with pytest.raises(BadCheckpoint, match="has size 32"):  # a flag may not fit either
        read(tmp_path, BERT, {"pooling_type": "max"}, modules=modules("Transformer", "Pooling", "Dense"),
             **{"1_Pooling__config": {"pooling_mode": ["cls", "mean"]}, "2_Dense__config": dense})  # fmt: skip


def test_a_cross_encoder_of_modules(tmp_path: Path) -> None:
    dense = {"in_features": 32, "out_features": 1, "activation_function": IDENTITY, "module_output_name": "scores"}
    files = {"1_Pooling__config": {"pooling_mode": "cls"}, "2_Dense__config": dense}
    pooling = read(tmp_path, BERT, modules=modules("Transformer", "Pooling", "Dense"), **files)
    assert (pooling.tasks, pooling.methods, pooling.num_labels) == (("classify",), ("first",), 1)
    assert pooling.scores_by_modules and pooling.classify_activation == "sigmoid"
    with pytest.raises(UnsupportedModel, match="Normalize comes after a Dense that makes scores"):
        read(tmp_path, BERT, modules=modules("Transformer", "Pooling", "Dense", "Normalize"), **files)
    files["2_Dense__config"] = dense | {"module_output_name": "logits"}
    with pytest.raises(UnsupportedModel, match="makes logits of sentence_embedding"):
        read(tmp_path, BERT, modules=modules("Transformer", "Pooling", "Dense"), **files)


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "MaskedLM", "QuestionAnswering"])
def test_a_checkpoint_of_another_task_makes_vectors_where_folder_or_task_say_so(tmp_path: Path, task: str) -> None:
    config = BERT | {"architectures": [f"BertFor{task}"]}
    folder = {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": {"pooling_mode": "max"}}
    for place, (asked, files) in enumerate((({}, folder), ({"task": "embed"}, {}), ({"task": "token_embed"}, {}))):
        (tmp_path / str(place)).mkdir()
        pooling = read(tmp_path / str(place), config, asked, **files)
        assert set(pooling.tasks) == {"embed", "token_embed"} and not pooling.num_labels
        assert pooling.methods == (("max",) if files else ("mean",)) and pooling.normalize is not bool(files)


@pytest.mark.parametrize(
    "kinds", [("Pooling", "Pooling"), ("Dense", "Pooling"), ("Dense", "Pooling", "Normalize"), ("Normalize", "Pooling")]
)
def test_modules_in_an_order_that_would_be_another_model_are_refused(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    dense = {"in_features": 32, "out_features": 8, "activation_function": IDENTITY}
    dense |= {"module_input_name": "token_embeddings"} if kinds[0] == "Dense" else {}
    listed = modules("Transformer", *kinds)
    files = {f"{module['path']}__config": {"pooling_mode": "mean"} | dense for module in listed[1:]}
    with pytest.raises(UnsupportedModel, match="comes after"):
        read(tmp_path, BERT, modules=listed, **files)


@pytest.mark.parametrize("name", ["os.system", "torch.nn.modules.activation.Threshold", "evil.torch.nn.Tanh"])
def test_no_activation_but_known_ones_of_torch(tmp_path: Path, name: str) -> None:
    dense = {"in_features": 32, "out_features": 8, "activation_function": name}
    with pytest.raises(UnsupportedModel, match="activation"):
        read(
            tmp_path, BERT, modules=modules("Transformer", "Pooling", "Dense"),
            **{"1_Pooling__config": {"pooling_mode": "mean"}, "2_Dense__config": dense},
        )  # fmt: skip


@pytest.mark.parametrize("size", [-1, 0, 2**63, 1.5, True, None])
def test_a_projection_of_an_impossible_size_is_named(tmp_path: Path, size: object) -> None:
    dense = {"in_features": 32, "out_features": size, "activation_function": IDENTITY}
    with pytest.raises(BadCheckpoint, match="2_Dense/config.json: out_features"):
        read(
            tmp_path, BERT, modules=modules("Transformer", "Pooling", "Dense"),
            **{"1_Pooling__config": {"pooling_mode": "mean"}, "2_Dense__config": dense},
        )  # fmt: skip


@pytest.mark.parametrize("key", ["default_prompt_name", "similarity_fn_name"])
@pytest.mark.parametrize("value", [["cosine"], "unknown", 5])
def test_a_wrong_name_in_the_settings_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(BadCheckpoint, match=f"config_sentence_transformers.json: {key}"):
        read(
            tmp_path, BERT, modules=modules("Transformer", "Pooling"),
            **{"1_Pooling__config": {"pooling_mode": "mean"}, "config_sentence_transformers": {key: value}},
        )  # fmt: skip


def test_a_module_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="a module WordWeights"):
        read(tmp_path, BERT, modules=modules("Transformer", "WordWeights"))


@pytest.mark.parametrize("kind", ["Router", "Asym"])
@pytest.mark.parametrize("with_config", [True, False])
def test_a_router_is_refused_with_what_to_do(tmp_path: Path, kind: str, with_config: bool) -> None:
    words = f"has a {kind}, which runs other modules for queries.*save it with sentence-transformers"
    with pytest.raises(UnsupportedModel, match=words):
        if with_config:
            read(tmp_path, BERT, modules=modules(kind))
        write(tmp_path, "modules.json", modules(kind))
        locate(str(tmp_path))


def test_a_static_embedding_comes_first(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="a module StaticEmbedding, which does not run here"):
        read(tmp_path, BERT, modules=modules("Transformer", "StaticEmbedding"))


def test_a_module_outside_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="outside the folder"):
        read(tmp_path, BERT, modules=[{"type": OLD + "Pooling", "path": "../elsewhere"}])


def test_texts_that_a_chat_template_would_write_are_refused(tmp_path: Path) -> None:
    files: dict[str, Any] = {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": {}}
    for formats in ({"text": {}}, {"text": {}, "message": {"method": "forward"}}):
        files["sentence_bert_config"] = {"modality_config": formats}
        if "message" not in formats:
            read(tmp_path, BERT, **files)
            continue
        with pytest.raises(UnsupportedModel, match="its chat template write each text"):
            read(tmp_path, BERT, **files)
