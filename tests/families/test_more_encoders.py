"""ELECTRA, ALBERT, XLM-R-XL, DeBERTa-v2, EuroBERT, T5 and JinaBERT against transformers or plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hand_encoder import load_pooling, run_texts
from jina_bert_oracle import QK_NORM, jina_bert, write_jina_bert
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import model_info_from_config, read_model_info
from slipstream.nn.layers.position_embedding import alibi_slopes
from slipstream.nn.registry import find_heads, find_shape
from slipstream.nn.sdpa import choose_attention
from tiny_encoder import write_tiny_encoder

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "electra": ("electra", {}),
    "electra base": ("electra", {"embedding_size": 48}),
    "albert": ("albert", {}),
    "xlm-roberta-xl": ("xlm-roberta-xl", {}),
    "deberta": ("deberta", {}),
    "deberta positions": ("deberta", {"position_buckets": -1, "position_biased_input": True, "type_vocab_size": 2}),
    "deberta far": ("deberta", {"max_relative_positions": 24, "norm_rel_ebd": "none"}),
    "eurobert": ("eurobert", {}),
    "t5": ("t5", {}),
    "t5 gated": ("t5", {"feed_forward_proj": "gated-gelu"}),
}
TOLERANCE = {torch.float64: 5e-5, torch.float32: 5e-4}  # norms of T5 are computed in float32


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 250, (n,), generator=generator).tolist() for n in (17, 1, 61, 2, 100)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    folder = write_tiny_encoder(tmp_path, family, dtype=torch.float64, **changes)
    kind = transformers.T5EncoderModel if family == "t5" else transformers.AutoModel
    theirs = kind.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        expected = [theirs(torch.tensor([ids])).last_hidden_state[0] for ids in texts()]
    for dtype, tolerance in TOLERANCE.items():
        model = load_pooling(folder, dtype)
        together, alone = run_texts(model, texts()), run_texts(model, texts()[2:3])
        torch.testing.assert_close(alone[0].double(), expected[2], rtol=0, atol=tolerance)
        for mine, wanted in zip(together, expected, strict=True):
            assert wanted.std() > 0.1
            torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["electra", "albert", "xlm-roberta-xl", "deberta", "eurobert"])
def test_classes_of_texts_and_tokens(family: str, tmp_path: Path) -> None:
    for task in ("ForSequenceClassification", "ForTokenClassification"):
        folder = write_tiny_encoder(tmp_path / task, family, task)
        theirs = getattr(transformers, f"AutoModel{task}").from_pretrained(folder).eval()
        model = load_pooling(folder)
        hidden = run_texts(model, texts())
        assert model.heads is not None
        with torch.inference_mode():
            expected = [theirs(torch.tensor([ids])).logits[0] for ids in texts()]
            if task == "ForTokenClassification":
                found = list(model.heads.token_classify(torch.cat(hidden)).split([len(x) for x in hidden]))
            else:
                pooled = [x.mean(0) if model.heads.pooling.methods == ("mean",) else x[0] for x in hidden]
                found = list(model.heads.classify(torch.stack(pooled)))
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("facts", [{}, {"auto_map": QK_NORM}], ids=["english", "normed queries"])
def test_jina_bert_equals_plain_torch(facts: dict[str, Any], tmp_path: Path) -> None:
    folder = write_jina_bert(tmp_path, **facts)
    expected = [jina_bert(folder, ids) for ids in texts()]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        for mine, wanted in zip(run_texts(load_pooling(folder, dtype), texts()), expected, strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_gives_what_the_cpu_gives(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    folder = write_tiny_encoder(tmp_path, family, **changes)
    expected = torch.cat(run_texts(load_pooling(folder, torch.float64), texts()))
    # T5 does not scale its scores: in bfloat16 it is off by 7% on the CPU too
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        attention = choose_attention(torch.device("cuda"), (), dtype, (read_model_info(folder).head_dim,))
        found = run_texts(load_pooling(folder, dtype, device="cuda"), texts(), None, attention, "cuda")
        off = torch.cat(found).cpu().double() - expected
        assert off.norm() < tolerance * expected.norm(), f"{dtype}: off by {off.norm() / expected.norm():.2e}"


def test_slopes_of_a_number_of_heads_that_is_no_power_of_two() -> None:
    assert alibi_slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
V3 = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}


@pytest.mark.parametrize(
    ("architecture", "facts", "error", "words"),
    [
        ("DebertaV2Model", {}, UnsupportedModel, "supported with relative_attention"),
        ("DebertaV2Model", V3 | {"pos_att_type": "c2p"}, UnsupportedModel, "c2p|p2c"),
        ("DebertaV2Model", V3 | {"conv_kernel_size": 3}, UnsupportedModel, "conv_kernel_size"),
        ("AlbertModel", {"num_hidden_groups": 2}, UnsupportedModel, "num_hidden_groups 2"),
        ("ElectraForMaskedLM", {}, UnsupportedModel, "set the task to embed"),
        ("EuroBertForMaskedLM", {}, UnsupportedModel, "set the task to embed"),
        ("EuroBertForSequenceClassification", {}, UnsupportedModel, "classifier_pooling late"),
        ("JinaBertModel", {"feed_forward_type": "original"}, UnsupportedModel, "feed_forward_type original"),
        ("JinaBertModel", {"position_embedding_type": "absolute"}, UnsupportedModel, "alibi is"),
        ("T5EncoderModel", {"relative_attention_num_buckets": 2}, BadCheckpoint, "must be 4 or more"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    architecture: str, facts: dict[str, Any], error: type[Exception], words: str
) -> None:
    info = model_info_from_config(json.loads(json.dumps({"architectures": [architecture], **SIZES, **facts})))
    with pytest.raises(error, match=words):
        find_shape(info)
        find_heads(info)
