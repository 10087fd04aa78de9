"""Tiny encoders against transformers on the same weights: alone and packed together, with and without token types."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoModel

from hand_encoder import load_pooling, pack, run_texts
from new_bert_oracle import classify_new_bert, new_bert, write_new_bert
from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import read_model_info
from slipstream.nn.context import ForwardContext
from slipstream.nn.sdpa import SdpaAttention, choose_attention
from tiny_encoder import write_tiny_encoder

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert tanh gelu": ("bert", {"hidden_act": "gelu_new"}),
    "bert relu": ("bert", {"hidden_act": "relu"}),
    "bert fast gelu": ("bert", {"hidden_act": "gelu_fast"}),
    "roberta quick gelu": ("roberta", {"hidden_act": "quick_gelu"}),
    "modernbert quick gelu": ("modernbert", {"hidden_activation": "quick_gelu"}),
    "nomic mish": ("nomic", {"hidden_act": "mish"}),
    "roberta": ("roberta", {}),
    "roberta other pad": ("roberta", {"pad_token_id": 4}),
    "xlm-roberta": ("xlm-roberta", {}),
    "distilbert": ("distilbert", {}),
    "mpnet": ("mpnet", {}),
    "modernbert": ("modernbert", {}),
    "modernbert biased": ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    "modernbert wide window": ("modernbert", {"local_attention": 400}),
    "nomic": ("nomic", {}),
    # eps large enough to count: the usual ones change no result
    "bert large eps": ("bert", {"layer_norm_eps": 0.5}),
    "mpnet large eps": ("mpnet", {"layer_norm_eps": 0.5}),
    "modernbert large eps": ("modernbert", {"norm_eps": 0.5}),
    "nomic large eps": ("nomic", {"layer_norm_epsilon": 0.5}),
}
LENGTHS = (17, 1, 61, 61, 2, 17, 100)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 250, (n,), generator=generator).tolist() for n in lengths]  # no pad among them


def oracle(folder: Path, dtype: torch.dtype, prompts: list[list[int]], **inputs: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    in_float64(model, dtype)
    with torch.inference_mode():
        return [
            model(torch.tensor([ids]), **{name: torch.tensor([all_[i]]) for name, all_ in inputs.items()})
            .last_hidden_state[0]
            for i, ids in enumerate(prompts)
        ]  # fmt: skip


def in_float64(model: nn.Module, dtype: torch.dtype) -> None:
    """ModernBERT turns queries and keys in float32 whatever it is given; to compare 1e-9 it must not."""
    if dtype is torch.float64 and "ModernBert" in type(model).__name__:
        import transformers.models.modernbert.modeling_modernbert as modernbert

        def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return tuple(x * cos + modernbert.rotate_half(x) * sin for x in (q, k))

        pytest.MonkeyPatch().setattr(modernbert, "apply_rotary_pos_emb", turn)


@pytest.mark.every_second("variant", "dtype")
@DTYPES
@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_equal_transformers(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = write_tiny_encoder(tmp_path, family, dtype=dtype, **overrides)
    prompts = texts()
    expected = oracle(folder, dtype, prompts)
    model = load_pooling(folder, dtype)
    together = run_texts(model, prompts)
    alone = [run_texts(model, [ids])[0] for ids in prompts]
    for mine, single, theirs in zip(together, alone, expected, strict=True):
        assert theirs.std() > 0.3
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(single, theirs, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["bert", "nomic"])
def test_token_types_tell_two_texts_apart(family: str, tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, family, dtype=torch.float64)
    prompts, starts = texts((12, 30, 7)), [5, 30, 0]
    types = [[int(i >= start) for i in range(len(ids))] for ids, start in zip(prompts, starts, strict=True)]
    expected = oracle(folder, torch.float64, prompts, token_type_ids=types)
    model = load_pooling(folder, torch.float64)
    for mine, theirs in zip(run_texts(model, prompts, starts), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    plain = run_texts(model, prompts)
    assert not plain[0].allclose(expected[0], atol=1e-3)
    assert plain[1].equal(run_texts(model, prompts, starts)[1])  # all of type 0


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "nomic"])
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
def test_the_body_of_a_model_with_a_head_is_found_under_its_own_name(family: str, task: str, tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, family, task)
    prompts = texts((9, 20))
    mine = run_texts(load_pooling(folder), prompts)
    for found, theirs in zip(mine, oracle(folder, torch.float32, prompts), strict=True):
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-4)


def test_a_text_as_long_as_the_table_of_positions(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "roberta")
    prompts = texts((128,))
    torch.testing.assert_close(
        run_texts(load_pooling(folder), prompts)[0], oracle(folder, torch.float32, prompts)[0], rtol=0, atol=1e-4
    )


def test_a_nomic_config_of_the_first_releases(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "nomic")
    prompts = texts((9, 20))
    expected = oracle(folder, torch.float32, prompts)
    config = json.loads((folder / "config.json").read_text())
    old = {
        "architectures": ["NomicBertModel"], "n_embd": 48, "n_layer": 3, "n_head": 3, "n_inner": 80, "n_positions": 128,
        "vocab_size": config["vocab_size"], "activation_function": "swiglu", "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "layer_norm_epsilon": 1e-12, "type_vocab_size": 2, "qkv_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(old))
    for mine, theirs in zip(run_texts(load_pooling(folder), prompts), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@DTYPES
@pytest.mark.parametrize(
    "facts",
    [{}, {"rope_scaling": None, "type_vocab_size": 2}, {"pack_qkv": False, "architectures": ["GteModel"]}],
    ids=["ntk", "types", "parts"],
)
def test_the_rotary_bert_of_gte(facts: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_new_bert(tmp_path, dtype, **facts)
    prompts = texts()
    model = load_pooling(folder, dtype)
    for ids, mine in zip(prompts, run_texts(model, prompts), strict=True):
        theirs = new_bert(folder, ids)
        assert theirs.std() > 0.3
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE[dtype])


def test_the_classifier_of_gte(tmp_path: Path) -> None:
    folder = write_new_bert(tmp_path, root="new.", architectures=["NewForSequenceClassification"], type_vocab_size=1)
    model = load_pooling(folder)
    hidden = run_texts(model, texts())
    assert model.heads is not None
    firsts = torch.stack([x[0] for x in hidden])
    torch.testing.assert_close(hidden[2], new_bert(folder, texts()[2], "new."), rtol=0, atol=1e-4)
    torch.testing.assert_close(model.heads.classify(firsts), classify_new_bert(folder, firsts), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type absolute is not supported"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "mixed_b is not supported"),
        ({"logn_attention_scale": True}, "logn_attention_scale is not supported"),
        ({"hidden_act": "xielu"}, "xielu is not supported"),
    ],
)
def test_what_no_release_has_is_refused_by_name(facts: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        load_pooling(write_new_bert(tmp_path, **facts))


def test_norms_of_early_checkpoints_have_gamma_and_beta(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path)
    prompts = texts((9,))
    expected = run_texts(load_pooling(folder), prompts)[0]
    weights = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, folder / "model.safetensors")
    assert run_texts(load_pooling(folder), prompts)[0].equal(expected)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # torch's way to say this CPU has no bfloat16
def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path)
    exact = torch.cat(run_texts(load_pooling(folder), texts()))
    rough = torch.cat(run_texts(load_pooling(folder, torch.bfloat16), texts()))
    assert rough.dtype is torch.bfloat16
    assert (rough.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "modernbert", "ForSequenceClassification")
    (folder / "model.safetensors").unlink()
    model = load_pooling(folder, load_format="dummy")
    assert torch.cat(run_texts(model, texts())).isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_gives_what_the_cpu_gives(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = write_tiny_encoder(tmp_path, family, **overrides)
    prompts = texts()
    expected = torch.cat(run_texts(load_pooling(folder, torch.float64), prompts))
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 0.3)):
        attention = choose_attention(torch.device("cuda"), (), dtype, (read_model_info(folder).head_dim,))
        found = run_texts(load_pooling(folder, dtype, device="cuda"), prompts, None, attention, "cuda")
        torch.testing.assert_close(torch.cat(found).cpu().double(), expected, rtol=0, atol=tolerance)


@pytest.mark.cuda
def test_a_captured_encoder_serves_other_rows_of_the_same_size(tmp_path: Path) -> None:
    """The number of tokens and rows is fixed; how the rows share the tokens is read from the device."""
    folder = write_tiny_encoder(tmp_path, "modernbert")
    model = load_pooling(folder, torch.float32, device="cuda")
    attention = choose_attention(torch.device("cuda"), (), torch.float32, (read_model_info(folder).head_dim,))
    first, second = texts((90, 1, 37, 40)), texts((17, 100, 3, 48))
    batch = pack(first, device="cuda")

    def run() -> torch.Tensor:
        return model(ForwardContext(batch, attention, attention.make_metadata(batch), [], ()))

    with torch.inference_mode():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for prompts in (second, first):
            new = pack(prompts, device="cuda")
            assert batch.query_starts is not None and new.query_starts is not None
            for mine, theirs in ((batch.ids, new.ids), (batch.positions, new.positions)):
                mine.copy_(theirs)
            batch.query_starts.copy_(new.query_starts)
            graph.replay()
            torch.cuda.synchronize()
            expected = torch.cat(run_texts(model, prompts, None, attention, "cuda"))
            assert out.equal(expected)


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "nomic"])
def test_no_device_value_is_read(family: str, tmp_path: Path) -> None:
    """Neither by the network nor by what weighs words behind it."""
    model = load_pooling(write_tiny_encoder(tmp_path, family, "ForMaskedLM"))
    assert model.heads is not None
    real = pack(texts((20, 3, 20)))
    attention = SdpaAttention((), torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        names = ("ids", "positions", "lengths", "query_starts")
        batch = replace(real, **{name: mode.from_tensor(getattr(real, name)) for name in names})
        assert batch.query_starts is not None
        with pytest.raises(DataDependentOutputException):
            int(batch.lengths[0])  # the net itself works
        hidden = model(ForwardContext(batch, attention, attention.make_metadata(batch), [], ()))
        assert hidden.shape == (43, 48)
        assert model.heads.sparse(hidden, batch.query_starts).shape == (3, 304)
