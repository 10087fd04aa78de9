"""Checkpoints with quantised experts, against the weights that their numbers mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hand_load
from quantized_checkpoint import quantize, quantize_mxfp4
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.quantization import ONLINE_FP8
from slipstream.nn import load as loading
from slipstream.nn.layers.experts import Experts, expert_matrices
from slipstream.nn.weights.quantized_weight import DequantizedWeight, QuantizedWeight
from slipstream.nn.weights.weight_format import Weight
from slipstream.ops.gemm.moe.reference import matrix_of
from tiny import write_tiny, write_weights
from tiny_saved import NEMOTRON_3

MOE = dict(moe_intermediate_size=64, num_experts=4)


def load(folder: Path, **options: object) -> torch.nn.Module:
    return hand_load.load(folder, torch.float64, dequantize=False, **options)


def matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Both matrices of every expert."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for part in ("gate_up", "down"):
                stack = getattr(module, part)
                stack = expert_matrices(stack, module.shape.num_experts) if isinstance(stack, Weight) else stack
                for expert in range(module.shape.num_experts):
                    found[f"{name}.{expert}.{part}"] = matrix_of(stack, expert, torch.float64)
    return found


def check(folder: Path, plain: Path, rtol: float = 1e-7) -> torch.nn.Module:
    model = load(folder)
    found, expected = matrices(model), matrices(load(plain))
    assert found.keys() == expected.keys() and found
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=1e-9)
    return model


@pytest.fixture(params=["dequantised", "quantised"])
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """quantised: in the form that a GPU has."""
    if request.param == "quantised":
        monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)
    return str(request.param)


@pytest.mark.parametrize("method", ["fp8 tensor", "fp8 block", "awq", "gptq 4", "w4a16 zeros", "w8a8"])
def test_weights_are_those_of_the_numbers(method: str, storage: str, tmp_path: Path) -> None:
    folder, plain = (write_tiny(tmp_path / name, "qwen3_moe", **MOE) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, method))
    model = check(folder, plain)
    feed = model.layers[0].mlp
    assert isinstance(feed.gate_up, QuantizedWeight) == (storage == "quantised")
    if storage == "quantised" and method == "fp8 tensor":
        assert expert_matrices(feed.down, 4).matrix.input_scale is not None


@pytest.mark.parametrize("method", ["fp8 block", "w4a16 zeros"])
def test_experts_between_projections(method: str, storage: str, tmp_path: Path) -> None:
    latent = NEMOTRON_3 | dict(moe_latent_size=64, moe_intermediate_size=64, moe_shared_expert_intermediate_size=64)
    folder, plain = (write_tiny(tmp_path / name, "nemotron_h", **latent) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, method, skip="mamba"))
    feed = check(folder, plain).layers[1].mlp
    for part in (feed.gate_up, feed.into_latent.weight, feed.from_latent.weight):
        assert isinstance(part, QuantizedWeight) == (storage == "quantised")


def test_mxfp4_is_what_transformers_reads(storage: str, tmp_path: Path) -> None:
    folder, plain = (write_tiny(tmp_path / name, "gpt_oss") for name in ("q", "plain"))
    write_weights(plain, quantize_mxfp4(folder))
    model = check(folder, plain, rtol=0)
    assert isinstance(model.layers[0].mlp.down, QuantizedWeight) == (storage == "quantised")
    assert not any(isinstance(part, QuantizedWeight) for part in model.layers[0].attention.modules())


def test_plain_experts_are_quantised_to_fp8_at_load(storage: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "mixtral")
    expected, found = matrices(load(folder)), matrices(load(folder, quantization=ONLINE_FP8))
    for name, weight in expected.items():
        error = (found[name] - weight).abs()
        assert error.max() > 0 and bool((error <= weight.abs().amax(1, keepdim=True) / 28).all()), name


def test_dummy_weights_of_mxfp4(storage: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "gpt_oss", intermediate_size=80)  # no whole groups of 32: dequantised
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, load_format="dummy")
    assert isinstance(model.layers[0].mlp.gate_up, QuantizedWeight) == (storage == "quantised")
    assert isinstance(model.layers[0].mlp.down, DequantizedWeight)
    assert not any(isinstance(part, QuantizedWeight) for part in model.layers[0].attention.modules())
    for weight in matrices(model).values():
        assert weight.isfinite().all() and 0.01 < weight.std() < 0.03


def test_act_order_of_experts_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, plain = (write_tiny(tmp_path / name, "qwen3_moe", **MOE) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, "gptq act-order"))
    check(folder, plain)  # dequantised
    monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)
    with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.experts: experts of GPTQ with act-order"):
        load(folder)


def test_missing_scales_and_wrong_sizes_are_one_error(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", "gpt_oss")
    quantize_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    scales = tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    write_weights(folder, tensors)
    with pytest.raises(BadCheckpoint, match=r"missing .layers.1.mlp.experts.0.down.scales"):
        load(folder)
    write_weights(folder, tensors | {"model.layers.1.mlp.experts.down_proj_scales": scales[:, :, :2].contiguous()})
    with pytest.raises(BadCheckpoint, match="of wrong shape"):
        load(folder)
