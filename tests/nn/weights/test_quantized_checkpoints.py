"""Quantised checkpoints of every method, against the weights that their numbers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hand_load
from quantized_checkpoint import METHODS, quantize
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.quantization import ONLINE_FP8, Quantization
from slipstream.nn import load as loading
from slipstream.nn.decoder import Decoder
from slipstream.nn.layers.linear import Linear
from slipstream.nn.weights.kinds import BatchInvariantWeight
from slipstream.nn.weights.quantized_layouts import quantize_part
from slipstream.nn.weights.quantized_weight import DequantizedWeight, Quantized, QuantizedWeight
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.table import multiply
from tiny import write_tiny, write_weights


def load(folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    return hand_load.load(folder, dtype, dequantize=False, **options)


def matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The matrix of each Linear, by multiplying unit vectors."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            found[name] = multiply(Gemm(torch.eye(module.num_inputs, dtype=torch.float64), module.weight.matrix)).t()
    return found


@pytest.fixture(params=["dequantised", "quantised"])
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """quantised: in the form that a GPU has, multiplied by the reference."""
    if request.param == "quantised":
        monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)
    return str(request.param)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_those_of_the_numbers(method: str, storage: str, tmp_path: Path) -> None:
    size = 120 if storage == "dequantised" else 128  # columns that are no whole groups
    folder, plain = (write_tiny(tmp_path / name, "llama", intermediate_size=size) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, method))
    expected, model = matrices(load(plain)), load(folder)
    found = matrices(model)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)
    is_kept = any(isinstance(module, QuantizedWeight) for module in model.modules())
    assert is_kept == (storage == "quantised")


@pytest.mark.parametrize("method", ["fp8 tensor", "fp8 block", "awq", "gptq act-order", "w4a16 zeros", "nf4 double"])
def test_projections_that_the_checkpoint_joins_are_quantised(method: str, storage: str, tmp_path: Path) -> None:
    """Phi stores q, k and v as one tensor, and gate and up."""
    folder, plain = (write_tiny(tmp_path / name, "phi3", intermediate_size=128) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, method))
    found, expected = matrices(load(folder)), matrices(load(plain))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)


LATENT = dict(kv_lora_rank=64, q_lora_rank=64, v_head_dim=16, moe_intermediate_size=64, n_shared_experts=1)
REORDERED = {"deepseek_v2": LATENT, "deepseek_v3": LATENT, "glm": dict(head_dim=16)}


@pytest.mark.every_second("family", "method")
@pytest.mark.parametrize("family", REORDERED)
@pytest.mark.parametrize("method", ["fp8 tensor", "fp8 block", "awq", "gptq act-order", "w4a16 zeros", "nf4"])
def test_projections_whose_rows_are_reordered_are_quantised(
    family: str, method: str, storage: str, tmp_path: Path
) -> None:
    """Of checkpoints that rotate adjacent numbers, with latent attention and without."""
    sizes = dict(intermediate_size=128) | REORDERED[family]
    folder, plain = (write_tiny(tmp_path / name, family, **sizes) for name in ("q", "plain"))
    # experts with an order of columns are refused on a GPU
    write_weights(plain, quantize(folder, method, skip="experts" if "order" in method else "none"))
    quantised, other = load(folder), load(plain)
    found, expected = matrices(quantised), matrices(other)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)
    if family != "glm":
        layers = zip(quantised.layers, other.layers, strict=True)
        for own, wanted in layers:
            torch.testing.assert_close(own.attention.expand.data, wanted.attention.expand.data, rtol=1e-7, atol=1e-9)
            assert isinstance(own.attention.first.weight, QuantizedWeight) == (storage == "quantised")


DELTA: dict[str, Any] = dict(
    moe_intermediate_size=64, shared_expert_intermediate_size=64, intermediate_size=128, head_dim=32,
    linear_value_head_dim=16,
)  # fmt: skip


@pytest.mark.every_second("family", "method")
@pytest.mark.parametrize("skip", ["in_proj_b", "linear_attn"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("method", ["fp8 channel", "gptq 8 sym", "w4a16", "nf4"])
def test_projections_that_the_checkpoint_interleaves_are_quantised(
    family: str, method: str, skip: str, storage: str, tmp_path: Path
) -> None:
    """A product of which the checkpoint quantises a part (heads, and not their gates) is dequantised."""
    folder, plain = (write_tiny(tmp_path / name, family, **DELTA) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, method, skip=skip))
    model, other = load(folder), load(plain)
    found, expected = matrices(model), matrices(other)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)
    kinds = [type(module.weight) for name, module in model.named_modules() if name.endswith("attention.qkv")]
    assert kinds == [QuantizedWeight if storage == "quantised" else DequantizedWeight]


@pytest.mark.parametrize("method", ["awq", "gptq act-order", "w8a8", "fp8 block"])
def test_a_part_of_a_merged_weight_that_is_not_quantised(method: str, storage: str, tmp_path: Path) -> None:
    """And columns that are no whole groups, which no kernel reads."""
    folder, plain = (write_tiny(tmp_path / name, "llama", intermediate_size=120) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, method, skip="k_proj"))
    found, expected = matrices(load(folder)), matrices(load(plain))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["fp8 channel", "w8a8", "gptq act-order", "awq", "nf4"])
def test_the_projection_to_tokens_is_quantised(method: str, tied: bool, storage: str, tmp_path: Path) -> None:
    """It is then a weight of its own, also if the config says that it is the embedding."""
    sizes = dict(intermediate_size=128, tie_word_embeddings=False)
    folder, plain = (write_tiny(tmp_path / name, "llama", **sizes) for name in ("q", "plain"))
    write_weights(plain, quantize(folder, method, head=True))
    if tied:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    model, other = load(folder), load(plain)
    found, expected = matrices(model), matrices(other)
    torch.testing.assert_close(found["head"], expected["head"], rtol=1e-7, atol=1e-9)
    assert isinstance(model.head.weight, QuantizedWeight) == (storage == "quantised")
    ids = torch.tensor([7, 0, 9])
    torch.testing.assert_close(model.lm_rows(ids), other.lm_rows(ids), rtol=1e-7, atol=1e-9)


def test_modules_without_scales_stay_as_they_are(tmp_path: Path) -> None:
    folder, plain = write_tiny(tmp_path / "q", "llama"), write_tiny(tmp_path / "plain", "llama")
    write_weights(plain, quantize(folder, "w4a16", skip="down_proj"))
    found, expected = matrices(load(folder)), matrices(load(plain))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)


def test_static_input_scales_of_merged_parts_become_the_largest(storage: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    quantize(folder, "fp8 tensor")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.input_scale"] = torch.tensor(2.0)
    write_weights(folder, tensors)
    weight = load(folder).layers[0].attention.qkv.weight
    if storage == "quantised":
        assert weight.input_scale.tolist() == [2.0]


def test_plain_weights_are_quantised_to_fp8_at_load(storage: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    expected, found = (
        matrices(load(folder)),
        matrices(load(folder, quantization=ONLINE_FP8)),
    )
    assert torch.equal(found.pop("head"), expected.pop("head"))
    for name, weight in expected.items():
        error = (found[name] - weight).abs()
        assert error.max() > 0 and bool((error <= weight.abs().amax(1, keepdim=True) / 28).all()), name


@pytest.mark.parametrize(
    ("method", "kind", "bound"),
    [("awq", torch.uint8, 1 / 7), ("gptq act-order", torch.uint8, 1 / 14), ("gptq rows", torch.uint8, 1 / 14),
     ("nf4", torch.uint8, 1 / 3), ("w8a8", torch.int8, 1 / 254), ("gptq 8 sym", torch.int8, 1 / 254),
     ("fp8 block", torch.float8_e4m3fn, 1 / 28), ("modelopt", torch.float8_e4m3fn, 1 / 28)],
)  # fmt: skip
def test_dummy_weights_of_a_quantised_config(
    method: str, kind: torch.dtype, bound: float, storage: str, tmp_path: Path
) -> None:
    """For benchmarks: the dummy weights of a plain config, rounded to the nearest numbers of the method. `bound`: of
    the errors, as a part of a row's largest number."""
    folder, plain = (write_tiny(tmp_path / name, "llama", intermediate_size=128) for name in ("q", "plain"))
    quantize(folder, method)
    model, expected = load(folder, load_format="dummy"), matrices(load(plain, load_format="dummy"))
    if storage == "quantised":
        assert model.layers[0].mlp.down.weight.values.dtype is kind
    found = matrices(model)
    assert torch.equal(found.pop("head"), expected.pop("head"))
    for name, weight in expected.items():
        error = (found[name] - weight) / weight.abs().amax(1, keepdim=True)
        assert 0 < error.abs().max() <= bound * 1.01 and error.mean().abs() < bound / 10, name


def _drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    write_weights(folder, tensors)


def _configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def group(**changes: object) -> dict[str, object]:
    """A group of modules of compressed-tensors."""
    return {"targets": ["Linear"], "input_activations": None, "weights": W8A8 | changes}


def test_settings_of_modelopt_in_a_file_of_their_own(storage: str, tmp_path: Path) -> None:
    """And scales of a KV cache, which say nothing about weights."""
    folder, plain = (write_tiny(tmp_path / name, "llama") for name in ("q", "plain"))
    write_weights(plain, quantize(folder, "modelopt"))
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_algo": config.pop("quantization_config")["quant_algo"], "kv_cache_quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt"}, "quantization": settings | {"exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    names = [
        f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in ("k_proj.k_scale", "v_proj.v_scale")
    ]
    write_weights(folder, load_file(folder / "model.safetensors") | {name: torch.tensor(0.1) for name in names})
    found, expected = matrices(load(folder)), matrices(load(plain))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(BadCheckpoint, match="hf_quant_config.json does not hold an object"):
        load(folder)


def test_a_quantised_kv_cache_alone(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    path = folder / "config.json"
    own = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": own}))
    assert not any(isinstance(module, DequantizedWeight) for module in load(folder).modules())


W8A8: dict[str, object] = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
ONLINE = {"R3": {"type": "hadamard", "apply": [{"targets": ["self_attn"], "location": "k_cache"}]}}
FUSED = {"R1": {"type": "hadamard", "apply": [{"targets": ["re:.*q_proj$"], "location": "weight_input"}]}}


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": {"0": group(), "1": group(observer="mse", block_structure=None)}},
        {"config_groups": {"0": group(), "1": {"targets": ["re:.*self_attn$"], "output_activations": {"num_bits": 8}}}},
        {"format": None, "config_groups": {"0": group() | {"format": "int-quantized"}}},
        {"ignore": ["lm_head", "re:.*gate$"], "transform_config": {"config_groups": FUSED}},
    ],
)
def test_groups_of_modules_with_weights_in_one_scheme(changes: dict[str, object], tmp_path: Path) -> None:
    folder, plain = (write_tiny(tmp_path / name, "llama") for name in ("q", "plain"))
    write_weights(plain, quantize(folder, "w8a8"))
    _configure(folder, **changes)
    found, expected = matrices(load(folder)), matrices(load(plain))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "columns", "kind"),
    [
        ({"bits": 8, "group": 128}, 192, DequantizedWeight),
        ({"bits": 8, "group": 64}, 192, QuantizedWeight),
        ({"bits": 8, "group": 0}, 77, QuantizedWeight),
        ({"bits": 4, "group": 16}, 80, DequantizedWeight),
        ({"bits": 4, "group": 0}, 80, DequantizedWeight),
        ({"bits": 4, "group": 0}, 96, QuantizedWeight),
    ],
)
def test_weights_that_kernels_cannot_read_are_dequantised(settings: dict[str, int], columns: int, kind: type) -> None:
    quantization = Quantization(method="gptq", layout="gptq", **settings)
    assert type(Quantized(quantization, "w", torch.float32).new_weight(64, columns)) is kind
    invariant = Quantized(quantization, "w", torch.float32, batch_invariant=True).new_weight(64, columns)
    assert isinstance(invariant, QuantizedWeight | BatchInvariantWeight)


def test_rows_that_awq_cannot_pack_are_refused() -> None:
    quantization = Quantization(method="awq", layout="awq", bits=4, group=64)
    with pytest.raises(BadCheckpoint, match="w is 60 x 64, and AWQ packs 8 rows together"):
        Quantized(quantization, "w", torch.float32).new_weight(60, 64)


def test_missing_scales_are_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    quantize(folder, "fp8 tensor")
    _drop(folder, "model.layers.1.mlp.down_proj.weight_scale")
    with pytest.raises(BadCheckpoint, match="layers.1.mlp.down_proj.weight is FP8 and has no weight_scale"):
        load(folder)
    quantize(write_tiny(tmp_path, "llama"), "awq")
    _drop(folder, "model.layers.1.self_attn.q_proj.scales")
    with pytest.raises(BadCheckpoint, match="1 missing .layers.1.attention.qkv.q.scales"):
        load(folder)
    quantize(write_tiny(tmp_path, "llama"), "gptq act-order")
    tensors = load_file(folder / "model.safetensors")
    write_weights(folder, {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")})
    with pytest.raises(BadCheckpoint, match="14 missing .layers.0.attention.qkv.q.g_idx"):
        load(folder)


@pytest.mark.parametrize(
    ("method", "changes", "error", "words"),
    [
        ("awq", {"group_size": 64}, BadCheckpoint, "28 of wrong shape"),
        ("awq", {"group_size": 20}, BadCheckpoint, "group_size of quantization_config is 20"),
        ("awq", {"bits": 3}, UnsupportedModel, "awq with 3 bits"),
        ("awq", {"version": "gemv"}, UnsupportedModel, "version gemv"),
        ("gptq 4", {"sym": True}, BadCheckpoint, "qzeros are not in the middle"),
        ("gptq 4", {"bits": "four"}, BadCheckpoint, "wrong value"),
        ("gptq act-order", {"group_size": 16}, BadCheckpoint, "wrong shape"),
        ("w8a8", {"format": "nvfp4-pack-quantized"}, UnsupportedModel, "format nvfp4-pack-quantized"),
        ("fp8 tensor", {"quant_method": "awq"}, BadCheckpoint, "down_proj.weight is FP8 and has no qweight"),
        ("w8a8", {"transform_config": {"config_groups": ONLINE}}, UnsupportedModel, "transform_config of activations"),
        ("w8a8", {"config_groups": {"0": group(), "1": group(num_bits=4)}}, UnsupportedModel, "2 different schemes"),
        ("nf4", {"load_in_4bit": False}, UnsupportedModel, "bitsandbytes with 8 bits"),
        ("nf4", {"bnb_4bit_quant_type": "af4"}, UnsupportedModel, "bnb_4bit_quant_type af4"),
        ("fp8 tensor", {"quant_method": "quip"}, UnsupportedModel, "quip, .* not supported .supported: auto-round"),
        ("modelopt", {"quant_algo": "NVFP4"}, UnsupportedModel, "modelopt with quant_algo NVFP4"),
        ("modelopt", {"quantization": []}, BadCheckpoint, "wrong value"),
        ("gptq dynamic", {"dynamic": {"a+": {"bits": 8}}}, UnsupportedModel, "dynamic .another bits for a+"),
        ("gptq dynamic", {"dynamic": ["a"]}, BadCheckpoint, "wrong value"),
        ("auto-round gptq", {"extra_config": {"x": {"sym": True}}}, UnsupportedModel, "another sym for x"),
        ("auto-round gptq", {"packing_format": "auto_round:gptqmodel"}, UnsupportedModel, "auto_round:gptqmodel, int"),
        ("auto-round gptq", {"data_type": "mx_fp"}, UnsupportedModel, "mx_fp weights and inputs of 16 bits"),
        ("auto-round gptq", {"act_bits": 8}, UnsupportedModel, "int weights and inputs of 8 bits"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_clear_error(
    method: str, changes: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, "llama")
    quantize(folder, method)
    _configure(folder, **changes)
    with pytest.raises(error, match=words):
        load(folder)


def test_bitsandbytes_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", intermediate_size=128)
    quantize(folder, "nf4")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors[name].numpy().tobytes()) | {"blocksize": 128}
    tensors[name] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8).clone()
    write_weights(folder, tensors)
    with pytest.raises(BadCheckpoint, match="down_proj.weight.quant_state.* has blocks of 128 weights"):
        load(folder)
    del tensors[name]
    write_weights(folder, tensors)
    with pytest.raises(BadCheckpoint, match="missing .layers.1.mlp.down.quant_state"):
        load(folder)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_random_weights_become_the_nearest_integers(bits: int, symmetric: bool) -> None:
    """As `load_format=dummy` stores them for a quantised checkpoint."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    q = Quantization(method="gptq", layout="online", bits=bits, group=32, symmetric=symmetric)
    part = quantize_part(q, weight)
    zeros = torch.full_like(part.scale, 2 ** (bits - 1)) if part.zeros is None else part.zeros
    groups = part.values.float().unflatten(1, (-1, 32))
    back = (groups - zeros.unsqueeze(-1)) * part.scale.unsqueeze(-1)
    error = (back - weight.unflatten(1, (-1, 32))).abs()
    assert (error <= part.scale.unsqueeze(-1) * (0.5 if symmetric else 1.0) * 1.001).all()
