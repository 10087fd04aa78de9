"""Heads against transformers on the same weights: classes of texts and tokens, words, projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hand_encoder import load_pooling, pack, run_texts
from slipstream.base.errors import BadCheckpoint
from slipstream.nn.pooling_heads import Heads
from tiny_encoder import write_modules, write_splade, write_tiny_encoder

FAMILIES = ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "nomic"]
PROMPTS = [list(range(5, 5 + n)) for n in (9, 1, 30, 30, 17)]


def heads_of(model: Any) -> Heads:
    assert model.heads is not None
    return model.heads


def logits(folder: Path, kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    model = getattr(transformers, f"AutoModel{kind}").from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_a_text(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, family, "ForSequenceClassification", dtype)
    expected = logits(folder, "ForSequenceClassification", dtype)
    model = load_pooling(folder, dtype)
    firsts = torch.stack([hidden[0] for hidden in run_texts(model, PROMPTS)])
    with torch.inference_mode():
        scores = heads_of(model).classify(firsts)
    atol = 1e-4 if dtype is torch.float32 or family == "modernbert" else 1e-9  # which turns in float32
    assert torch.stack(expected).std() > 0.1
    torch.testing.assert_close(scores, torch.stack(expected), rtol=0, atol=atol)


def test_modernbert_may_classify_the_mean(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "modernbert", "ForSequenceClassification", classifier_pooling="mean")
    model = load_pooling(folder)
    means = torch.stack([hidden.mean(0) for hidden in run_texts(model, PROMPTS)])
    with torch.inference_mode():
        scores = heads_of(model).classify(means)
    expected = torch.stack(logits(folder, "ForSequenceClassification", torch.float32))
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
    assert heads_of(model).pooling.methods == ("mean",)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_tokens(family: str, tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, family, "ForTokenClassification")
    expected = logits(folder, "ForTokenClassification", torch.float32)
    model = load_pooling(folder)
    with torch.inference_mode():
        scores = heads_of(model).token_classify(torch.cat(run_texts(model, PROMPTS)))
    torch.testing.assert_close(scores, torch.cat(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["max", "sum"])
def test_words_of_a_masked_language_model(
    how: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPLADE: the largest of each word over the tokens, or their sum."""
    monkeypatch.setattr("slipstream.nn.pooling_heads.VOCABULARY_CHUNK", 7)  # rows lie in several chunks
    folder = write_tiny_encoder(tmp_path, family, "ForMaskedLM")
    reduce = torch.amax if how == "max" else torch.sum
    expected = [reduce(torch.log1p(x.relu()), 0) for x in logits(folder, "ForMaskedLM", torch.float32)]
    if how == "sum":
        write_splade(folder, "sum", "relu")
    model = load_pooling(folder)
    heads = heads_of(model)
    starts = pack(PROMPTS).query_starts
    assert starts is not None and heads.sparse_by == "vocabulary"
    with torch.inference_mode():
        hidden = torch.cat([*run_texts(model, PROMPTS), torch.full((3, 48), 9.0)])  # tokens of padding
        weights = heads.sparse(hidden, starts)
    assert torch.stack(expected).count_nonzero() > 100
    torch.testing.assert_close(weights, torch.stack(expected), rtol=0, atol=1e-4)


def test_projections_of_a_sentence_folder(tmp_path: Path) -> None:
    folder = write_modules(write_tiny_encoder(tmp_path), "mean", ((48, 20, "Tanh"), (20, 12, "Identity")))
    heads = heads_of(load_pooling(folder, torch.float64))
    pooled = torch.randn(5, 48, dtype=torch.float64)
    first, second = (load_file(folder / name / "model.safetensors") for name in ("2_Dense", "3_Dense"))
    x = torch.tanh(pooled @ first["linear.weight"].double().T + first["linear.bias"])
    expected = x @ second["linear.weight"].double().T + second["linear.bias"]
    torch.testing.assert_close(heads.embed(pooled), expected)
    assert heads.embed(pooled.float()).dtype is torch.float64


def test_a_projection_in_a_torch_file(tmp_path: Path) -> None:
    folder = write_modules(write_tiny_encoder(tmp_path), "mean", ((48, 20, "Tanh"),))
    pooled = torch.randn(5, 48)
    expected = heads_of(load_pooling(folder)).embed(pooled)
    file = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(file), folder / "2_Dense" / "pytorch_model.bin")
    file.unlink()
    torch.testing.assert_close(heads_of(load_pooling(folder)).embed(pooled), expected, rtol=0, atol=0)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_bge_m3_weighs_words_and_has_vectors_of_tokens(ending: str, tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "xlm-roberta")
    by_word = {"weight": torch.randn(1, 48), "bias": torch.randn(1)}
    by_token = {"weight": torch.randn(48, 48), "bias": torch.randn(48)}
    save = torch.save if ending == "pt" else save_file
    save(by_word, folder / f"sparse_linear.{ending}")
    save(by_token, folder / f"colbert_linear.{ending}")
    heads = heads_of(load_pooling(folder))
    hidden = torch.randn(7, 48)
    starts = torch.tensor([0, 7], dtype=torch.int32)
    assert heads.sparse_by == "token"
    torch.testing.assert_close(
        heads.sparse(hidden, starts), torch.relu(hidden @ by_word["weight"].T + by_word["bias"]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(heads.token_embed(hidden), hidden @ by_token["weight"].T + by_token["bias"])


def test_a_colbert_checkpoint_projects_each_token(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "bert", "ForTokenClassification")
    weights = load_file(folder / "model.safetensors")
    weights = {name: x for name, x in weights.items() if not name.startswith("classifier")}
    projection = torch.randn(24, 48)
    save_file(weights | {"linear.weight": projection}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(config))
    marks = {"query_token_id": "[CLS]", "doc_token_id": "[SEP]"}  # whatever the tiny tokenizer has
    (folder / "artifact.metadata").write_text(json.dumps({"dim": 24, **marks}))
    heads = heads_of(load_pooling(folder))
    hidden = torch.randn(6, 48)
    torch.testing.assert_close(heads.token_embed(hidden), hidden @ projection.T)


def test_an_embedder_without_projections_has_no_heads(tmp_path: Path) -> None:
    assert load_pooling(write_tiny_encoder(tmp_path)).heads is None


def test_a_missing_classifier_is_named(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "bert", "ForSequenceClassification")
    weights = load_file(folder / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="1 missing .heads.classifier.weight"):
        load_pooling(folder)


def test_heads_are_float32_beside_a_model_in_bfloat16(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "bert", "ForSequenceClassification")
    heads = heads_of(load_pooling(folder, torch.bfloat16))
    assert heads.classify(torch.randn(2, 48).bfloat16()).dtype is torch.float32
